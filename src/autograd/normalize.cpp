#include "autograd/normalize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>

#include <vector>

#include "ops/layer_norm.h"

namespace torchops::autograd {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

std::vector<int64_t> trailing_dims(size_t count) {
  std::vector<int64_t> dims;
  for (auto dim = -static_cast<int64_t>(count); dim < 0; ++dim) dims.push_back(dim);
  return dims;
}

}  // namespace

Normalized normalize(const Tensor& x, size_t dims, const at::Scalar& eps) {
  const Tensor wide = x.to(detail::moments_dtype(x.scalar_type()));
  const auto moments = at::var_mean(wide, trailing_dims(dims), /*correction=*/0, /*keepdim=*/true);
  const Tensor rstd = at::rsqrt(std::get<0>(moments) + eps);
  return {(wide - std::get<1>(moments)) * rstd, std::get<1>(moments), rstd};
}

Tensor scale_and_shift(Tensor xhat, const OptionalTensor& weight, const OptionalTensor& bias, at::ScalarType dtype) {
  if (weight) xhat = xhat * *weight;
  if (bias) xhat = xhat + *bias;
  return xhat.to(dtype);
}

std::array<Tensor, 3> normalization_gradients(const Tensor& grad, const Normalized& normalized, int64_t dims,
                                              const OptionalTensor& weight, std::array<bool, 3> output_mask,
                                              at::ScalarType dtype) {
  const std::vector<int64_t> over = trailing_dims(dims);
  const auto& [xhat, mean, rstd] = normalized;
  std::array<Tensor, 3> out;
  if (output_mask[0]) {
    const Tensor h = weight ? grad * *weight : grad;
    out[0] = rstd * (h - h.mean(over, true) - xhat * (h * xhat).mean(over, true));
  }
  const auto sum_rows = [&](const Tensor& t) { return dims == t.dim() ? t : t.flatten(0, -dims - 1).sum(0); };
  if (output_mask[1]) out[1] = sum_rows(grad * xhat);
  if (output_mask[2]) out[2] = sum_rows(grad);
  if (output_mask[0]) out[0] = out[0].to(dtype);
  return out;
}

}  // namespace torchops::autograd
