#include "ops/softmax.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

Tensor softmax(const Tensor& x, int64_t dim) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::softmax", "").typed<decltype(softmax)>();
  return op.call(x, dim);
}

Tensor& softmax_(Tensor& x, int64_t dim) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::softmax_", "").typed<void(Tensor&, int64_t)>();
  op.call(x, dim);
  return x;
}

Tensor detail::softmax_backward(const Tensor& grad, const Tensor& y, int64_t dim) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_softmax_backward", "")
                             .typed<decltype(softmax_backward)>();
  return op.call(grad, y, dim);
}

namespace {

void check(const char* op, const char* name, const Tensor& x, int64_t dim) {
  detail::check_dtype(op, name, x);
  const int64_t rank = std::max<int64_t>(x.dim(), 1);
  TORCH_CHECK_INDEX(-rank <= dim && dim < rank, op, ": expected dim in [", -rank, ", ", rank - 1, "] for ", name,
                    " of shape ", detail::to_string(x.sym_sizes()), ", got ", dim);
}

}  // namespace

void check_softmax(const Tensor& x, int64_t dim) { check("softmax", "x", x, dim); }

void check_softmax_(const Tensor& x, int64_t dim) {
  check("softmax_", "x", x, dim);
  detail::check_writable("softmax_", "x", x);
}

void detail::check_softmax_backward(const Tensor& grad, const Tensor& y, int64_t dim) {
  constexpr const char* op = "_softmax_backward";
  check(op, "y", y, dim);
  check_matches(op, "grad", grad, "y", y);
  check_shape(op, "grad", grad, "y", y.sym_sizes());
}

namespace {

Tensor softmax_meta(const Tensor& x, int64_t dim) {
  check_softmax(x, dim);
  return at::empty_symint(x.sym_sizes(), x.options());
}

void softmax_meta_(Tensor& x, int64_t dim) { check_softmax_(x, dim); }

Tensor softmax_backward_meta(const Tensor& grad, const Tensor& y, int64_t dim) {
  detail::check_softmax_backward(grad, y, dim);
  return at::empty_symint(y.sym_sizes(), y.options());
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def("softmax(Tensor x, int dim=-1) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("softmax_(Tensor(a!) x, int dim=-1) -> ()", {at::Tag::pt2_compliant_tag});
  m.def("_softmax_backward(Tensor grad, Tensor y, int dim) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("softmax", softmax_meta);
  m.impl("softmax_", softmax_meta_);
  m.impl("_softmax_backward", softmax_backward_meta);
}

}  // namespace
}  // namespace torchops
