# Installs the library, its headers and the CMake package; in a Python build, inside the Python package.
include(CMakePackageConfigHelpers)
set(_package_dir lib/cmake/torchops)

# As the package's metadata has it. The build backend asks WheelName.cmake for it before CMake configures.
set(TORCHOPS_VERSION "${PROJECT_VERSION}+${TORCHOPS_LOCAL_VERSION}")
if(SKBUILD_PROJECT_VERSION_FULL)
  if(SKBUILD_PROJECT_VERSION_FULL MATCHES "[+]" AND NOT SKBUILD_PROJECT_VERSION_FULL STREQUAL TORCHOPS_VERSION)
    message(FATAL_ERROR
      " This package is to be torchops ${SKBUILD_PROJECT_VERSION_FULL}, but what is configured is ${TORCHOPS_VERSION}.\n"
      " ${PROJECT_BINARY_DIR} remembers other options: remove it, and build again.\n")
  endif()
  set(TORCHOPS_VERSION "${SKBUILD_PROJECT_VERSION_FULL}")
endif()

set(_rpath)
if(TORCHOPS_WITH_CUDA)
  # libtorchops_gemm.so is beside libtorchops.so. Of several builds, release/merge_wheels.py has put one beside their folders.
  set(_rpath "$ORIGIN" "$ORIGIN/../../cu${_cuda_major}")
  if(TORCHOPS_GEMM_LIBRARY)
    install(FILES "${TORCHOPS_GEMM_LIBRARY}" DESTINATION lib)
  else()
    install(TARGETS torchops_gemm LIBRARY DESTINATION lib COMPONENT gemm)
  endif()
endif()
if(SKBUILD)
  # The prefix is site-packages/torchops, or a folder in its folder `builds`, so that torch is a neighbour.
  list(APPEND _rpath "$ORIGIN/../../torch/lib" "$ORIGIN/../../../../torch/lib")
  configure_file(cmake/_build_info.py.in ${PROJECT_BINARY_DIR}/_build_info.py @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/_build_info.py DESTINATION _core)
else()
  list(APPEND _rpath "${TORCHOPS_TORCH_DIR}/lib")
endif()
set_target_properties(torchops PROPERTIES INSTALL_RPATH "${_rpath}")

install(TARGETS torchops EXPORT torchops LIBRARY DESTINATION lib)
install(FILES ${TORCHOPS_HEADERS} DESTINATION include/torchops/ops)
install(EXPORT torchops FILE torchopsTargets.cmake NAMESPACE torchops:: DESTINATION ${_package_dir})
configure_package_config_file(cmake/torchopsConfig.cmake.in ${PROJECT_BINARY_DIR}/torchopsConfig.cmake
  INSTALL_DESTINATION ${_package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/torchopsConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES
    ${PROJECT_BINARY_DIR}/torchopsConfig.cmake ${PROJECT_BINARY_DIR}/torchopsConfigVersion.cmake
    cmake/TorchFromPython.cmake
  DESTINATION ${_package_dir})
