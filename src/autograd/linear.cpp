#include "autograd/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>

#include "autograd/recipe.h"
#include "ops/layer_norm.h"
#include "ops/matrices.h"

namespace torchops::autograd {

Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  const Tensor rounded = x.to(w.scalar_type());
  if (x.dim() > 1) return at::linear(rounded, w, b);
  const Tensor z = matmul(rounded, w.t());
  return b ? z + *b : z;
}

bool is_eager_on_cuda(const Tensor& a, const Tensor& b) {
  return a.is_cuda() && !is_traced(a) && !is_traced(b) && !needs_decomposition(a, b) && !needs_grad(a, b);
}

Tensor weight_gradient(const Tensor& dz, const Tensor& x) {
  const Tensor a = detail::as_rows(dz), b = detail::as_rows(x.to(dz.scalar_type()));
  // Elsewhere the plain product stays: products of two dtypes have no derivative.
  const bool in_eager = is_eager_on_cuda(a, b);
  const int64_t rest = in_eager ? detail::rows_cublas_may_leave_out(a, b) : 0;
  if (rest == 0 && !(in_eager && detail::is_product_rounded_in_parts(a, b))) return at::mm(a.t(), b);
  // In float32, because the sum should be rounded once. A 16-bit addmm() may round its product before it adds.
  const auto product = [&](int64_t begin, int64_t count) {
    return at::mm(a.narrow(0, begin, count).t(), b.narrow(0, begin, count), at::kFloat);
  };
  const int64_t whole = a.size(0) - rest;
  const Tensor sum = product(0, whole);
  if (rest > 0) sum.add_(product(whole, rest));
  return sum.to(a.scalar_type());
}

Tensor bias_gradient(const Tensor& dz) { return detail::as_rows(dz).sum(0); }

Tensor silu_written_out(const Tensor& u) {
  const Tensor wide = u.to(detail::moments_dtype(u.scalar_type()));
  return (wide * at::sigmoid(wide)).to(u.scalar_type());
}

}  // namespace torchops::autograd
