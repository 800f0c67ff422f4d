# Finds torch for the build of torchops itself, or stops with the commands that put things right.
include(TorchFromPython)
include(Pyproject)

torchops_supported_range(torch _torch_least _torch_end)
if(NOT TORCHOPS_TORCH_ERROR
    AND (TORCHOPS_TORCH_VERSION VERSION_LESS _torch_least OR NOT TORCHOPS_TORCH_MINOR VERSION_LESS _torch_end))
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
    "     ${Python_EXECUTABLE} -m pip install \"torch>=${_torch_least},<${_torch_end}\" scikit-build-core cmake ninja\n"
    "     ${Python_EXECUTABLE} -m pip install --no-build-isolation .\n")
endif()
message(STATUS "torch ${TORCHOPS_TORCH_VERSION} in ${TORCHOPS_TORCH_DIR}")
