# Sources with vectors of ATen's are compiled once for each instruction set that ATen chooses from when it runs; the macro
# CPU_CAPABILITY names it, as in ATen. One for any processor comes first: where a linker keeps one of several copies of an
# inline function, it keeps the first.
function(torchops_add_vectors capability)
  add_library(torchops_${capability} OBJECT src/cpu/gated_vector.cpp src/cpu/layer_norm_vector.cpp)
  target_include_directories(torchops_${capability} PRIVATE src)
  target_link_libraries(torchops_${capability} PRIVATE torchops::libtorch torchops_flags)
  target_compile_definitions(torchops_${capability} PRIVATE CPU_CAPABILITY=${capability} CPU_CAPABILITY_${capability})
  target_compile_options(torchops_${capability} PRIVATE ${ARGN})
  set_target_properties(torchops_${capability} PROPERTIES POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_sources(torchops PRIVATE $<TARGET_OBJECTS:torchops_${capability}>)
endfunction()

torchops_add_vectors(DEFAULT)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  torchops_add_vectors(AVX2 -mavx2 -mfma -mf16c)
  # g++ 12 takes the undefined values in its own <avx512fintrin.h> for mistakes (GCC bug 105593), or for possible ones
  # where it optimises more.
  set(quiet $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  torchops_add_vectors(AVX512 ${quiet} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c)
  set_source_files_properties(src/cpu/gated.cpp src/cpu/layer_norm_gradients.cpp src/cpu/layer_norm_kernel.cpp
    PROPERTIES COMPILE_DEFINITIONS TORCHOPS_X86_VECTORS)
endif()
