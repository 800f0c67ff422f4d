#include "ops/triangle_rows.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleParameterList;
using detail::TriangleUpdate;

bool detail::triangle_rows_in(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                              double scale, double eps, Tensor& a, Tensor& b) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_rows_in", "")
                             .typed<decltype(triangle_rows_in)>();
  return op.call(x, mask, parameters, scale, eps, a, b);
}

bool detail::triangle_rows_out(const Tensor& o, const Tensor& x, const TriangleParameterList& parameters, double eps,
                               double eps_out, Tensor& out, bool adds) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_rows_out", "")
                             .typed<decltype(triangle_rows_out)>();
  return op.call(o, x, parameters, eps, eps_out, out, adds);
}

namespace {

constexpr const char *kIn = "_triangle_rows_in", *kOut = "_triangle_rows_out";

// Raises unless the channels have the dtype and device of the weights and this shape.
void check_channels(const char* op, const char* name, const Tensor& tensor, const TriangleUpdate& t,
                    c10::SymIntArrayRef shape) {
  detail::check_matches(op, name, tensor, "the weights", t.weight(detail::kPA));
  detail::check_shape(op, name, tensor, "x and the weights", shape);
}

void check_apart(const char* op, const char* name, const Tensor& written, const char* read_name,
                 const OptionalTensor& read) {
  TORCH_CHECK(!read || !detail::may_alias(written, *read), op, ": expected ", name, " without memory of ", read_name,
              ", got some of it");
}

void check_written(const char* op, const char* name, const Tensor& written, const TriangleUpdate& t) {
  detail::check_writable(op, name, written);
  for (const OptionalTensor& parameter : t.parameters) check_apart(op, name, written, "a parameter", parameter);
}

}  // namespace

TriangleUpdate detail::checked_triangle_rows_in(const Tensor& x, const OptionalTensor& mask,
                                                const TriangleParameterList& parameters, double eps, const Tensor& a,
                                                const Tensor& b) {
  TriangleUpdate t = checked_triangle_rows(kIn, x, mask, parameters, eps);
  const c10::SymInt d = t.weight(kPA).sym_size(0), width = padded_size(x.sym_size(1), t.dtype());
  for (const auto& [name, written] : {std::pair{"a", &a}, {"b", &b}}) {
    check_channels(kIn, name, *written, t, {d, x.sym_size(0), width});
    check_written(kIn, name, *written, t);
    check_apart(kIn, name, *written, "x", x);
    check_apart(kIn, name, *written, "the mask", mask);
  }
  check_apart(kIn, "b", b, "a", a);
  return t;
}

TriangleUpdate detail::checked_triangle_rows_out(const Tensor& o, const Tensor& x,
                                                 const TriangleParameterList& parameters, double eps,
                                                 const Tensor& out) {
  TriangleUpdate t = checked_triangle_rows(kOut, x, {}, parameters, eps);
  check_channels(kOut, "o", o, t, {t.weight(kPA).sym_size(0), x.sym_size(0), x.sym_size(1)});
  check_matches(kOut, "out", out, "the weights", t.weight(kPA));
  check_shape(kOut, "out", out, "x", x.sym_sizes());
  check_written(kOut, "out", out, t);
  check_apart(kOut, "out", out, "o", o);
  if (!coincide(out, x)) check_apart(kOut, "out", out, "x", x);
  return t;
}

namespace {

// For all backends but CUDA. Tensors without data get the same answer, so what is traced takes the ways of any GPU.
bool rows_in_refused(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                     double /*scale*/, double eps, Tensor& a, Tensor& b) {
  detail::checked_triangle_rows_in(x, mask, parameters, eps, a, b);
  return false;
}

bool rows_out_refused(const Tensor& o, const Tensor& x, const TriangleParameterList& parameters, double eps,
                      double /*eps_out*/, Tensor& out, bool /*adds*/) {
  detail::checked_triangle_rows_out(o, x, parameters, eps, out);
  return false;
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "_triangle_rows_in(Tensor x, Tensor? mask, Tensor?[] parameters, float scale, float eps, Tensor(a!) a, "
      "Tensor(b!) b) -> bool",
      tags);
  m.def(
      "_triangle_rows_out(Tensor o, Tensor x, Tensor?[] parameters, float eps, float eps_out, Tensor(a!) out, "
      "bool adds) -> bool",
      tags);
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) {
  m.impl("_triangle_rows_in", rows_in_refused);
  m.impl("_triangle_rows_out", rows_out_refused);
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("_triangle_rows_in", rows_in_refused);
  m.impl("_triangle_rows_out", rows_out_refused);
}

}  // namespace
}  // namespace torchops
