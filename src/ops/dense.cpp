#include "ops/dense.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

Tensor dense(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("myops::dense", "").typed<decltype(dense)>();
  return op.call(x, w, b);
}

std::tuple<Tensor, Tensor> detail::dense_backward(const Tensor& grad, const Tensor& y,
                                                  std::array<bool, 2> output_mask) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_dense_backward", "").typed<decltype(dense_backward)>();
  return op.call(grad, y, output_mask);
}

std::tuple<Tensor, Tensor, Tensor> detail::dense_gradients(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                           const Tensor& w, std::array<bool, 3> output_mask) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_dense_gradients", "").typed<decltype(dense_gradients)>();
  return op.call(grad, y, x, w, output_mask);
}

void check_dense(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  detail::check_layer("dense", x, w, b);
}

namespace {

void check_cotangent(const char* op, const Tensor& grad, const Tensor& y) {
  detail::check_dtype(op, "y", y);
  TORCH_CHECK(y.dim() >= 1, op, ": expected y with at least 1 dimension, got a 0-dimensional tensor");
  detail::check_matches(op, "grad", grad, "y", y);
  detail::check_shape(op, "grad", grad, "y", y.sym_sizes());
}

Tensor dense_meta(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  check_dense(x, w, b);
  return at::empty_symint(detail::with_last(x.sym_sizes(), w.sym_size(0)), x.options());
}

std::tuple<Tensor, Tensor> dense_backward_meta(const Tensor& grad, const Tensor& y, std::array<bool, 2> output_mask) {
  detail::check_dense_backward(grad, y);
  return {detail::empty_if(output_mask[0], y.sym_sizes(), y), detail::empty_if(output_mask[1], {y.sym_size(-1)}, y)};
}

std::tuple<Tensor, Tensor, Tensor> dense_gradients_meta(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                        const Tensor& w, std::array<bool, 3> output_mask) {
  detail::check_dense_gradients(grad, y, x, w);
  return {detail::empty_if(output_mask[0], x.sym_sizes(), x), detail::empty_if(output_mask[1], w.sym_sizes(), w),
          detail::empty_if(output_mask[2], {w.sym_size(0)}, w)};
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def("dense(Tensor x, Tensor w, Tensor? b=None) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("_dense_backward(Tensor grad, Tensor y, bool[2] output_mask=[True, True]) -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
  m.def("_dense_gradients(Tensor grad, Tensor y, Tensor x, Tensor w, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("dense", dense_meta);
  m.impl("_dense_backward", dense_backward_meta);
  m.impl("_dense_gradients", dense_gradients_meta);
}

}  // namespace

void detail::check_dense_backward(const Tensor& grad, const Tensor& y) { check_cotangent("_dense_backward", grad, y); }

void detail::check_dense_gradients(const Tensor& grad, const Tensor& y, const Tensor& x, const Tensor& w) {
  constexpr const char* op = "_dense_gradients";
  check_cotangent(op, grad, y);
  const c10::SymInt out_features = y.sym_size(-1);
  check_matches(op, "w", w, "y", y);
  TORCH_CHECK(w.dim() == 2, op, ": expected w of shape (out, in) with out = ", out_features, " to match y, got ",
              to_string(w.sym_sizes()));
  TORCH_SYM_CHECK(w.sym_size(0).sym_eq(out_features), op, ": expected w of shape (out, in) with out = ", out_features,
                  " to match y, got ", to_string(w.sym_sizes()));
  check_matches(op, "x", x, "y", y);
  check_shape(op, "x", x, "y and w", with_last(y.sym_sizes(), w.sym_size(1)));
}

}  // namespace torchops
