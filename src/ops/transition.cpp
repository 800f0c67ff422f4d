#include "ops/transition.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using detail::Transition;
using detail::TransitionGradients;
using detail::TransitionOutputMask;
using detail::TransitionProducts;

Tensor transition(const Tensor& x, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                  const Tensor& gate_weight, const OptionalTensor& gate_bias, const Tensor& up_weight,
                  const OptionalTensor& up_bias, const Tensor& down_weight, const OptionalTensor& down_bias,
                  double eps) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::transition", "").typed<decltype(transition)>();
  return op.call(x, norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, eps);
}

Tensor& add_transition_(Tensor& x, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                        const Tensor& gate_weight, const OptionalTensor& gate_bias, const Tensor& up_weight,
                        const OptionalTensor& up_bias, const Tensor& down_weight, const OptionalTensor& down_bias,
                        double eps) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("myops::add_transition_", "")
          .typed<void(Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                      const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&, double)>();
  op.call(x, norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, eps);
  return x;
}

Tensor detail::add_transition(const Tensor& x, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                              const Tensor& gate_weight, const OptionalTensor& gate_bias, const Tensor& up_weight,
                              const OptionalTensor& up_bias, const Tensor& down_weight, const OptionalTensor& down_bias,
                              double eps) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_add_transition", "").typed<decltype(add_transition)>();
  return op.call(x, norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, eps);
}

std::tuple<Tensor, Tensor, Tensor> detail::transition_with_products(
    const Tensor& x, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, const Tensor& gate_weight,
    const OptionalTensor& gate_bias, const Tensor& up_weight, const OptionalTensor& up_bias, const Tensor& down_weight,
    const OptionalTensor& down_bias, double eps, bool add_residual) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_transition", "")
                             .typed<decltype(transition_with_products)>();
  return op.call(x, norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, eps,
                 add_residual);
}

TransitionGradients detail::transition_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& norm_weight,
                                                const OptionalTensor& norm_bias, const Tensor& gate_weight,
                                                const OptionalTensor& gate_bias, const Tensor& up_weight,
                                                const OptionalTensor& up_bias, const Tensor& down_weight, double eps,
                                                TransitionOutputMask output_mask, bool add_residual,
                                                const OptionalTensor& up, const OptionalTensor& gate) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_transition_backward", "")
                             .typed<decltype(transition_backward)>();
  return op.call(grad, x, norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, eps,
                 output_mask, add_residual, up, gate);
}

namespace {

void check(const char* op, const Transition& t) {
  detail::check_layout(op, "x", t.x);
  detail::check_dtype(op, "gate_weight", t.gate_weight);
  const at::ScalarType dtype = t.dtype();
  const bool of_16_bits = t.gate_weight.element_size() == 2;
  TORCH_CHECK(t.x.scalar_type() == dtype || (of_16_bits && t.x.scalar_type() == at::kFloat), op,
              ": expected x of dtype ", detail::to_string(dtype), of_16_bits ? " or float32" : "",
              " to match gate_weight, got ", detail::to_string(t.x.scalar_type()));
  detail::check_device(op, "x", t.x, "gate_weight", t.gate_weight);
  TORCH_CHECK(t.x.dim() >= 1, op, ": expected x with at least 1 dimension, got a 0-dimensional tensor");
  const c10::SymInt c = t.x.sym_size(-1);
  TORCH_CHECK(t.gate_weight.dim() == 2, op, ": expected gate_weight of shape (hidden, c) with c = ", c,
              " to match x, got ", detail::to_string(t.gate_weight.sym_sizes()));
  TORCH_SYM_CHECK(t.gate_weight.sym_size(1).sym_eq(c), op, ": expected gate_weight of shape (hidden, c) with c = ", c,
                  " to match x, got ", detail::to_string(t.gate_weight.sym_sizes()));
  const c10::SymInt hidden = t.gate_weight.sym_size(0);
  const auto check_parameter = [&](const char* name, const OptionalTensor& parameter, const char* reason,
                                   c10::SymIntArrayRef shape) {
    if (!parameter) return;
    detail::check_matches(op, name, *parameter, "gate_weight", t.gate_weight);
    detail::check_shape(op, name, *parameter, reason, shape);
  };
  const auto check_norm = [&](const char* name, const OptionalTensor& parameter) {
    if (!parameter) return;
    detail::check_norm_parameter(op, name, *parameter, "gate_weight", t.gate_weight);
    detail::check_shape(op, name, *parameter, "x", {c});
  };
  check_norm("norm_weight", t.norm_weight);
  check_norm("norm_bias", t.norm_bias);
  check_parameter("gate_bias", t.gate_bias, "gate_weight", {hidden});
  check_parameter("up_weight", t.up_weight, "gate_weight", {hidden, c});
  check_parameter("up_bias", t.up_bias, "gate_weight", {hidden});
  check_parameter("down_weight", t.down_weight, "gate_weight", {c, hidden});
  check_parameter("down_bias", t.down_bias, "x", {c});
}

}  // namespace

void detail::check_transition(const Transition& t) { check("transition", t); }

void detail::check_transition_(const Transition& t) {
  check("add_transition_", t);
  check_writable("add_transition_", "x", t.x);
}

void detail::check_transition_with_products(const Transition& t) { check("_transition", t); }

void detail::check_transition_backward(const Tensor& grad, const Transition& t, const TransitionOutputMask& output_mask,
                                       const TransitionProducts& products) {
  constexpr const char* op = "_transition_backward";
  check(op, t);
  check_matches(op, "grad", grad, "gate_weight", t.gate_weight);
  check_shape(op, "grad", grad, "x", t.x.sym_sizes());
  TORCH_CHECK((t.norm_weight || !output_mask[1]) && (t.norm_bias || !output_mask[2]) &&
                  (t.gate_bias || !output_mask[4]) && (t.up_bias || !output_mask[6]),
              op, ": expected output_mask without gradients of parameters that are none, got one with them");
  const auto& [up, gate] = products;
  TORCH_CHECK(up.has_value() == gate.has_value(), op, ": expected both up and gate or neither, got one of them");
  for (const auto& [name, product] : {std::pair{"up", &up}, {"gate", &gate}}) {
    if (!*product) continue;
    check_matches(op, name, **product, "gate_weight", t.gate_weight);
    check_shape(op, name, **product, "x and gate_weight", with_last(t.x.sym_sizes(), t.gate_weight.sym_size(0)));
  }
}

Transition detail::read_first(Transition t) {
  for (Tensor* parameter : {&t.gate_weight, &t.up_weight, &t.down_weight}) *parameter = read_first(t.x, *parameter);
  for (OptionalTensor* parameter : {&t.norm_weight, &t.norm_bias, &t.gate_bias, &t.up_bias, &t.down_bias}) {
    *parameter = read_first(t.x, *parameter);
  }
  return t;
}

TransitionGradients detail::empty_transition_gradients(const Transition& t, const TransitionOutputMask& output_mask) {
  const Tensor& w = t.gate_weight;
  const c10::SymInt hidden = w.sym_size(0), c = w.sym_size(1);
  return {empty_if(output_mask[0], t.x.sym_sizes(), t.x),
          empty_if(output_mask[1], {c}, t.norm_weight.value_or(w)),
          empty_if(output_mask[2], {c}, t.norm_bias.value_or(w)),
          empty_if(output_mask[3], w.sym_sizes(), w),
          empty_if(output_mask[4], {hidden}, w),
          empty_if(output_mask[5], w.sym_sizes(), w),
          empty_if(output_mask[6], {hidden}, w),
          empty_if(output_mask[7], {c, hidden}, w),
          empty_if(output_mask[8], {c}, w)};
}

namespace {

Tensor transition_meta(const Transition& t) {
  detail::check_transition(t);
  return at::empty_symint(t.x.sym_sizes(), t.gate_weight.options());
}

Tensor add_transition_meta(const Transition& t) {
  detail::check_transition(t);
  return at::empty_symint(t.x.sym_sizes(), t.x.options());
}

std::tuple<Tensor, Tensor, Tensor> transition_with_products_meta(const Transition& t, bool add_residual) {
  detail::check_transition_with_products(t);
  const at::TensorOptions options = t.gate_weight.options();
  const auto product = [&] {
    return at::empty_symint(detail::with_last(t.x.sym_sizes(), t.gate_weight.sym_size(0)), options);
  };
  return {at::empty_symint(t.x.sym_sizes(), add_residual ? t.x.options() : options), product(), product()};
}

TransitionGradients transition_backward_meta(const Tensor& grad, const Transition& t,
                                             const TransitionOutputMask& output_mask, bool /*add_residual*/,
                                             const TransitionProducts& products) {
  detail::check_transition_backward(grad, t, output_mask, products);
  return detail::empty_transition_gradients(t, output_mask);
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto define = [&](const std::string& schema) { m.def(schema.c_str(), tags); };
  const std::string parameters =
      "*, Tensor? norm_weight=None, Tensor? norm_bias=None, Tensor gate_weight, Tensor? gate_bias=None, "
      "Tensor up_weight, Tensor? up_bias=None, Tensor down_weight, Tensor? down_bias=None, float eps=1e-5";
  define("transition(Tensor x, " + parameters + ") -> Tensor");
  define("add_transition_(Tensor(a!) x, " + parameters + ") -> ()");
  define("_add_transition(Tensor x, " + parameters + ") -> Tensor");
  define(
      "_transition(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor gate_weight, Tensor? gate_bias, Tensor "
      "up_weight, Tensor? up_bias, Tensor down_weight, Tensor? down_bias, float eps, bool add_residual) -> "
      "(Tensor, Tensor, Tensor)");
  define(
      "_transition_backward(Tensor grad, Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor gate_weight, "
      "Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, Tensor down_weight, float eps, bool[9] output_mask, bool "
      "add_residual=False, Tensor? up=None, Tensor? gate=None) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("transition", detail::TransitionKernel::functional<transition_meta>);
  m.impl("add_transition_", detail::TransitionKernel::in_place<detail::check_transition_>);
  m.impl("_add_transition", detail::TransitionKernel::functional<add_transition_meta>);
  m.impl("_transition", detail::transition_with_products_kernel<transition_with_products_meta>);
  m.impl("_transition_backward", detail::transition_backward_kernel<transition_backward_meta>);
}

}  // namespace
}  // namespace torchops
