# Where there are to be CUDA kernels (CudaDecision.cmake), enables the CUDA language and defines torchops_cuda, which carries
# what the kernels compile and link with, and torchops_kernels, which is that without torch.
include(CudaDecision)
if(NOT TORCHOPS_WITH_CUDA)
  return()
endif()

# torch has loaded the one CUDA runtime of the process already. PyPI's nvcc looks for libraries in lib64, while they are in
# lib, and has no libcudart.so to link, only libcudart.so.<major>.
get_filename_component(_pip_nvidia "${TORCHOPS_TORCH_DIR}/../nvidia" REALPATH)
get_filename_component(_nvcc "${CMAKE_CUDA_COMPILER}" REALPATH)
string(FIND "${_nvcc}" "${_pip_nvidia}/" _nvcc_in_pip)
if(_nvcc_in_pip EQUAL 0)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  get_filename_component(_pip_cuda "${_nvcc}/../../lib" ABSOLUTE)
  string(APPEND CMAKE_CUDA_FLAGS " -L${_pip_cuda}")
  file(GLOB _cudart "${_pip_cuda}/libcudart.so.*")
else()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
endif()
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake before 3.26 does not know that nvcc has C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
message(STATUS "CUDA kernels: on, by ${CMAKE_CUDA_COMPILER} for ${CMAKE_CUDA_ARCHITECTURES}")

add_library(torchops_kernels INTERFACE)
target_include_directories(torchops_kernels SYSTEM INTERFACE "${TORCHOPS_CUTLASS_DIR}")
target_link_libraries(torchops_kernels INTERFACE ${_cudart})
# CUTLASS with device asserts serialises its matrix instructions, so they are off in every build type.
target_compile_options(torchops_kernels INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-DNDEBUG;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${TORCHOPS_WERROR}>>:-Werror=all-warnings;-Xcompiler=-Werror>)

# By default, nvcc 13.0 leaves machine code uncompressed. Every driver of CUDA 13 reads this mode; some of CUDA 12 don't.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  target_compile_options(torchops_kernels INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
endif()

# Headers that torch's own include (cuBLAS, cuSPARSE, ...) but a bare compiler lacks come with torch's pip packages.
file(GLOB _cuda_pip_includes "${TORCHOPS_TORCH_DIR}/../nvidia/*/include")
add_library(torchops_cuda INTERFACE)
target_include_directories(torchops_cuda SYSTEM INTERFACE ${_cuda_pip_includes})
target_link_libraries(torchops_cuda INTERFACE torchops_kernels torchops::libtorch_cuda)
