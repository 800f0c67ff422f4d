#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/native_layer_norm_backward_cpu_dispatch.h>
#include <ATen/ops/ones.h>

#include <array>
#include <optional>
#include <tuple>

#include "ops/layer_norm.h"

namespace torchops::cpu {

/// ATen keeps the moments of a half-precision input in float32 if weight and bias are float32, else in half precision.
/// They are a row's worth of numbers, so they are handed over in float32, with a weight of ones where there is none.
struct Affine {
  std::optional<at::Tensor> weight, bias;

  Affine(const at::Tensor& x, at::IntArrayRef normalized_shape, const std::optional<at::Tensor>& w,
         const std::optional<at::Tensor>& b) {
    const at::ScalarType dtype = detail::moments_dtype(x.scalar_type());
    if (w) weight = w->to(dtype);
    if (b) bias = b->to(dtype);
    if (!w && x.scalar_type() != dtype) weight = at::ones(normalized_shape, x.options().dtype(dtype));
  }
};

/// The gradients of x, weight and bias that `mask` asks for, by ATen, which takes shape and dtype of the last two from
/// the parameters: ones stand in for a weight that is none, and the weight for the bias.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_gradients(const at::Tensor& grad, const at::Tensor& x,
                                                                           at::IntArrayRef normalized_shape,
                                                                           const at::Tensor& mean,
                                                                           const at::Tensor& rstd, const Affine& affine,
                                                                           std::array<bool, 3> mask) {
  std::optional<at::Tensor> weight = affine.weight;
  if (!weight && (mask[1] || mask[2])) weight = at::ones(normalized_shape, x.options());
  return at::cpu::native_layer_norm_backward(grad.contiguous(), x.contiguous(), normalized_shape, mean.contiguous(),
                                             rstd.contiguous(), weight, /*bias=*/weight, mask);
}

}  // namespace torchops::cpu
