#include "ops/matrices.h"

#include <ATen/TensorUtils.h>

#include <algorithm>
#include <numeric>

namespace torchops::detail {
namespace {

using at::Tensor;

template <class F>
Operands map(const Operands& operands, const F& f) {
  Operands out;
  for (const Tensor& operand : operands) out.push_back(f(operand));
  return out;
}

// Merges the leading dimensions of all operands into one. If that is impossible, splits along the smallest of them and
// tries again.
void split(const Operands& operands, int64_t trailing_dims, c10::function_ref<void(const Operands&)> f) {
  const Tensor& x = operands[0];
  const int64_t leading_dims = x.dim() - trailing_dims;
  if (leading_dims == 0) return f(map(operands, [](const Tensor& t) { return t.unsqueeze(0); }));
  const auto merged_shape = [&](const Tensor& t) {
    at::DimVector shape{c10::multiply_integers(t.sizes().slice(0, leading_dims))};
    shape.append(t.sizes().begin() + leading_dims, t.sizes().end());
    return shape;
  };
  const bool mergeable = std::all_of(operands.begin(), operands.end(), [&](const Tensor& t) {
    return at::detail::computeStride(t.sizes(), t.strides(), merged_shape(t)).has_value();
  });
  if (mergeable) return f(map(operands, [&](const Tensor& t) { return t.view(merged_shape(t)); }));
  const auto* const smallest = std::min_element(x.sizes().begin(), x.sizes().begin() + leading_dims);
  for (int64_t i = 0; i < *smallest; ++i) {
    split(map(operands, [&](const Tensor& t) { return t.select(smallest - x.sizes().begin(), i); }), trailing_dims, f);
  }
}

}  // namespace

void for_each_matrix(Operands operands, int64_t trailing_dims, c10::function_ref<void(const Operands&)> f) {
  const Tensor x = operands[0];
  if (x.numel() == 0) return;
  if (x.dim() == trailing_dims + 1) return f(operands);
  at::DimVector order(x.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end() - trailing_dims,
                   [&](int64_t a, int64_t b) { return x.stride(a) > x.stride(b); });
  split(map(operands, [&](const Tensor& t) { return t.permute(order); }), trailing_dims, f);
}

}  // namespace torchops::detail
