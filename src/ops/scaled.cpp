#include "ops/scaled.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"
#include "ops/glu.h"

namespace torchops {

using at::ScalarType;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor dense_scaled(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                    const OptionalTensor& b, std::optional<ScalarType> out_dtype) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::dense", "scaled").typed<decltype(dense_scaled)>();
  return op.call(x, w, scale_x, scale_w, b, out_dtype);
}

Tensor gate_scaled(const Tensor& v, const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                   const OptionalTensor& b) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::gate", "scaled").typed<decltype(gate_scaled)>();
  return op.call(v, x, w, scale_x, scale_w, b);
}

Tensor glu_scaled(const Tensor& x, const Tensor& w, const Tensor& wg, const Tensor& scale_x, const Tensor& scale_w,
                  const Tensor& scale_wg, const OptionalTensor& b, const OptionalTensor& bg,
                  std::string_view activation, std::optional<ScalarType> out_dtype) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::glu", "scaled").typed<decltype(glu_scaled)>();
  return op.call(x, w, wg, scale_x, scale_w, scale_wg, b, bg, activation, out_dtype);
}

namespace {

void check_eight_bits(const char* op, const char* name, const Tensor& tensor) {
  detail::check_layout(op, name, tensor);
  TORCH_CHECK(tensor.scalar_type() == at::kFloat8_e4m3fn, op, ": expected ", name, " of dtype float8_e4m3fn, got ",
              detail::to_string(tensor.scalar_type()));
}

// A scale has one element for all of `reference`, or one per row, in the shape `each`.
void check_scale(const char* op, const char* name, const Tensor& scale, const char* reference_name,
                 const Tensor& reference, c10::SymIntArrayRef each) {
  detail::check_layout(op, name, scale);
  TORCH_CHECK(scale.scalar_type() == at::kFloat, op, ": expected ", name, " of dtype float32, got ",
              detail::to_string(scale.scalar_type()));
  detail::check_device(op, name, scale, reference_name, reference);
  // The number of rows may be unknown while tracing, so test it without adding a guard.
  if (TORCH_GUARD_OR_FALSE(scale.sym_numel().sym_eq(1))) return;
  const auto expected = [&] {
    return c10::str(op, ": expected ", name, " of one element or of shape ", detail::to_string(each), " to match ",
                    reference_name, ", got ", detail::to_string(scale.sym_sizes()));
  };
  TORCH_CHECK(scale.dim() == static_cast<int64_t>(each.size()), expected());
  for (int64_t i = 0; i < scale.dim(); ++i) TORCH_SYM_CHECK(scale.sym_size(i).sym_eq(each[i]), expected());
}

void check_scale_of_rows(const char* op, const char* name, const Tensor& scale, const Tensor& x) {
  check_scale(op, name, scale, "x", x, detail::with_last(x.sym_sizes(), 1));
}

void check_scale_of_columns(const char* op, const char* name, const Tensor& scale, const char* w_name,
                            const Tensor& w) {
  check_scale(op, name, scale, w_name, w, {1, w.sym_size(0)});
}

void check_bias(const char* op, const char* name, const Tensor& b, const Tensor& x, ScalarType dtype) {
  detail::check_layout(op, name, b);
  TORCH_CHECK(b.scalar_type() == dtype || b.scalar_type() == at::kFloat, op, ": expected ", name, " of dtype ",
              detail::to_string(dtype), dtype == at::kFloat ? "" : " or float32", " to match the result, got ",
              detail::to_string(b.scalar_type()));
  detail::check_device(op, name, b, "x", x);
}

void check_out_dtype(const char* op, const char* name, ScalarType dtype) {
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat, op, ": expected ", name,
              " bfloat16, float16 or float32, got ", detail::to_string(dtype));
}

// Checks the operands of x @ w.T + b with a result of `dtype`.
void check_linear_scaled(const char* op, const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                         const OptionalTensor& b, ScalarType dtype) {
  if (b) check_bias(op, "b", *b, x, dtype);
  detail::check_linear_sizes(op, x, "w", w, "b", b);
  check_scale_of_rows(op, "scale_x", scale_x, x);
  check_scale_of_columns(op, "scale_w", scale_w, "w", w);
}

void check_operands(const char* op, const Tensor& x, const Tensor& w) {
  check_eight_bits(op, "x", x);
  check_eight_bits(op, "w", w);
  detail::check_device(op, "w", w, "x", x);
}

Tensor dense_scaled_meta(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                         const OptionalTensor& b, std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = check_dense_scaled(x, w, scale_x, scale_w, b, out_dtype);
  return at::empty_symint(detail::with_last(x.sym_sizes(), w.sym_size(0)), x.options().dtype(dtype));
}

Tensor gate_scaled_meta(const Tensor& v, const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                        const OptionalTensor& b) {
  check_gate_scaled(v, x, w, scale_x, scale_w, b);
  return at::empty_symint(v.sym_sizes(), v.options());
}

Tensor glu_scaled_meta(const Tensor& x, const Tensor& w, const Tensor& wg, const Tensor& scale_x, const Tensor& scale_w,
                       const Tensor& scale_wg, const OptionalTensor& b, const OptionalTensor& bg,
                       std::string_view activation, std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = check_glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, bg, activation, out_dtype);
  return at::empty_symint(detail::with_last(x.sym_sizes(), w.sym_size(0)), x.options().dtype(dtype));
}

// For tensors that no kernel takes: what is wrong with them, in the words of the operator instead of the dispatcher's
// list of its kernels. `meta` makes all checks, of which that of the layout fails for sparse and nested tensors.
template <auto meta>
struct NoKernel;
template <class... Args, Tensor (*meta)(Args...)>
struct NoKernel<meta> {
  static Tensor call(Args... args) {
    const at::Device device = meta(args...).device();
    TORCH_CHECK_NOT_IMPLEMENTED(false, "operators on eight bits: expected tensors on a CPU or a CUDA device, got ",
                                device);
  }
};

void register_no_kernels(torch::Library& m) {
  m.impl("dense.scaled", NoKernel<dense_scaled_meta>::call);
  m.impl("gate.scaled", NoKernel<gate_scaled_meta>::call);
  m.impl("glu.scaled", NoKernel<glu_scaled_meta>::call);
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def(
      "dense.scaled(Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, Tensor? b=None, *, "
      "ScalarType? out_dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("gate.scaled(Tensor v, Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, Tensor? b=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "glu.scaled(Tensor x, Tensor w, Tensor wg, Tensor scale_x, Tensor scale_w, Tensor scale_wg, Tensor? b=None, "
      "Tensor? bg=None, *, str activation=\"sigmoid\", ScalarType? out_dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("dense.scaled", dense_scaled_meta);
  m.impl("gate.scaled", gate_scaled_meta);
  m.impl("glu.scaled", glu_scaled_meta);
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { register_no_kernels(m); }
TORCH_LIBRARY_IMPL(myops, NestedTensorCPU, m) { register_no_kernels(m); }
TORCH_LIBRARY_IMPL(myops, NestedTensorCUDA, m) { register_no_kernels(m); }

}  // namespace

ScalarType check_dense_scaled(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                              const OptionalTensor& b, std::optional<ScalarType> out_dtype) {
  constexpr const char* op = "dense.scaled";
  check_operands(op, x, w);
  const ScalarType dtype = out_dtype.value_or(at::kBFloat16);
  check_out_dtype(op, "out_dtype", dtype);
  check_linear_scaled(op, x, w, scale_x, scale_w, b, dtype);
  return dtype;
}

void check_gate_scaled(const Tensor& v, const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                       const OptionalTensor& b) {
  constexpr const char* op = "gate.scaled";
  check_operands(op, x, w);
  detail::check_layout(op, "v", v);
  check_out_dtype(op, "v of dtype", v.scalar_type());
  detail::check_device(op, "v", v, "x", x);
  check_linear_scaled(op, x, w, scale_x, scale_w, b, v.scalar_type());
  detail::check_shape(op, "v", v, "x and w", detail::with_last(x.sym_sizes(), w.sym_size(0)));
}

ScalarType check_glu_scaled(const Tensor& x, const Tensor& w, const Tensor& wg, const Tensor& scale_x,
                            const Tensor& scale_w, const Tensor& scale_wg, const OptionalTensor& b,
                            const OptionalTensor& bg, std::string_view activation,
                            std::optional<ScalarType> out_dtype) {
  constexpr const char* op = "glu.scaled";
  check_operands(op, x, w);
  check_eight_bits(op, "wg", wg);
  detail::check_device(op, "wg", wg, "x", x);
  const ScalarType dtype = out_dtype.value_or(at::kBFloat16);
  check_out_dtype(op, "out_dtype", dtype);
  check_linear_scaled(op, x, w, scale_x, scale_w, b, dtype);
  detail::check_shape(op, "wg", wg, "w", w.sym_sizes());
  check_scale_of_columns(op, "scale_wg", scale_wg, "wg", wg);
  if (bg) {
    check_bias(op, "bg", *bg, x, dtype);
    detail::check_shape(op, "bg", *bg, "wg", {wg.sym_size(0)});
  }
  detail::check_activation(op, activation);
  return dtype;
}

}  // namespace torchops
