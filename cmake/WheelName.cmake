# What a wheel's metadata says and only CMake knows, for the build backend, which needs it before it configures:
#   cmake -DOUTPUT=file -DPython_EXECUTABLE=... [-DTORCHOPS_CUDA=...] -P WheelName.cmake
# writes two lines, torch==2.13.* and torch213.cu130.
cmake_minimum_required(VERSION 3.22...4.0)
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
include(SupportedTorch)
include(CudaDecision)
file(WRITE "${OUTPUT}" "torch==${TORCHOPS_TORCH_MINOR}.*\n${TORCHOPS_LOCAL_VERSION}\n")
