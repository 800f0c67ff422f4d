#include "ops/glu.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor glu(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg,
           std::string_view activation) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("myops::glu", "").typed<decltype(glu)>();
  return op.call(x, w, wg, b, bg, activation);
}

std::tuple<Tensor, Tensor, Tensor> detail::glu_with_products(const Tensor& x, const Tensor& w, const Tensor& wg,
                                                             const OptionalTensor& b, const OptionalTensor& bg,
                                                             std::string_view activation) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_glu", "").typed<decltype(glu_with_products)>();
  return op.call(x, w, wg, b, bg, activation);
}

detail::GluGradients detail::glu_backward(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg,
                                          const OptionalTensor& b, const OptionalTensor& bg,
                                          std::string_view activation, std::array<bool, 5> output_mask,
                                          const OptionalTensor& z, const OptionalTensor& u) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_glu_backward", "").typed<decltype(glu_backward)>();
  return op.call(grad, x, w, wg, b, bg, activation, output_mask, z, u);
}

namespace {

void check(const char* op, const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
           const OptionalTensor& bg, std::string_view activation) {
  detail::check_linear(op, x, "w", w, "b", b);
  detail::check_matches(op, "wg", wg, "w", w);
  detail::check_shape(op, "wg", wg, "w", w.sym_sizes());
  if (bg) {
    detail::check_matches(op, "bg", *bg, "w", w);
    detail::check_shape(op, "bg", *bg, "wg", {w.sym_size(0)});
  }
  detail::check_activation(op, activation);
}

}  // namespace

void detail::check_activation(const char* op, std::string_view activation) {
  TORCH_CHECK_VALUE(activation == "sigmoid" || activation == "silu", op, ": expected activation sigmoid or silu, got ",
                    activation);
}

detail::GluActivation detail::glu_activation(std::string_view activation) {
  return activation == "silu" ? GluActivation::kSilu : GluActivation::kSigmoid;
}

void check_glu(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg,
               std::string_view activation) {
  check("glu", x, w, wg, b, bg, activation);
}

void detail::check_glu_with_products(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                                     const OptionalTensor& bg, std::string_view activation) {
  check("_glu", x, w, wg, b, bg, activation);
}

void detail::check_glu_backward(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg,
                                const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation,
                                std::array<bool, 5> output_mask, const OptionalTensor& z, const OptionalTensor& u) {
  check("_glu_backward", x, w, wg, b, bg, activation);
  check_matches("_glu_backward", "grad", grad, "w", w);
  const c10::SymDimVector sizes = with_last(x.sym_sizes(), w.sym_size(0));
  check_shape("_glu_backward", "grad", grad, "x and w", sizes);
  TORCH_CHECK(
      (b || !output_mask[3]) && (bg || !output_mask[4]),
      "_glu_backward: expected output_mask without gradients of b and bg where there is none, got one with them");
  TORCH_CHECK(z.has_value() == u.has_value(), "_glu_backward: expected both z and u or neither, got one of them");
  for (const auto& [name, t] : {std::pair{"z", &z}, {"u", &u}}) {
    if (!*t) continue;
    check_matches("_glu_backward", name, **t, "w", w);
    check_shape("_glu_backward", name, **t, "x and w", sizes);
  }
}

detail::GluGradients detail::empty_glu_gradients(const Tensor& x, const Tensor& w, std::array<bool, 5> output_mask) {
  const c10::SymInt out_features = w.sym_size(0);
  return {empty_if(output_mask[0], x.sym_sizes(), x), empty_if(output_mask[1], w.sym_sizes(), w),
          empty_if(output_mask[2], w.sym_sizes(), w), empty_if(output_mask[3], {out_features}, w),
          empty_if(output_mask[4], {out_features}, w)};
}

namespace {

Tensor glu_meta(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg,
                std::string_view activation) {
  check_glu(x, w, wg, b, bg, activation);
  return at::empty_symint(detail::with_last(x.sym_sizes(), w.sym_size(0)), w.options());
}

std::tuple<Tensor, Tensor, Tensor> glu_with_products_meta(const Tensor& x, const Tensor& w, const Tensor& wg,
                                                          const OptionalTensor& b, const OptionalTensor& bg,
                                                          std::string_view activation) {
  detail::check_glu_with_products(x, w, wg, b, bg, activation);
  const auto empty = [&] { return at::empty_symint(detail::with_last(x.sym_sizes(), w.sym_size(0)), w.options()); };
  return {empty(), empty(), empty()};
}

detail::GluGradients glu_backward_meta(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg,
                                       const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation,
                                       std::array<bool, 5> output_mask, const OptionalTensor& z,
                                       const OptionalTensor& u) {
  detail::check_glu_backward(grad, x, w, wg, b, bg, activation, output_mask, z, u);
  return detail::empty_glu_gradients(x, w, output_mask);
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("glu(Tensor x, Tensor w, Tensor wg, Tensor? b=None, Tensor? bg=None, *, str activation=\"sigmoid\") -> Tensor",
        tags);
  m.def("_glu(Tensor x, Tensor w, Tensor wg, Tensor? b, Tensor? bg, str activation) -> (Tensor, Tensor, Tensor)", tags);
  m.def(
      "_glu_backward(Tensor grad, Tensor x, Tensor w, Tensor wg, Tensor? b, Tensor? bg, str activation, bool[5] "
      "output_mask, "
      "Tensor? z=None, Tensor? u=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("glu", glu_meta);
  m.impl("_glu", glu_with_products_meta);
  m.impl("_glu_backward", glu_backward_meta);
}

}  // namespace
}  // namespace torchops
