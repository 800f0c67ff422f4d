# Supported ranges of other packages are written once, in pyproject.toml: "torch>=2.11,<2.16".
get_filename_component(_torchops_pyproject "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml" ABSOLUTE)

# Sets `least` and `end` to the two versions of the range of `package`: least <= version < end.
function(torchops_supported_range package least end)
  file(STRINGS "${_torchops_pyproject}" line REGEX "\"${package}>=[0-9.]+,<[0-9.]+\"" LIMIT_COUNT 1)
  string(REGEX MATCH "${package}>=([0-9.]+),<([0-9.]+)" range "${line}")
  set(${least} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  set(${end} "${CMAKE_MATCH_2}" PARENT_SCOPE)
endfunction()
