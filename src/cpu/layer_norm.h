#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_layer_norm_backward_cpu_dispatch.h>
#include <ATen/ops/ones.h>

#include <algorithm>
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

/// The gradients of x, weight and bias that `output_mask` asks for, by ATen, which takes shape and dtype of the last
/// two from the parameters: ones stand in for a missing weight, and the weight for the bias.
///
/// ATen accumulates the gradients of weight and bias in the dtype of x. In 16 bits such sums stop growing after a few
/// hundred rows, so x is widened for them, panel by panel.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_gradients(const at::Tensor& grad, const at::Tensor& x,
                                                                           at::IntArrayRef normalized_shape,
                                                                           const at::Tensor& mean,
                                                                           const at::Tensor& rstd, const Affine& affine,
                                                                           std::array<bool, 3> output_mask) {
  std::optional<at::Tensor> weight = affine.weight;
  if (!weight && (output_mask[1] || output_mask[2])) weight = at::ones(normalized_shape, x.options());
  const at::ScalarType wide = detail::moments_dtype(x.scalar_type());
  if (x.scalar_type() == wide || !(output_mask[1] || output_mask[2]) || x.numel() == 0) {
    return at::cpu::native_layer_norm_backward(grad.contiguous(), x.contiguous(), normalized_shape, mean.contiguous(),
                                               rstd.contiguous(), weight, /*bias=*/weight, output_mask);
  }
  const at::Tensor wide_weight = weight->to(wide).flatten();
  const at::Tensor dx = output_mask[0] ? at::empty(x.sizes(), x.options()) : at::Tensor();
  at::Tensor dweight, dbias;
  const auto add = [](at::Tensor& sum, const at::Tensor& part) { sum = sum.defined() ? sum.add_(part) : part; };
  const int64_t rows = mean.numel(), features = x.numel() / rows;
  const auto row_bytes = features * static_cast<int64_t>(c10::elementSize(wide));
  const int64_t step = std::max(kMaxScratchBytes / row_bytes, int64_t{1});
  const auto matrix = [&](const at::Tensor& t) { return t.reshape({rows, -1}); };
  const at::Tensor grads = matrix(grad), xs = matrix(x), means = matrix(mean), rstds = matrix(rstd);
  for (int64_t begin = 0; begin < rows; begin += step) {
    const auto panel = [&](const at::Tensor& t) { return t.narrow(0, begin, std::min(step, rows - begin)); };
    const auto widened = [&](const at::Tensor& t) { return panel(t).to(wide).contiguous(); };
    const auto [dx_panel, dweight_panel, dbias_panel] = at::cpu::native_layer_norm_backward(
        widened(grads), widened(xs), {features}, widened(means), widened(rstds), wide_weight,
        /*bias=*/wide_weight, output_mask);
    if (output_mask[0]) panel(dx.view({rows, features})).copy_(dx_panel);
    if (output_mask[1]) add(dweight, dweight_panel);
    if (output_mask[2]) add(dbias, dbias_panel);
  }
  const auto shaped = [&](const at::Tensor& t) { return t.defined() ? t.view(normalized_shape) : t; };
  return {dx, shaped(dweight), shaped(dbias)};
}

}  // namespace torchops::cpu
