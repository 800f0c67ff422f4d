#include "ops/square_matmul.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

Tensor square_matmul(const Tensor& a, const Tensor& b, bool transpose_b) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::square_matmul", "").typed<decltype(square_matmul)>();
  return op.call(a, b, transpose_b);
}

Tensor& square_matmul_(Tensor& a, const Tensor& b, bool transpose_b) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::square_matmul_", "")
                             .typed<void(Tensor&, const Tensor&, bool)>();
  op.call(a, b, transpose_b);
  return a;
}

namespace {

void check(const char* op, const Tensor& a, const Tensor& b) {
  detail::check_dtype(op, "a", a);
  TORCH_CHECK(a.dim() >= 1, op, ": expected a with at least 1 dimension, got a 0-dimensional tensor");
  detail::check_matches(op, "b", b, "a", a);
  const c10::SymInt n = a.sym_size(-1);
  c10::SymDimVector expected{n, n};
  if (b.dim() > 2 && b.dim() == a.dim()) {
    expected.assign(a.sym_sizes().begin(), a.sym_sizes().end());
    expected[a.dim() - 2] = n;
  }
  detail::check_shape(op, "b", b, "a", expected);
}

}  // namespace

void check_square_matmul(const Tensor& a, const Tensor& b) { check("square_matmul", a, b); }

void check_square_matmul_(const Tensor& a, const Tensor& b) {
  check("square_matmul_", a, b);
  detail::check_writable("square_matmul_", "a", a);
}

namespace {

Tensor square_matmul_meta(const Tensor& a, const Tensor& b, bool) {
  check_square_matmul(a, b);
  return at::empty_symint(a.sym_sizes(), a.options());
}

void square_matmul_meta_(Tensor& a, const Tensor& b, bool) { check_square_matmul_(a, b); }

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def("square_matmul(Tensor a, Tensor b, *, bool transpose_b=False) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("square_matmul_(Tensor(a!) a, Tensor b, *, bool transpose_b=False) -> ()", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("square_matmul", square_matmul_meta);
  m.impl("square_matmul_", square_matmul_meta_);
}

}  // namespace
}  // namespace torchops
