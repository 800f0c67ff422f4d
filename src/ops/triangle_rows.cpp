#include "ops/triangle_rows.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleParameterList;
using detail::TriangleParameterOutputMask;
using detail::TriangleUpdate;

bool detail::triangle_rows_in(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                              double scale, double eps, Tensor& a, Tensor& b) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_rows_in", "")
                             .typed<decltype(triangle_rows_in)>();
  return op.call(x, mask, parameters, scale, eps, a, b);
}

bool detail::triangle_rows_out(const Tensor& o, const Tensor& x, const TriangleParameterList& parameters, double eps,
                               double eps_out, Tensor& out, bool add_residual) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_rows_out", "")
                             .typed<decltype(triangle_rows_out)>();
  return op.call(o, x, parameters, eps, eps_out, out, add_residual);
}

bool detail::triangle_rows_out_backward(const Tensor& grad, const Tensor& o, const Tensor& x,
                                        const TriangleParameterList& parameters, double eps, double eps_out,
                                        Tensor& d_o, Tensor& dz, Tensor& moments, Tensor& sums) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_rows_out_backward", "")
                             .typed<decltype(triangle_rows_out_backward)>();
  return op.call(grad, o, x, parameters, eps, eps_out, d_o, dz, moments, sums);
}

bool detail::triangle_rows_in_backward(const Tensor& da, const Tensor& db, const Tensor& x, const OptionalTensor& mask,
                                       const TriangleParameterList& parameters, double scale, double eps,
                                       const Tensor& moments, Tensor& dz, const OptionalTensor& residual,
                                       Tensor& sums) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_rows_in_backward", "")
                             .typed<decltype(triangle_rows_in_backward)>();
  return op.call(da, db, x, mask, parameters, scale, eps, moments, dz, residual, sums);
}

std::vector<Tensor> detail::triangle_rows_parameter_gradients(const Tensor& sums,
                                                              const TriangleParameterList& parameters,
                                                              TriangleParameterOutputMask output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_rows_parameter_gradients", "")
                             .typed<decltype(triangle_rows_parameter_gradients)>();
  return op.call(sums, parameters, output_mask);
}

namespace {

constexpr const char *kIn = "_triangle_rows_in", *kOut = "_triangle_rows_out";
constexpr const char *kInBackward = "_triangle_rows_in_backward", *kOutBackward = "_triangle_rows_out_backward";
constexpr const char* kParameters = "_triangle_rows_parameter_gradients";

// Raises unless the channels have the dtype and device of the weights and this shape.
void check_channels(const char* op, const char* name, const Tensor& tensor, const TriangleUpdate& t,
                    c10::SymIntArrayRef shape) {
  detail::check_matches(op, name, tensor, "the weights", t.weight(detail::kPA));
  detail::check_shape(op, name, tensor, "x and the weights", shape);
}

// The same for what is like x.
void check_like_x(const char* op, const char* name, const Tensor& tensor, const TriangleUpdate& t) {
  detail::check_matches(op, name, tensor, "the weights", t.weight(detail::kPA));
  detail::check_shape(op, name, tensor, "x", t.x.sym_sizes());
}

// The same for what has float32 values for each position or each element of the weights.
void check_float32(const char* op, const char* name, const Tensor& tensor, const char* reference_names,
                   const TriangleUpdate& t, c10::SymIntArrayRef shape) {
  detail::check_layout(op, name, tensor);
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, op, ": expected ", name, " of dtype float32, got ",
              detail::to_string(tensor.scalar_type()));
  detail::check_device(op, name, tensor, "the weights", t.weight(detail::kPA));
  detail::check_shape(op, name, tensor, reference_names, shape);
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

// The same for several tensors, which are written while others are read.
using Named = std::pair<const char*, OptionalTensor>;
void check_written(const char* op, std::initializer_list<Named> written, std::initializer_list<Named> read,
                   const TriangleUpdate& t) {
  for (const Named* to = written.begin(); to != written.end(); ++to) {
    check_written(op, to->first, *to->second, t);
    for (const auto& [name, tensor] : read) check_apart(op, to->first, *to->second, name, tensor);
    for (const Named* before = written.begin(); before != to; ++before) {
      check_apart(op, to->first, *to->second, before->first, before->second);
    }
  }
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
  check_like_x(kOut, "out", out, t);
  check_written(kOut, "out", out, t);
  check_apart(kOut, "out", out, "o", o);
  if (!coincide(out, x)) check_apart(kOut, "out", out, "x", x);
  return t;
}

TriangleUpdate detail::checked_triangle_rows_out_backward(const Tensor& grad, const Tensor& o, const Tensor& x,
                                                          const TriangleParameterList& parameters, double eps,
                                                          const Tensor& d_o, const Tensor& dz, const Tensor& moments,
                                                          const Tensor& sums) {
  TriangleUpdate t = checked_triangle_rows(kOutBackward, x, {}, parameters, eps);
  const c10::SymInt d = t.weight(kPA).sym_size(0), rows = x.sym_size(0), n = x.sym_size(1);
  check_like_x(kOutBackward, "grad", grad, t);
  check_channels(kOutBackward, "o", o, t, {d, rows, n});
  check_channels(kOutBackward, "d_o", d_o, t, {d, rows, padded_size(n, t.dtype())});
  check_like_x(kOutBackward, "dz", dz, t);
  check_float32(kOutBackward, "moments", moments, "x", t, {rows, n, 2});
  check_float32(kOutBackward, "sums", sums, "the weights", t, {triangle_sums_begin(t).back()});
  check_written(kOutBackward, {{"d_o", d_o}, {"dz", dz}, {"moments", moments}, {"sums", sums}},
                {{"grad", grad}, {"o", o}, {"x", x}}, t);
  return t;
}

TriangleUpdate detail::checked_triangle_rows_in_backward(const Tensor& da, const Tensor& db, const Tensor& x,
                                                         const OptionalTensor& mask,
                                                         const TriangleParameterList& parameters, double eps,
                                                         const Tensor& moments, const Tensor& dz,
                                                         const OptionalTensor& residual, const Tensor& sums) {
  TriangleUpdate t = checked_triangle_rows(kInBackward, x, mask, parameters, eps);
  const c10::SymInt d = t.weight(kPA).sym_size(0), rows = x.sym_size(0), n = x.sym_size(1);
  for (const auto& [name, channels] : {std::pair{"da", &da}, {"db", &db}}) {
    check_layout(kInBackward, name, *channels);
    // Products of padded matrices have more than N columns.
    const c10::SymInt width = channels->dim() == 3 ? channels->sym_size(2).max(n) : n;
    check_channels(kInBackward, name, *channels, t, {d, rows, width});
  }
  check_float32(kInBackward, "moments", moments, "x", t, {rows, n, 2});
  check_like_x(kInBackward, "dz", dz, t);
  if (residual) check_like_x(kInBackward, "residual", *residual, t);
  check_float32(kInBackward, "sums", sums, "the weights", t, {triangle_sums_begin(t).back()});
  check_written(
      kInBackward, {{"dz", dz}, {"sums", sums}},
      {{"da", da}, {"db", db}, {"x", x}, {"the mask", mask}, {"moments", moments}, {"the residual", residual}}, t);
  return t;
}

TriangleUpdate detail::checked_triangle_rows_parameter_gradients(const Tensor& sums,
                                                                 const TriangleParameterList& parameters,
                                                                 const TriangleParameterOutputMask& output_mask) {
  TriangleUpdate t = checked_triangle_parameters(kParameters, parameters, output_mask);
  check_layout(kParameters, "sums", sums);
  TORCH_CHECK(sums.dim() == 2, kParameters, ": expected sums of shape (batch, size), got ",
              to_string(sums.sym_sizes()));
  check_float32(kParameters, "sums", sums, "the weights", t, {sums.sym_size(0), triangle_sums_begin(t).back()});
  return t;
}

namespace {

// For all backends but CUDA. Tensors without data get the same answer, so what is traced runs on any GPU.
bool rows_in_refused(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                     double /*scale*/, double eps, Tensor& a, Tensor& b) {
  detail::checked_triangle_rows_in(x, mask, parameters, eps, a, b);
  return false;
}

bool rows_out_refused(const Tensor& o, const Tensor& x, const TriangleParameterList& parameters, double eps,
                      double /*eps_out*/, Tensor& out, bool /*add_residual*/) {
  detail::checked_triangle_rows_out(o, x, parameters, eps, out);
  return false;
}

bool rows_out_backward_refused(const Tensor& grad, const Tensor& o, const Tensor& x,
                               const TriangleParameterList& parameters, double eps, double /*eps_out*/, Tensor& d_o,
                               Tensor& dz, Tensor& moments, Tensor& sums) {
  detail::checked_triangle_rows_out_backward(grad, o, x, parameters, eps, d_o, dz, moments, sums);
  return false;
}

bool rows_in_backward_refused(const Tensor& da, const Tensor& db, const Tensor& x, const OptionalTensor& mask,
                              const TriangleParameterList& parameters, double /*scale*/, double eps,
                              const Tensor& moments, Tensor& dz, const OptionalTensor& residual, Tensor& sums) {
  detail::checked_triangle_rows_in_backward(da, db, x, mask, parameters, eps, moments, dz, residual, sums);
  return false;
}

// There are no sums without the kernels that compute them.
std::vector<Tensor> parameter_gradients_refused(const Tensor& sums, const TriangleParameterList& parameters,
                                                TriangleParameterOutputMask output_mask) {
  detail::checked_triangle_rows_parameter_gradients(sums, parameters, output_mask);
  TORCH_CHECK(false, kParameters, ": expected sums on a device with kernels for them, got ", sums.device().str());
}

std::vector<Tensor> parameter_gradients_meta(const Tensor& sums, const TriangleParameterList& parameters,
                                             TriangleParameterOutputMask output_mask) {
  return detail::empty_triangle_parameter_gradients(
      detail::checked_triangle_rows_parameter_gradients(sums, parameters, output_mask), output_mask,
      [](c10::SymIntArrayRef shape, const at::TensorOptions& options) { return at::empty_symint(shape, options); });
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "_triangle_rows_in(Tensor x, Tensor? mask, Tensor?[] parameters, float scale, float eps, Tensor(a!) a, "
      "Tensor(b!) b) -> bool",
      tags);
  m.def(
      "_triangle_rows_out(Tensor o, Tensor x, Tensor?[] parameters, float eps, float eps_out, Tensor(a!) out, "
      "bool add_residual) -> bool",
      tags);
  m.def(
      "_triangle_rows_out_backward(Tensor grad, Tensor o, Tensor x, Tensor?[] parameters, float eps, float eps_out, "
      "Tensor(a!) d_o, Tensor(b!) dz, Tensor(c!) moments, Tensor(d!) sums) -> bool",
      tags);
  m.def(
      "_triangle_rows_in_backward(Tensor da, Tensor db, Tensor x, Tensor? mask, Tensor?[] parameters, float scale, "
      "float eps, Tensor moments, Tensor(a!) dz, Tensor? residual, Tensor(b!) sums) -> bool",
      tags);
  m.def("_triangle_rows_parameter_gradients(Tensor sums, Tensor?[] parameters, bool[16] output_mask) -> Tensor[]",
        tags);
}

void register_refused(torch::Library& m) {
  m.impl("_triangle_rows_in", rows_in_refused);
  m.impl("_triangle_rows_out", rows_out_refused);
  m.impl("_triangle_rows_out_backward", rows_out_backward_refused);
  m.impl("_triangle_rows_in_backward", rows_in_backward_refused);
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) {
  register_refused(m);
  m.impl("_triangle_rows_parameter_gradients", parameter_gradients_refused);
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  register_refused(m);
  m.impl("_triangle_rows_parameter_gradients", parameter_gradients_meta);
}

}  // namespace
}  // namespace torchops
