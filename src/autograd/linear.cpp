#include "autograd/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>

#include "autograd/recipe.h"
#include "ops/layer_norm.h"

namespace torchops::autograd {

Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  const Tensor rounded = x.to(w.scalar_type());
  if (x.dim() > 1) return at::linear(rounded, w, b);
  const Tensor z = matmul(rounded, w.t());
  return b ? z + *b : z;
}

Tensor weight_gradient(const Tensor& dz, const Tensor& x) {
  return at::mm(detail::as_rows(dz).t(), detail::as_rows(x.to(dz.scalar_type())));
}

Tensor bias_gradient(const Tensor& dz) { return detail::as_rows(dz).sum(0); }

Tensor silu_written_out(const Tensor& u) {
  const Tensor wide = u.to(detail::moments_dtype(u.scalar_type()));
  return (wide * at::sigmoid(wide)).to(u.scalar_type());
}

}  // namespace torchops::autograd
