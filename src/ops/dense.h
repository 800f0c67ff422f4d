#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "export.h"

namespace torchops {

/// A fully connected layer with a logistic gate: y = sigmoid(x @ w.T + b).
///
/// x: (..., in); w: (out, in); b: (out,) or none; all of one floating-point dtype and device.
/// Returns a new contiguous tensor (..., out). The pre-activation is never stored.
/// Throws c10::Error, with nothing computed, when shapes, dtypes or devices do not fit.
TORCHOPS_API at::Tensor dense(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b = {});

/// The argument checks of dense(), for kernels of other backends.
TORCHOPS_API void check_dense(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

namespace detail {

/// Backward of the sigmoid in dense(): dz = grad * y * (1 - y), and the gradient of the bias, the sum of dz over the
/// rows. grad, y: (..., out) of one dtype. Returns (dz like y, db of shape (out,)) where `mask` asks for them, and
/// empty tensors elsewhere; dz is not stored if only db is wanted.
std::tuple<at::Tensor, at::Tensor> dense_backward(const at::Tensor& grad, const at::Tensor& y,
                                                  std::array<bool, 2> mask);

/// The gradients (dx like x, dw like w, db of shape (out,)) of y = dense(x, w, b) where `mask` asks for them, and empty
/// tensors elsewhere. grad, y: (..., out); x: (..., in); w: (out, in); all of one dtype.
std::tuple<at::Tensor, at::Tensor, at::Tensor> dense_gradients(const at::Tensor& grad, const at::Tensor& y,
                                                               const at::Tensor& x, const at::Tensor& w,
                                                               std::array<bool, 3> mask);

/// The same by dense_backward() and products, with dz in memory. Reads x only for dw, and w only for dx; the operand
/// that is not read may be undefined. Gradients that were not asked for are undefined too.
std::array<at::Tensor, 3> dense_gradients_in_parts(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& x,
                                                   const at::Tensor& w, std::array<bool, 3> mask);

/// The argument checks of dense_backward() and dense_gradients(), for every backend.
void check_dense_backward(const at::Tensor& grad, const at::Tensor& y);
void check_dense_gradients(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& x, const at::Tensor& w);

/// Whether dense_gradients() has a kernel that computes dx, at least, while it reads grad and y, rather than by a
/// product of its own: there is one for w's device, dtype and shape, and the path is not kCublas. The number of rows
/// makes no difference, so a graph traced for any number of rows takes one way or the other without a guard.
bool has_one_pass_gradients(const at::Tensor& w);

/// Sets the function that tells whether there is such a kernel for w (n x k), and returns the previous one. The CUDA
/// part of the library sets it; until then there is no kernel.
using HasOnePassKernel = bool (*)(c10::Device device, at::ScalarType dtype, int64_t n, int64_t k);
TORCHOPS_API HasOnePassKernel set_one_pass_kernel(HasOnePassKernel has_kernel);

}  // namespace detail
}  // namespace torchops
