#include "ops/gate.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor gate(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("myops::gate", "").typed<decltype(gate)>();
  return op.call(v, x, w, b);
}

Tensor& gate_(Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::gate_", "")
                             .typed<void(Tensor&, const Tensor&, const Tensor&, const OptionalTensor&)>();
  op.call(v, x, w, b);
  return v;
}

detail::GateGradients detail::gate_backward(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w,
                                            const OptionalTensor& b, std::array<bool, 4> output_mask, bool v_is_y,
                                            const OptionalTensor& z) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_gate_backward", "").typed<decltype(gate_backward)>();
  return op.call(grad, v, x, w, b, output_mask, v_is_y, z);
}

std::tuple<Tensor, Tensor> detail::gate_with_product(const Tensor& v, const Tensor& x, const Tensor& w,
                                                     const OptionalTensor& b) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_gate", "").typed<decltype(gate_with_product)>();
  return op.call(v, x, w, b);
}

namespace {

void check(const char* op, const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  detail::check_linear(op, x, "w", w, "b", b);
  if (w.element_size() == 2) {
    detail::check_layout(op, "v", v);
    TORCH_CHECK(v.scalar_type() == at::kFloat || v.scalar_type() == w.scalar_type(), op, ": expected v of dtype ",
                detail::to_string(w.scalar_type()), " or float32 to match w, got ", detail::to_string(v.scalar_type()));
    detail::check_device(op, "v", v, "w", w);
  } else {
    detail::check_matches(op, "v", v, "w", w);
  }
  detail::check_shape(op, "v", v, "x and w", detail::with_last(x.sym_sizes(), w.sym_size(0)));
}

}  // namespace

void check_gate(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check("gate", v, x, w, b);
}

void check_gate_(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check("gate_", v, x, w, b);
  detail::check_writable("gate_", "v", v);
}

void detail::check_gate_with_product(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check("_gate", v, x, w, b);
}

void detail::check_gate_backward(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w,
                                 const OptionalTensor& b, std::array<bool, 4> output_mask, const OptionalTensor& z) {
  check("_gate_backward", v, x, w, b);
  check_matches("_gate_backward", "grad", grad, "v", v);
  check_shape("_gate_backward", "grad", grad, "v", v.sym_sizes());
  TORCH_CHECK(b || !output_mask[3],
              "_gate_backward: expected output_mask without db where there is no b, got one with it");
  if (!z) return;
  check_matches("_gate_backward", "z", *z, "w", w);
  check_shape("_gate_backward", "z", *z, "v", v.sym_sizes());
}

detail::GateGradients detail::empty_gate_gradients(const Tensor& v, const Tensor& x, const Tensor& w,
                                                   std::array<bool, 4> output_mask) {
  return {empty_if(output_mask[0], v.sym_sizes(), v), empty_if(output_mask[1], x.sym_sizes(), x),
          empty_if(output_mask[2], w.sym_sizes(), w), empty_if(output_mask[3], {w.sym_size(0)}, w)};
}

namespace {

Tensor gate_meta(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check_gate(v, x, w, b);
  return at::empty_symint(v.sym_sizes(), v.options());
}

void gate_meta_(Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) { check_gate_(v, x, w, b); }

std::tuple<Tensor, Tensor> gate_with_product_meta(const Tensor& v, const Tensor& x, const Tensor& w,
                                                  const OptionalTensor& b) {
  detail::check_gate_with_product(v, x, w, b);
  return {at::empty_symint(v.sym_sizes(), v.options()), at::empty_symint(v.sym_sizes(), w.options())};
}

detail::GateGradients gate_backward_meta(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w,
                                         const OptionalTensor& b, std::array<bool, 4> output_mask, bool,
                                         const OptionalTensor& z) {
  detail::check_gate_backward(grad, v, x, w, b, output_mask, z);
  return detail::empty_gate_gradients(v, x, w, output_mask);
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("gate(Tensor v, Tensor x, Tensor w, Tensor? b=None) -> Tensor", tags);
  m.def("_gate(Tensor v, Tensor x, Tensor w, Tensor? b) -> (Tensor, Tensor)", tags);
  m.def("gate_(Tensor(a!) v, Tensor x, Tensor w, Tensor? b=None) -> ()", tags);
  m.def(
      "_gate_backward(Tensor grad, Tensor v, Tensor x, Tensor w, Tensor? b, bool[4] output_mask, bool v_is_y=False, "
      "Tensor? z=None) -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("gate", gate_meta);
  m.impl("gate_", gate_meta_);
  m.impl("_gate", gate_with_product_meta);
  m.impl("_gate_backward", gate_backward_meta);
}

}  // namespace
}  // namespace torchops
