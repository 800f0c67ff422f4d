#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <array>
#include <optional>
#include <tuple>

#include "cpu/panels.h"
#include "ops/layer_norm.h"

namespace torchops::cpu {

/// ATen keeps the moments of a half-precision input in float32 if weight and bias are float32, else in half precision.
/// So these, only one row of numbers, are passed in float32, and the weight as ones if there is none.
struct Affine {
  std::optional<at::Tensor> weight, bias;

  Affine(const at::Tensor& x, at::IntArrayRef normalized_shape, const std::optional<at::Tensor>& w,
         const std::optional<at::Tensor>& b) {
    const at::ScalarType dtype = detail::moments_dtype(x.scalar_type());
    if (w) weight = w->to(dtype).contiguous();
    if (b) bias = b->to(dtype).contiguous();
    if (!w && x.scalar_type() != dtype) weight = at::ones(normalized_shape, x.options().dtype(dtype));
  }
};

/// The gradients of x, weight and bias that `output_mask` asks for, those of weight and bias in the dtype of the
/// moments.
///
/// ATen accumulates them in the dtype of x. In 16 bits such sums stop growing after a few hundred rows, so these are
/// added in float32, by chunks of rows whose number depends only on sizes.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_gradients(const at::Tensor& grad, const at::Tensor& x,
                                                                    at::IntArrayRef normalized_shape,
                                                                    const at::Tensor& mean, const at::Tensor& rstd,
                                                                    const Affine& affine,
                                                                    std::array<bool, 3> output_mask);

}  // namespace torchops::cpu
