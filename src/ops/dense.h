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
/// rows. grad, y: (..., out) of one dtype. Returns (dz like y, db of shape (out,)) where `output_mask` asks for them,
/// and empty tensors elsewhere; dz is not stored if only db is wanted.
std::tuple<at::Tensor, at::Tensor> dense_backward(const at::Tensor& grad, const at::Tensor& y,
                                                  std::array<bool, 2> output_mask);

/// The gradients (dx like x, dw like w, db of shape (out,)) of y = dense(x, w, b) where `output_mask` asks for them,
/// and empty tensors elsewhere. grad, y: (..., out); x: (..., in); w: (out, in); all of one dtype.
std::tuple<at::Tensor, at::Tensor, at::Tensor> dense_gradients(const at::Tensor& grad, const at::Tensor& y,
                                                               const at::Tensor& x, const at::Tensor& w,
                                                               std::array<bool, 3> output_mask);

/// The same by dense_backward() and products, with dz in memory. Reads x only for dw, and w only for dx; the operand
/// that is not read may be undefined. Gradients that were not asked for are undefined too.
std::array<at::Tensor, 3> dense_gradients_in_parts(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& x,
                                                   const at::Tensor& w, std::array<bool, 3> output_mask);

/// The argument checks of dense_backward() and dense_gradients(), for every backend.
void check_dense_backward(const at::Tensor& grad, const at::Tensor& y);
void check_dense_gradients(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& x, const at::Tensor& w);

}  // namespace detail
}  // namespace torchops
