#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

// Layer norms in differentiable ATen operators, for the operators that are decomposed into these.
namespace torchops::autograd {

struct Normalized {
  at::Tensor xhat, mean, rstd;
};

/// xhat = (x - mean) * rstd over the last `dims` dimensions, with the moments as functions of x, in at least float32.
/// at::layer_norm can't replace it where this is differentiated twice: the gradient of its weight treats the moments as
/// constants.
Normalized normalize(const at::Tensor& x, size_t dims, const at::Scalar& eps);

/// xhat * weight + bias, rounded to `dtype`.
at::Tensor scale_and_shift(at::Tensor xhat, const std::optional<at::Tensor>& weight,
                           const std::optional<at::Tensor>& bias, at::ScalarType dtype);

/// The gradients of x, weight and bias if `output_mask` asks for them, else undefined: that of x in `dtype`, the others
/// not rounded. With h = grad * weight:
///   dx = rstd * (h - mean(h) - xhat * mean(h * xhat)),  dweight = sum(grad * xhat),  dbias = sum(grad) over the rows.
std::array<at::Tensor, 3> normalization_gradients(const at::Tensor& grad, const Normalized& normalized, int64_t dims,
                                                  const std::optional<at::Tensor>& weight,
                                                  std::array<bool, 3> output_mask, at::ScalarType dtype);

}  // namespace torchops::autograd
