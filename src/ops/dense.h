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

/// Through the sigmoid of dense(): dz = grad * y * (1 - y), and its sum over the rows, the gradient of the bias.
/// grad, y: (..., out) of one dtype. Returns (dz like y, db of shape (out,)) where `mask` asks for them, empty tensors
/// elsewhere; dz is not stored for db alone.
std::tuple<at::Tensor, at::Tensor> dense_backward(const at::Tensor& grad, const at::Tensor& y,
                                                  std::array<bool, 2> mask);

/// The gradients (dx like x, dw like w, db of shape (out,)) of y = dense(x, w, b), where `mask` asks for them, empty
/// tensors elsewhere. grad, y: (..., out); x: (..., in); w: (out, in); of one dtype.
std::tuple<at::Tensor, at::Tensor, at::Tensor> dense_gradients(const at::Tensor& grad, const at::Tensor& y,
                                                               const at::Tensor& x, const at::Tensor& w,
                                                               std::array<bool, 3> mask);

/// The same by dense_backward() and products, with dz in memory. Of x and w it reads what the gradients asked for need:
/// x for dw, w for dx. The other may be undefined, and so are the gradients that nobody asked for.
std::array<at::Tensor, 3> dense_gradients_in_parts(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& x,
                                                   const at::Tensor& w, std::array<bool, 3> mask);

/// The argument checks of dense_backward() and dense_gradients(), for every backend.
void check_dense_backward(const at::Tensor& grad, const at::Tensor& y);
void check_dense_gradients(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& x, const at::Tensor& w);

/// Whether dense_gradients() for dx and dw is one pass over the rows for such a w, rather than the parts one after the
/// other: there is a kernel for its device, dtype and shape, and the path is not kCublas. The number of rows makes no
/// difference, so a graph that is traced for any number of them takes one way or the other without a guard.
bool has_one_pass_gradients(const at::Tensor& w);

/// Whether there is that kernel for w (n x k). Set by the library's CUDA part; until then there is none. Returns what
/// was set before.
using HasOnePassKernel = bool (*)(c10::Device device, at::ScalarType dtype, int64_t n, int64_t k);
TORCHOPS_API HasOnePassKernel set_one_pass_kernel(HasOnePassKernel has_kernel);

}  // namespace detail
}  // namespace torchops
