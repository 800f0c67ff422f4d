# examples/serving: the models that its Python script exports, run by its C++ program.

# A single device, for which the AOTInductor packages are compiled. Not always the CPU: torch 2.11 for CUDA 13.0 has been
# seen to crash when loading a package for the CPU, even one with only ATen operators, so `make gpu-build` passes cuda.
set(TORCHOPS_SERVING_DEVICE cpu CACHE STRING "Device that the serving tests export for and run on: cpu or cuda")

# The Python package with this build's library, so that the tests need no installed package.
set(staged ${CMAKE_CURRENT_BINARY_DIR}/python)
configure_file(${PROJECT_SOURCE_DIR}/cmake/_build_info.py.in ${staged}/torchops/_core/_build_info.py @ONLY)
set(library ${CMAKE_SHARED_LIBRARY_PREFIX}torchops${CMAKE_SHARED_LIBRARY_SUFFIX})
file(MAKE_DIRECTORY ${staged}/torchops/lib)
file(CREATE_LINK ${PROJECT_BINARY_DIR}/${library} ${staged}/torchops/lib/${library} SYMBOLIC)
file(GLOB modules CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/torchops
  ${PROJECT_SOURCE_DIR}/torchops/* ${PROJECT_SOURCE_DIR}/torchops/_core/*)
list(FILTER modules EXCLUDE REGEX "^(_core|lib|.*_build_info\\.py.?|.*__pycache__)$")
foreach(module IN LISTS modules)
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/torchops/${module} ${staged}/torchops/${module} SYMBOLIC)
endforeach()

set(models ${CMAKE_CURRENT_BINARY_DIR}/served)
add_test(NAME serving_export
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/examples/serving/export.py ${models}
    --device ${TORCHOPS_SERVING_DEVICE})
set_tests_properties(serving_export PROPERTIES
  FIXTURES_SETUP models
  # The cache looks code up by operator names, so it could return code from another build of them.
  ENVIRONMENT TORCHINDUCTOR_FORCE_DISABLE_CACHES=1
  ENVIRONMENT_MODIFICATION PYTHONPATH=path_list_prepend:${staged})

build_against_install(serving_build serving ${PROJECT_SOURCE_DIR}/examples/serving
  "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror")
add_test(NAME serving_build COMMAND ${serving_build})
set_tests_properties(serving_build PROPERTIES FIXTURES_REQUIRED installed FIXTURES_SETUP program)

foreach(model router.pt2 router.ts)
  set(serve ${CMAKE_CURRENT_BINARY_DIR}/serving/serve ${models}/${model} ${models}/reference.pt
    --device ${TORCHOPS_SERVING_DEVICE})
  add_test(NAME serving_${model} COMMAND ${serve} --library $<TARGET_FILE:torchops>)
  add_test(NAME serving_${model}_without_library COMMAND ${serve})
  set_tests_properties(serving_${model} serving_${model}_without_library PROPERTIES
    FIXTURES_REQUIRED "models;program")
endforeach()
# docs/serving.md quotes both.
set_tests_properties(serving_router.pt2_without_library PROPERTIES
  PASS_REGULAR_EXPRESSION "serve: Could not find schema for myops::dense")
set_tests_properties(serving_router.ts_without_library PROPERTIES
  PASS_REGULAR_EXPRESSION "serve: .*Unknown builtin op: myops::dense")
