#include <ATen/core/dispatch/DispatchKeyExtractor.h>
#include <ATen/ops/as_strided_native.h>

#include <cmath>

#include "ops/common.h"
#include "ops/triangle_multiplicative_update.h"

// Argument checks of the triangle update, and the splitting of packed weights.
namespace torchops {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleArguments;
using detail::TriangleOutputMask;
using detail::TriangleParameterList;
using detail::TriangleParameterOutputMask;
using detail::TriangleParameters;
using detail::TriangleProduct;
using detail::TriangleUpdate;

namespace {

// Whether x is a batch of whole pair matrices, or some rows of one.
enum class Positions { kMatrices, kRows };

// Checks what all forms share: x and the mask. `reference` is a weight, whose dtype all others have.
void check_pair(const char* op, const Tensor& x, const OptionalTensor& mask, const char* reference_name,
                const Tensor& reference, Positions positions = Positions::kMatrices) {
  detail::check_layout(op, "x", x);
  detail::check_dtype(op, reference_name, reference);
  const at::ScalarType dtype = reference.scalar_type();
  const bool mixed = reference.element_size() == 2 && x.scalar_type() == at::kFloat;
  TORCH_CHECK(mixed || x.scalar_type() == dtype, op, ": expected x of dtype ", detail::to_string(dtype),
              reference.element_size() == 2 ? " or float32" : "", " to match ", reference_name, ", got ",
              detail::to_string(x.scalar_type()));
  detail::check_device(op, "x", x, reference_name, reference);
  if (positions == Positions::kRows) {
    TORCH_CHECK(x.dim() == 3, op, ": expected x of shape (rows, N, c), got ", detail::to_string(x.sym_sizes()));
  } else {
    TORCH_CHECK(x.dim() >= 3, op, ": expected x of shape (..., N, N, c), got ", detail::to_string(x.sym_sizes()));
    TORCH_SYM_CHECK(x.sym_size(-3).sym_eq(x.sym_size(-2)), op, ": expected x of shape (..., N, N, c), got ",
                    detail::to_string(x.sym_sizes()));
  }
  if (!mask) return;
  detail::check_layout(op, "mask", *mask);
  TORCH_CHECK(mask->scalar_type() == at::kBool || at::isFloatingType(mask->scalar_type()), op,
              ": expected mask of dtype bool or a floating-point dtype, got ", detail::to_string(mask->scalar_type()));
  detail::check_device(op, "mask", *mask, "x", x);
  detail::check_shape(op, "mask", *mask, "x", x.sym_sizes().slice(0, x.dim() - 1));
}

// Checks a parameter against `shape`, which `reason` explains in the error.
void check_parameter(const char* op, const std::string& name, const OptionalTensor& parameter, const char* reason,
                     c10::SymIntArrayRef shape, const char* reference_name, const Tensor& reference) {
  if (!parameter) return;
  detail::check_matches(op, name.c_str(), *parameter, reference_name, reference);
  detail::check_shape(op, name.c_str(), *parameter, reason, shape);
}

// The same for the weight or bias of a layer norm.
void check_norm(const char* op, const char* name, const OptionalTensor& parameter, const char* reason,
                const c10::SymInt& features, const char* reference_name, const Tensor& reference) {
  if (!parameter) return;
  detail::check_norm_parameter(op, name, *parameter, reference_name, reference);
  detail::check_shape(op, name, *parameter, reason, {features});
}

void check_output(const char* op, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, const Tensor& p,
                  const OptionalTensor& p_bias, const Tensor& g, const OptionalTensor& g_bias, const c10::SymInt& c,
                  const c10::SymInt& d, const char* reason, const char* reference_name, const Tensor& reference) {
  const auto check = [&](const char* name, const OptionalTensor& parameter, c10::SymIntArrayRef shape) {
    check_parameter(op, name, parameter, reason, shape, reference_name, reference);
  };
  check_norm(op, "norm_out_weight", norm_weight, reason, d, reference_name, reference);
  check_norm(op, "norm_out_bias", norm_bias, reason, d, reference_name, reference);
  check("p_out_weight", p, {c, d});
  check("p_out_bias", p_bias, {c});
  check("g_out_weight", g, {c, c});
  check("g_out_bias", g_bias, {c});
}

}  // namespace

void detail::check_triangle(const char* op, const TriangleArguments& t, bool writes) {
  TORCH_CHECK_VALUE(t.direction == "outgoing" || t.direction == "incoming", op,
                    ": expected direction outgoing or incoming, got ", t.direction);
  check_pair(op, t.x, t.mask, "p_in_weight", t.p_in_weight);
  const c10::SymInt c = t.x.sym_size(-1);
  const auto packed_shape = [&] { return c10::str(detail::to_string(t.p_in_weight.sym_sizes()), " for c = ", c); };
  TORCH_CHECK(t.p_in_weight.dim() == 2, op, ": expected p_in_weight of shape (2d, c) to match x, got ", packed_shape());
  TORCH_SYM_CHECK(t.p_in_weight.sym_size(1).sym_eq(c), op, ": expected p_in_weight of shape (2d, c) to match x, got ",
                  packed_shape());
  const c10::SymInt rows = t.p_in_weight.sym_size(0), d = rows / 2;
  TORCH_SYM_CHECK((d * 2).sym_eq(rows), op, ": expected p_in_weight of shape (2d, c) to match x, got ", packed_shape());
  TORCH_SYM_CHECK(d.sym_gt(0).sym_or(c.sym_eq(0)), op, ": expected p_in_weight of shape (2d, c) with d > 0, got ",
                  packed_shape());
  const auto check = [&](const char* name, const OptionalTensor& parameter, const char* reason,
                         c10::SymIntArrayRef shape) {
    check_parameter(op, name, parameter, reason, shape, "p_in_weight", t.p_in_weight);
  };
  check_norm(op, "norm_in_weight", t.norm_in_weight, "x", c, "p_in_weight", t.p_in_weight);
  check_norm(op, "norm_in_bias", t.norm_in_bias, "x", c, "p_in_weight", t.p_in_weight);
  check("p_in_bias", t.p_in_bias, "p_in_weight", {rows});
  check("g_in_weight", t.g_in_weight, "p_in_weight", {rows, c});
  check("g_in_bias", t.g_in_bias, "p_in_weight", {rows});
  check_output(op, t.norm_out_weight, t.norm_out_bias, t.p_out_weight, t.p_out_bias, t.g_out_weight, t.g_out_bias, c, d,
               "x and p_in_weight", "p_in_weight", t.p_in_weight);
  if (writes) detail::check_writable(op, "x", t.x);
}

TriangleParameterList detail::to_list(const TriangleArguments& t) {
  TriangleParameterList out;
  out.reserve(kTriangleParameters);
  const auto layer = [&](const OptionalTensor& weight, const OptionalTensor& bias) {
    out.push_back(weight);
    out.push_back(bias);
  };
  layer(t.norm_in_weight, t.norm_in_bias);
  layer(t.p_in_weight, t.p_in_bias);
  layer({}, {});
  layer(t.g_in_weight, t.g_in_bias);
  layer({}, {});
  layer(t.norm_out_weight, t.norm_out_bias);
  layer(t.p_out_weight, t.p_out_bias);
  layer(t.g_out_weight, t.g_out_bias);
  return out;
}

namespace {

// Whether as_strided on this tensor would go straight to the backend's kernel, with nothing above to record or replace
// it.
bool is_below_all(const Tensor& t) {
  // BackendSelect is always on and, like autocast, falls through for operators of this kind.
  constexpr auto in_question = c10::DispatchKeySet(c10::DispatchKeySet::FULL).remove(c10::DispatchKey::BackendSelect) -
                               c10::autocast_dispatch_keyset;
  const auto keys = c10::impl::computeDispatchKeySet(t.key_set(), in_question);
  const c10::DispatchKey key = keys.highestPriorityTypeId();
  return key == c10::DispatchKey::CPU || key == c10::DispatchKey::CUDA;
}

bool is_packed(const TriangleParameters& parameters) { return !parameters[detail::kPB] && !parameters[detail::kGB]; }

void take_apart(TriangleUpdate& t) {
  t.packed = is_packed(t.parameters);
  if (!t.packed) return;
  for (const size_t first : {size_t{detail::kPA}, detail::kPA + 1, size_t{detail::kGA}, detail::kGA + 1}) {
    OptionalTensor &a = t.parameters[first], &b = t.parameters[first + detail::kPB - detail::kPA];
    if (!a) continue;
    if (is_below_all(*a)) {
      at::DimVector sizes(a->sizes());
      sizes[0] /= 2;
      b = detail::strided_view(*a, sizes, a->strides(), sizes[0] * a->stride(0));
      a = detail::strided_view(*a, sizes, a->strides(), 0);
    } else {
      // One split gives both halves, so that the gradient of a packed parameter is a single concatenation.
      const c10::SymInt d = a->sym_size(0) / 2;
      const std::vector<Tensor> parts = a->split_with_sizes_symint({d, d});
      a = parts[0];
      b = parts[1];
    }
  }
}

TriangleParameters to_array(const TriangleParameterList& parameters) {
  TriangleParameters out;
  for (size_t i = 0; i < std::min(out.size(), parameters.size()); ++i) out[i] = parameters.get(i);
  return out;
}

}  // namespace

Tensor detail::strided_view(const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  offset += t.storage_offset();
  return is_below_all(t) ? at::native::as_strided_tensorimpl(t, sizes, strides, offset)
                         : t.as_strided(sizes, strides, offset);
}

TriangleUpdate detail::taken_apart(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                                   bool outgoing, double eps) {
  TriangleUpdate t{x, mask, to_array(parameters), outgoing, eps, false};
  take_apart(t);
  return t;
}

TriangleUpdate detail::taken_apart(const TriangleArguments& t) {
  return taken_apart(t.x, t.mask, to_list(t), t.direction == "outgoing", t.eps);
}

namespace {

constexpr const char* kForward = "triangle_multiplicative_update";  // what users call
constexpr const char* kBackward = "_triangle_multiplicative_update_backward";

// The weight that the others must match, by the name that the caller knows.
const char* reference_name(bool packed) { return packed ? "p_in_weight" : "a_p_weight"; }

// The parameters as they were passed, packed or not, after checking that there are as many as there should be.
TriangleParameters listed(const char* op, const TriangleParameterList& parameters) {
  TORCH_CHECK(parameters.size() == detail::kTriangleParameters, op, ": expected ", detail::kTriangleParameters,
              " parameters, got ", parameters.size());
  const TriangleParameters listed = to_array(parameters);
  const bool packed = is_packed(listed);
  for (const auto layer : {detail::kPA, detail::kPB, detail::kGA, detail::kGB, detail::kPOut, detail::kGOut}) {
    if (packed && (layer == detail::kPB || layer == detail::kGB)) continue;
    TORCH_CHECK(listed[layer], op, ": expected a weight as parameters[", static_cast<size_t>(layer), "], got none");
  }
  return listed;
}

const char* reference_shape(bool packed) { return packed ? "(2d, c)" : "(d, c)"; }

// Checks the parameters of t, as they were passed, for x, or for other parameters if that is undefined.
void check_parameters(const char* op, const TriangleUpdate& t) {
  const bool packed = is_packed(t.parameters), has_x = t.x.defined();
  const Tensor& w = t.weight(detail::kPA);
  const char *const w_name = reference_name(packed), *const shape = reference_shape(packed);
  TORCH_CHECK(w.dim() == 2, op, ": expected ", w_name, " of shape ", shape, has_x ? " to match x" : "", ", got ",
              detail::to_string(w.sym_sizes()));
  const c10::SymInt c = has_x ? t.x.sym_size(-1) : w.sym_size(1);
  TORCH_SYM_CHECK(w.sym_size(1).sym_eq(c), op, ": expected ", w_name, " of shape ", shape, " to match x, got ",
                  detail::to_string(w.sym_sizes()));
  const c10::SymInt rows = w.sym_size(0), d = packed ? rows / 2 : rows;
  if (packed) {
    TORCH_SYM_CHECK((d * 2).sym_eq(rows), op, ": expected ", w_name, " of shape (2d, c)", has_x ? " to match x" : "",
                    ", got ", detail::to_string(w.sym_sizes()));
    TORCH_CHECK(!t.parameters[detail::kPB + 1] && !t.parameters[detail::kGB + 1], op,
                ": expected no bias of b beside packed weights, got one");
  }
  TORCH_SYM_CHECK(d.sym_gt(0).sym_or(c.sym_eq(0)), op, ": expected ", w_name, " of shape ", shape, " with d > 0, got ",
                  detail::to_string(w.sym_sizes()));
  const auto check = [&](const std::string& name, size_t index, const char* reason, c10::SymIntArrayRef shape) {
    check_parameter(op, name, t.parameters[index], reason, shape, w_name, w);
  };
  const char* const of_c = has_x ? "x" : w_name;
  check_norm(op, "norm_in_weight", t.parameters[detail::kNormIn], of_c, c, w_name, w);
  check_norm(op, "norm_in_bias", t.parameters[detail::kNormIn + 1], of_c, c, w_name, w);
  const std::array<std::string, 4> names{packed ? "p_in" : "a_p", "b_p", packed ? "g_in" : "a_g", "b_g"};
  for (size_t i = 0; i < names.size(); ++i) {
    check(names[i] + "_weight", detail::kPA + 2 * i, w_name, {rows, c});
    check(names[i] + "_bias", detail::kPA + 2 * i + 1, w_name, {rows});
  }
  const std::string reason = std::string(has_x ? "x and " : "") + w_name;
  check_output(op, t.parameters[detail::kNormOut], t.parameters[detail::kNormOut + 1], t.weight(detail::kPOut),
               t.bias(detail::kPOut), t.weight(detail::kGOut), t.bias(detail::kGOut), c, d, reason.c_str(), w_name, w);
}

// Checks the arguments; leaves the parameters as they were passed, packed or not.
TriangleUpdate checked(const char* op, const Tensor& x, const OptionalTensor& mask,
                       const TriangleParameterList& parameters, bool outgoing, double eps,
                       Positions positions = Positions::kMatrices) {
  TriangleUpdate t{x, mask, listed(op, parameters), outgoing, eps, false};
  check_pair(op, x, mask, reference_name(is_packed(t.parameters)), t.weight(detail::kPA), positions);
  check_parameters(op, t);
  return t;
}

void check_output_mask(const char* op, const TriangleUpdate& t, c10::ArrayRef<bool> output_mask) {
  for (size_t i = 0; i < detail::kTriangleParameters; ++i) {
    TORCH_CHECK(!output_mask[i] || t.parameters[i], op, ": expected output_mask without the gradient of parameters[", i,
                "], which is none, got it");
  }
}

TriangleUpdate checked_backward(const Tensor& grad, const Tensor& x, const TriangleProduct& product,
                                const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                                double eps, const TriangleOutputMask& output_mask) {
  TriangleUpdate t = checked(kBackward, x, mask, parameters, outgoing, eps);
  const char* const w_name = reference_name(is_packed(t.parameters));
  detail::check_matches(kBackward, "grad", grad, w_name, t.weight(detail::kPA));
  detail::check_shape(kBackward, "grad", grad, "x", x.sym_sizes());
  TORCH_CHECK(product.size() == 1 && product.get(0), kBackward, ": expected product as a list of one tensor, got ",
              product.size() == 1 ? "none in it" : "one of " + std::to_string(product.size()));
  const Tensor o = *product.get(0);
  detail::check_matches(kBackward, "product", o, w_name, t.weight(detail::kPA));
  detail::check_shape(kBackward, "product", o, (std::string("x and ") + w_name).c_str(),
                      detail::triangle_product_shape(t));
  TORCH_CHECK(!output_mask[1] || (mask && mask->is_floating_point()), kBackward,
              ": expected output_mask without the gradient of a mask that is none or bool, got it");
  check_output_mask(kBackward, t, c10::ArrayRef<bool>(output_mask).slice(2));
  return t;
}

TriangleUpdate checked_(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                        bool outgoing, double eps) {
  constexpr const char* op = "add_triangle_multiplicative_update_";
  TriangleUpdate t = checked(op, x, mask, parameters, outgoing, eps);
  detail::check_writable(op, "x", x);
  return t;
}

TriangleUpdate apart(TriangleUpdate t) {
  take_apart(t);
  return t;
}

}  // namespace

void detail::check_triangle_update(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                                   bool outgoing, double eps) {
  checked(kForward, x, mask, parameters, outgoing, eps);
}

void detail::check_triangle_update_(const Tensor& x, const OptionalTensor& mask,
                                    const TriangleParameterList& parameters, bool outgoing, double eps) {
  checked_(x, mask, parameters, outgoing, eps);
}

void detail::check_triangle_update_backward(const Tensor& grad, const Tensor& x, const TriangleProduct& product,
                                            const OptionalTensor& mask, const TriangleParameterList& parameters,
                                            bool outgoing, double eps, const TriangleOutputMask& output_mask) {
  checked_backward(grad, x, product, mask, parameters, outgoing, eps, output_mask);
}

TriangleUpdate detail::checked_triangle_update(const Tensor& x, const OptionalTensor& mask,
                                               const TriangleParameterList& parameters, bool outgoing, double eps) {
  return apart(checked(kForward, x, mask, parameters, outgoing, eps));
}

TriangleUpdate detail::checked_triangle_update_(const Tensor& x, const OptionalTensor& mask,
                                                const TriangleParameterList& parameters, bool outgoing, double eps) {
  return apart(checked_(x, mask, parameters, outgoing, eps));
}

TriangleUpdate detail::checked_triangle_update_backward(const Tensor& grad, const Tensor& x,
                                                        const TriangleProduct& product, const OptionalTensor& mask,
                                                        const TriangleParameterList& parameters, bool outgoing,
                                                        double eps, const TriangleOutputMask& output_mask) {
  return apart(checked_backward(grad, x, product, mask, parameters, outgoing, eps, output_mask));
}

TriangleUpdate detail::checked_triangle_rows(const char* op, const Tensor& x, const OptionalTensor& mask,
                                             const TriangleParameterList& parameters, double eps) {
  return apart(checked(op, x, mask, parameters, /*outgoing=*/true, eps, Positions::kRows));
}

TriangleUpdate detail::checked_triangle_parameters(const char* op, const TriangleParameterList& parameters,
                                                   const TriangleParameterOutputMask& output_mask) {
  TriangleUpdate t{{}, {}, listed(op, parameters), /*outgoing=*/true, /*eps=*/0, false};
  const char* const w_name = reference_name(is_packed(t.parameters));
  check_dtype(op, w_name, t.weight(kPA));
  check_parameters(op, t);
  check_output_mask(op, t, output_mask);
  return apart(std::move(t));
}

std::array<c10::SymInt, detail::kSummedLayers.size() + 1> detail::triangle_sums_begin(const TriangleUpdate& t) {
  std::array<c10::SymInt, kSummedLayers.size() + 1> begins;
  for (size_t i = 0; i < kSummedLayers.size(); ++i) {
    const Tensor& w = t.weight(kSummedLayers[i]);
    begins[i + 1] = begins[i] + w.sym_size(0) * (w.sym_size(1) + 1);
  }
  return begins;
}

c10::SymDimVector detail::triangle_product_shape(const TriangleUpdate& t) {
  c10::SymDimVector shape(t.x.sym_sizes().slice(0, t.x.dim() - 3));
  const c10::SymInt n = t.x.sym_size(-2), d = t.weight(kPOut).sym_size(1);
  for (const c10::SymInt& size : {d, padded_size(n, t.dtype()), padded_row_stride(n, d, t.dtype())}) {
    shape.push_back(size);
  }
  return shape;
}

double detail::triangle_scale(int64_t n, at::ScalarType dtype) {
  if (dtype != at::kHalf || n <= 1) return 1;
  return std::exp2(-std::ceil(std::log2(static_cast<double>(n)) / 2));
}

int64_t detail::batch_size(const Tensor& t, int64_t trailing_dims) {
  return c10::multiply_integers(t.sizes().slice(0, t.dim() - trailing_dims));
}

Tensor detail::batch_element(const Tensor& t, int64_t trailing_dims, int64_t index) {
  const int64_t batch_dims = t.dim() - trailing_dims;
  if (batch_dims == 0) return t;
  int64_t offset = 0;
  for (int64_t dim = batch_dims - 1; dim >= 0; --dim) {
    offset += index % t.size(dim) * t.stride(dim);
    index /= t.size(dim);
  }
  return strided_view(t, t.sizes().slice(batch_dims), t.strides().slice(batch_dims), offset);
}

}  // namespace torchops
