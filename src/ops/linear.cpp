#include "ops/linear.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

Tensor detail::linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("myops::_linear", "").typed<decltype(linear)>();
  return op.call(x, w, b);
}

void detail::check_linear_layer(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  check_layer("_linear", x, w, b);
}

namespace {

Tensor linear_kernel(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  detail::check_linear_layer(x, w, b);
  return at::linear(x, w, b).contiguous();
}

Tensor linear_meta(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  detail::check_linear_layer(x, w, b);
  return at::empty_symint(detail::with_last(x.sym_sizes(), w.sym_size(0)), x.options());
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def("_linear(Tensor x, Tensor w, Tensor? b=None) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { m.impl("_linear", linear_kernel); }

TORCH_LIBRARY_IMPL(myops, Meta, m) { m.impl("_linear", linear_meta); }

}  // namespace
}  // namespace torchops
