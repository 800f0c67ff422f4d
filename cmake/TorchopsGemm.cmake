# Defines torchops_gemm, the GEMM kernels of Hopper, if the architectures include 9.0a. Their instructions exist there
# alone, so they are compiled for nothing else. Each tiling is a translation unit with all its dtypes: half of the time
# that one kernel takes goes into CUTLASS's headers.
if(NOT CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90a(-real)?(;|$)")
  message(STATUS "GEMM kernels of Hopper: off, because 9.0a is not among the architectures")
  return()
endif()

set(_gemm_sources)
function(_torchops_gemm_unit kind name tiling)  # types...
  list(TRANSFORM ARGN REPLACE "(.+)" "TORCHOPS_INSTANTIATE(\\1)" OUTPUT_VARIABLE instances)
  list(JOIN instances "\n" instances)
  set(unit ${CMAKE_CURRENT_BINARY_DIR}/gemm/${kind}_${name}.cu)
  configure_file(src/cuda/gemm/${kind}_unit.cu.in ${unit} @ONLY)
  list(APPEND _gemm_sources ${unit})
  set(_gemm_sources ${_gemm_sources} PARENT_SCOPE)
endfunction()
foreach(tiling k128x256 k128x128 k64x128 k128x64)
  _torchops_gemm_unit(dense ${tiling} ${tiling} kFloat16 kBFloat16 kTF32)
endforeach()
foreach(tiling k128x128SharedX k128x128ResidentW)
  _torchops_gemm_unit(dense ${tiling} ${tiling} kFloat16 kBFloat16)
endforeach()
foreach(tiling k64x192 k64x256 k128x256 k128x128 k128x128SharedA)
  _torchops_gemm_unit(in_place ${tiling} ${tiling} kFloat16 kBFloat16)
endforeach()
# The most out_features and in_features.
_torchops_gemm_unit(dense_backward 128x128 "128, 128" kFloat16 kBFloat16)
_torchops_gemm_unit(dense_backward 256x128 "256, 128" kFloat16 kBFloat16)
_torchops_gemm_unit(dense_backward 128x256 "128, 256" kFloat16 kBFloat16)

add_library(torchops_gemm OBJECT ${_gemm_sources})
target_include_directories(torchops_gemm PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src)
target_compile_features(torchops_gemm PRIVATE cxx_std_20 cuda_std_20)
target_link_libraries(torchops_gemm PRIVATE torchops_flags torchops_cuda)
set_target_properties(torchops_gemm PROPERTIES
  CUDA_ARCHITECTURES 90a-real
  POSITION_INDEPENDENT_CODE ON
  CXX_VISIBILITY_PRESET hidden
  CUDA_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON)
target_sources(torchops PRIVATE $<TARGET_OBJECTS:torchops_gemm>)
set_source_files_properties(src/cuda/dense_kernel.cu src/cuda/square_matmul_kernel.cu
  PROPERTIES COMPILE_DEFINITIONS TORCHOPS_WITH_SM90A)
