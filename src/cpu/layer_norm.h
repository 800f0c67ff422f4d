#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <optional>

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

}  // namespace torchops::cpu
