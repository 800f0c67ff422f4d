#pragma once

#include <ATen/core/Tensor.h>

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

/// Which kernels dense() and its gradients take on CUDA: the fused ones where they are faster, wherever they can run,
/// or never.
enum class DensePath { kAuto, kFused, kCublas };

/// The path in force: that of TORCHOPS_DENSE_PATH (auto, fused or cublas) until the operator _dense_path sets another.
DensePath dense_path();

/// Through the sigmoid of dense(): dz = grad * y * (1 - y), and its sum over the rows, the gradient of the bias.
/// grad, y: (..., out) of one dtype. Returns (dz like y, db of shape (out,)).
std::tuple<at::Tensor, at::Tensor> dense_backward(const at::Tensor& grad, const at::Tensor& y);

/// All gradients of dense() at once, (dx like x, dw like w, db of shape (out,)), from the cotangent grad and the output
/// y; or none, with nothing computed, where the kernel is not for such tensors. They are plain CUDA tensors.
using DenseGradients = std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> (*)(const at::Tensor& grad,
                                                                                         const at::Tensor& y,
                                                                                         const at::Tensor& x,
                                                                                         const at::Tensor& w);

/// CUDA's kernel of that kind, or null. No operator: nothing but eager backward calls it, and what records or
/// transforms operators (torch.compile, dispatch modes, subclasses, torch.func) is given dense_backward() and products
/// instead.
DenseGradients dense_gradients();
void set_dense_gradients(DenseGradients kernel);

}  // namespace detail
}  // namespace torchops
