#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// Linear layers and SiLU in differentiable ATen operators, for the operators that are decomposed into these.
namespace torchops::autograd {

/// x @ w.T + b; x (..., in) may be float32 if w has 16 bits, and is then rounded.
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

/// Whether both are plain tensors of which no derivative is taken and no graph is made, so that a kernel may take the
/// place of an ATen operator that a compiler could fuse or a transform knows better.
bool is_eager_on_cuda(const at::Tensor& a, const at::Tensor& b);

/// The gradients of w and b for the cotangent dz (..., out): dz.T @ x, and dz summed over the rows.
at::Tensor weight_gradient(const at::Tensor& dz, const at::Tensor& x);
at::Tensor bias_gradient(const at::Tensor& dz);

/// u * sigmoid(u), rounded once as at::silu does, whose own backward has no forward-mode derivative.
at::Tensor silu_written_out(const at::Tensor& u);

}  // namespace torchops::autograd
