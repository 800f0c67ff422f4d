#pragma once

#include <ATen/core/Tensor.h>

namespace torchops::cuda {

/// out = a @ b for batches of matrices, by cuBLAS or, in float32, split products. In 16 bits on compute capability 9.0
/// and up, sums are in float32 whatever torch's settings, unless they are long and few.
at::Tensor& batched_product_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

}  // namespace torchops::cuda
