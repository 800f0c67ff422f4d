#include "ops/sigmoid.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

Tensor sigmoid(const Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::sigmoid", "").typed<decltype(sigmoid)>();
  return op.call(x);
}

Tensor& sigmoid_(Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("myops::sigmoid_", "").typed<void(Tensor&)>();
  op.call(x);
  return x;
}

void check_sigmoid(const Tensor& x) { detail::check_dtype("sigmoid", "x", x); }

void check_sigmoid_(const Tensor& x) {
  detail::check_dtype("sigmoid_", "x", x);
  detail::check_writable("sigmoid_", "x", x);
}

namespace {

Tensor sigmoid_meta(const Tensor& x) {
  check_sigmoid(x);
  return at::empty_symint(x.sym_sizes(), x.options());
}

void sigmoid_meta_(Tensor& x) { check_sigmoid_(x); }

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def("sigmoid(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("sigmoid_(Tensor(a!) x) -> ()", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("sigmoid", sigmoid_meta);
  m.impl("sigmoid_", sigmoid_meta_);
}

}  // namespace
}  // namespace torchops
