#pragma once

#include <ATen/core/Tensor.h>

namespace torchops::detail {

/// What a gate multiplies: a tensor in gate(), another product in glu().
enum class Gated { kTensor, kProduct };

/// Whether training of gate() and glu() saves the products x @ w.T for backward, which otherwise recomputes them: on
/// the CPU and on CUDA, where that takes longer than writing and reading them.
bool keeps_products(const at::Tensor& x, const at::Tensor& w, Gated of);

}  // namespace torchops::detail
