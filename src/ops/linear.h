#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchops::detail {

/// x @ w.T + b, as at::linear. A GPU that multiplies split float32 numbers faster than whole ones does so here.
///
/// x: (..., in); w: (out, in); b: (out,) or none; all of one floating-point dtype and device.
/// Returns a new contiguous tensor (..., out). For modules whose own kernel has nothing to fuse with the product.
/// Throws c10::Error, with nothing computed, when shapes, dtypes or devices do not fit.
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

/// The argument checks of linear(), for every backend.
void check_linear_layer(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

}  // namespace torchops::detail
