#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "export.h"

namespace torchops {

/// (x - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions `normalized_shape`, with the biased
/// variance, as torch.nn.functional.layer_norm. x: (..., *normalized_shape); weight, bias: normalized_shape, or none;
/// one floating-point dtype and device, except that weight and bias may be float32 if x is float16 or bfloat16. Returns
/// a new contiguous tensor of x's dtype. Throws c10::Error when arguments do not fit.
TORCHOPS_API at::Tensor layer_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                   const std::optional<at::Tensor>& weight = {},
                                   const std::optional<at::Tensor>& bias = {}, double eps = 1e-5);

/// Overwrites x with layer_norm(x, ...) and returns x. Training saves one copy of x or, without weight and bias, only
/// two numbers per row. weight and bias may overlap x; they are then read first. A call that the checks refuse leaves x
/// untouched; if memory runs out on the CPU, x may be partly overwritten, and its version counter has moved.
TORCHOPS_API at::Tensor& layer_norm_(at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                     const std::optional<at::Tensor>& weight = {},
                                     const std::optional<at::Tensor>& bias = {}, double eps = 1e-5);

inline at::Tensor layer_norm(const at::Tensor& x, at::IntArrayRef normalized_shape,
                             const std::optional<at::Tensor>& weight = {}, const std::optional<at::Tensor>& bias = {},
                             double eps = 1e-5) {
  return layer_norm(x, c10::fromIntArrayRefSlow(normalized_shape), weight, bias, eps);
}

inline at::Tensor& layer_norm_(at::Tensor& x, at::IntArrayRef normalized_shape,
                               const std::optional<at::Tensor>& weight = {}, const std::optional<at::Tensor>& bias = {},
                               double eps = 1e-5) {
  return layer_norm_(x, c10::fromIntArrayRefSlow(normalized_shape), weight, bias, eps);
}

/// The argument checks of layer_norm() and layer_norm_(), for kernels of other backends.
TORCHOPS_API void check_layer_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                   const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias);
TORCHOPS_API void check_layer_norm_(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias);

namespace detail {

/// The dtype in which mean and 1 / sqrt(var + eps) are kept: at least float32.
inline at::ScalarType moments_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

/// Allocates (mean, rstd), both of shape (..., 1, ..., 1), for rows of the last `trailing_dims` dimensions of x.
std::tuple<at::Tensor, at::Tensor> empty_moments(const at::Tensor& x, size_t trailing_dims);

/// layer_norm() with what backward needs: (y, mean, rstd), the moments of shape (..., 1, ..., 1) in moments_dtype.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_with_moments(const at::Tensor& x,
                                                                       c10::SymIntArrayRef normalized_shape,
                                                                       const std::optional<at::Tensor>& weight,
                                                                       const std::optional<at::Tensor>& bias,
                                                                       double eps);

/// layer_norm_() that returns (mean, rstd). Called only by eager training.
std::tuple<at::Tensor, at::Tensor> layer_norm_with_moments_(at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                                                            const std::optional<at::Tensor>& weight,
                                                            const std::optional<at::Tensor>& bias, double eps);

/// The gradients (dx, dweight, dbias) of layer_norm() where `output_mask` asks for them, and empty tensors elsewhere.
/// Those of the parameters have norm_gradient_dtype().
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                                   c10::SymIntArrayRef normalized_shape,
                                                                   const at::Tensor& mean, const at::Tensor& rstd,
                                                                   const std::optional<at::Tensor>& weight,
                                                                   std::array<bool, 3> output_mask);

/// The dtype of the gradients of weight and bias: the weight's; without one, at least float32, since the bias may be.
inline at::ScalarType norm_gradient_dtype(const at::Tensor& x, const std::optional<at::Tensor>& weight) {
  return weight ? weight->scalar_type() : moments_dtype(x.scalar_type());
}

/// The argument checks of the above, for every backend.
void check_layer_norm_backward(const at::Tensor& grad, const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                               const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& weight);

}  // namespace detail
}  // namespace torchops
