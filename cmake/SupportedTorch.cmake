# Finds torch for the build of torchops itself, or stops with the commands that put things right.
include(TorchFromPython)

# The supported range is written once, as the dependency in pyproject.toml.
file(STRINGS ${PROJECT_SOURCE_DIR}/pyproject.toml _torch_range REGEX "\"torch>=[0-9.]+,<[0-9.]+\"")
string(REGEX MATCH "torch>=([0-9.]+),<([0-9.]+)" _torch_range "${_torch_range}")
set(_torch_min ${CMAKE_MATCH_1})
set(_torch_end ${CMAKE_MATCH_2})
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/pyproject.toml)
if(NOT TORCHOPS_TORCH_ERROR
    AND (TORCHOPS_TORCH_VERSION VERSION_LESS _torch_min OR NOT TORCHOPS_TORCH_MINOR VERSION_LESS _torch_end))
  set(TORCHOPS_TORCH_ERROR "${Python_EXECUTABLE} has torch ${TORCHOPS_TORCH_VERSION}")
endif()
if(TORCHOPS_TORCH_ERROR)
  if(NOT Python_EXECUTABLE)
    set(Python_EXECUTABLE python3)
  endif()
  # Lines that begin with a space are printed as they are.
  message(FATAL_ERROR
    " torchops is compiled against the PyTorch that it will run with, but ${TORCHOPS_TORCH_ERROR}.\n"
    " Install a supported torch and the build tools there, and build without isolation:\n"
    "     ${Python_EXECUTABLE} -m pip install \"${_torch_range}\" scikit-build-core cmake ninja\n"
    "     ${Python_EXECUTABLE} -m pip install --no-build-isolation .\n")
endif()
message(STATUS "torch ${TORCHOPS_TORCH_VERSION} in ${TORCHOPS_TORCH_DIR}")
