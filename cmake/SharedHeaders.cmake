# Reading torch's headers takes the compilers longer than most sources do. In the builds of `make demo` and `make test`, C++
# gets them precompiled, and CUDA sources that define no name twice are one unit (with CMake 3.31 or newer). An #include that
# a source lacks may go unseen there, and a compiler cache finds less. `pip install .`, wheels and all other builds do without.
foreach(_header IN ITEMS
  ATen/core/Tensor.h ATen/core/dispatch/Dispatcher.h torch/csrc/autograd/custom_function.h torch/library.h)
  target_precompile_headers(torchops PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<${_header}$<ANGLE-R>>")
endforeach()

set(_unit_a dense gate glu triangle_multiplicative_update)
set(_unit_b layer_norm transition)
set(_unit_c sigmoid softmax square_matmul)
set_target_properties(torchops PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
foreach(_unit IN ITEMS a b c)
  list(TRANSFORM _unit_${_unit} REPLACE "(.+)" "src/cuda/\\1_kernel.cu" OUTPUT_VARIABLE _sources)
  set_source_files_properties(${_sources} PROPERTIES UNITY_GROUP ${_unit})
endforeach()
