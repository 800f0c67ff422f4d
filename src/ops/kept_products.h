#pragma once

#include <cstdint>

namespace at {
class Tensor;
}

namespace torchops::detail {

/// What a gate multiplies: a tensor in gate(), another product in glu() and, between two other layers, in transition().
enum class Gated { kTensor, kProduct, kHidden };

/// Whether training of gate(), glu() and transition() saves the products x @ w.T for backward, which otherwise
/// recomputes them: on the CPU and on CUDA, where that takes longer than writing and reading them.
bool keeps_products(const at::Tensor& x, const at::Tensor& w, Gated of);

/// On CUDA in 16 bits, with more features in, or if one number of features is odd and neither is more than that of one
/// pass, gradients of gate() copy rows that are not aligned to 16 bytes, and compute the product again from the copies.
constexpr int64_t kMostUncopied = 192, kMostOfOnePass = 128;

}  // namespace torchops::detail
