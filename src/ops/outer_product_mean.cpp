#include "ops/outer_product_mean.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor outer_product_mean(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& norm) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::outer_product_mean", "")
                             .typed<decltype(outer_product_mean)>();
  return op.call(a, b, weight, bias, norm);
}

detail::OuterProductGradients detail::outer_product_mean_backward(const Tensor& grad, const Tensor& a, const Tensor& b,
                                                                  const Tensor& weight, const OptionalTensor& norm,
                                                                  OuterProductOutputMask output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_outer_product_mean_backward", "")
                             .typed<decltype(outer_product_mean_backward)>();
  return op.call(grad, a, b, weight, norm, output_mask);
}

namespace {

using detail::of_batch;

c10::SymDimVector result_shape(const Tensor& a, const Tensor& b, const Tensor& weight) {
  return of_batch(a, {a.sym_size(-2), b.sym_size(-2), weight.sym_size(0)});
}

void check(const char* op, const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
           const OptionalTensor& norm) {
  detail::check_dtype(op, "a", a);
  TORCH_CHECK(a.dim() >= 3, op, ": expected a of shape (*batch, S, N, C), got ", detail::to_string(a.sym_sizes()));
  detail::check_matches(op, "b", b, "a", a);
  TORCH_CHECK(b.dim() == a.dim(), op, ": expected b with ", a.dim(), " dimensions to match a, got ",
              detail::to_string(b.sym_sizes()));
  detail::check_shape(op, "b", b, "a", of_batch(a, {a.sym_size(-3), b.sym_size(-2), b.sym_size(-1)}));
  detail::check_matches(op, "weight", weight, "a", a);
  const c10::SymInt features = a.sym_size(-1) * b.sym_size(-1);
  TORCH_CHECK(weight.dim() == 2, op, ": expected weight of shape (out, C * D) with C * D = ", features,
              " to match a and b, got ", detail::to_string(weight.sym_sizes()));
  TORCH_SYM_CHECK(weight.sym_size(1).sym_eq(features), op,
                  ": expected weight of shape (out, C * D) with C * D = ", features, " to match a and b, got ",
                  detail::to_string(weight.sym_sizes()));
  if (bias) {
    detail::check_matches(op, "bias", *bias, "a", a);
    detail::check_shape(op, "bias", *bias, "weight", {weight.sym_size(0)});
  }
  if (norm) {
    detail::check_norm_parameter(op, "norm", *norm, "a", a);
    detail::check_shape(op, "norm", *norm, "a and b", of_batch(a, {a.sym_size(-2), b.sym_size(-2)}));
  }
}

}  // namespace

void check_outer_product_mean(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& norm) {
  check("outer_product_mean", a, b, weight, bias, norm);
}

void detail::check_outer_product_mean_backward(const Tensor& grad, const Tensor& a, const Tensor& b,
                                               const Tensor& weight, const OptionalTensor& norm,
                                               const OuterProductOutputMask& output_mask) {
  constexpr const char* op = "_outer_product_mean_backward";
  check(op, a, b, weight, std::nullopt, norm);
  check_matches(op, "grad", grad, "a", a);
  check_shape(op, "grad", grad, "a, b and weight", result_shape(a, b, weight));
  TORCH_CHECK(norm || !output_mask[3], op, ": expected output_mask without the gradient of a norm that is none, got ",
              "one with it");
}

Tensor detail::empty_outer_product_mean(const Tensor& a, const Tensor& b, const Tensor& weight) {
  return at::empty_symint(result_shape(a, b, weight), a.options());
}

detail::OuterProductGradients detail::empty_outer_product_gradients(const Tensor& a, const Tensor& b,
                                                                    const Tensor& weight, const OptionalTensor& norm,
                                                                    const OuterProductOutputMask& output_mask) {
  const Tensor& like_norm = norm ? *norm : a;
  return {empty_if(output_mask[0], a.sym_sizes(), a), empty_if(output_mask[1], b.sym_sizes(), b),
          empty_if(output_mask[2], weight.sym_sizes(), weight),
          empty_if(output_mask[3], like_norm.sym_sizes(), like_norm)};
}

namespace {

Tensor outer_product_mean_meta(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& norm) {
  check_outer_product_mean(a, b, weight, bias, norm);
  return detail::empty_outer_product_mean(a, b, weight);
}

detail::OuterProductGradients outer_product_mean_backward_meta(const Tensor& grad, const Tensor& a, const Tensor& b,
                                                               const Tensor& weight, const OptionalTensor& norm,
                                                               detail::OuterProductOutputMask output_mask) {
  detail::check_outer_product_mean_backward(grad, a, b, weight, norm, output_mask);
  return detail::empty_outer_product_gradients(a, b, weight, norm, output_mask);
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("outer_product_mean(Tensor a, Tensor b, Tensor weight, Tensor? bias=None, Tensor? norm=None) -> Tensor", tags);
  m.def(
      "_outer_product_mean_backward(Tensor grad, Tensor a, Tensor b, Tensor weight, Tensor? norm, bool[4] "
      "output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("outer_product_mean", outer_product_mean_meta);
  m.impl("_outer_product_mean_backward", outer_product_mean_backward_meta);
}

}  // namespace
}  // namespace torchops
