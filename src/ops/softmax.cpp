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

namespace {

void check(const char* op, const Tensor& x, int64_t dim) {
  detail::check_dtype(op, "x", x);
  const int64_t rank = std::max<int64_t>(x.dim(), 1);
  TORCH_CHECK_INDEX(-rank <= dim && dim < rank, op, ": expected dim in [", -rank, ", ", rank - 1, "] for x of shape ",
                    detail::to_string(x.sym_sizes()), ", got ", dim);
}

}  // namespace

void check_softmax(const Tensor& x, int64_t dim) { check("softmax", x, dim); }

void check_softmax_(const Tensor& x, int64_t dim) {
  check("softmax_", x, dim);
  detail::check_writable("softmax_", "x", x);
}

namespace {

Tensor softmax_meta(const Tensor& x, int64_t dim) {
  check_softmax(x, dim);
  return at::empty_symint(x.sym_sizes(), x.options());
}

void softmax_meta_(Tensor& x, int64_t dim) { check_softmax_(x, dim); }

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def("softmax(Tensor x, int dim=-1) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("softmax_(Tensor(a!) x, int dim=-1) -> ()", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("softmax", softmax_meta);
  m.impl("softmax_", softmax_meta_);
}

}  // namespace
}  // namespace torchops
