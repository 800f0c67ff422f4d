#include "ops/layer_norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor layer_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("myops::layer_norm", "")
          .typed<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&, double)>();
  return op.call(x, normalized_shape, weight, bias, eps);
}

Tensor& layer_norm_(Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                    const OptionalTensor& bias, double eps) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("myops::layer_norm_", "")
          .typed<void(Tensor&, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&, double)>();
  op.call(x, normalized_shape, weight, bias, eps);
  return x;
}

std::tuple<Tensor, Tensor, Tensor> detail::layer_norm_with_moments(const Tensor& x,
                                                                   c10::SymIntArrayRef normalized_shape,
                                                                   const OptionalTensor& weight,
                                                                   const OptionalTensor& bias, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_layer_norm", "")
                             .typed<decltype(layer_norm_with_moments)>();
  return op.call(x, normalized_shape, weight, bias, eps);
}

std::tuple<Tensor, Tensor> detail::layer_norm_with_moments_(Tensor& x, c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight, const OptionalTensor& bias,
                                                            double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_layer_norm_", "")
                             .typed<decltype(layer_norm_with_moments_)>();
  return op.call(x, normalized_shape, weight, bias, eps);
}

std::tuple<Tensor, Tensor, Tensor> detail::layer_norm_backward(const Tensor& grad, const Tensor& x,
                                                               c10::SymIntArrayRef normalized_shape, const Tensor& mean,
                                                               const Tensor& rstd, const OptionalTensor& weight,
                                                               std::array<bool, 3> output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_layer_norm_backward", "")
                             .typed<decltype(layer_norm_backward)>();
  return op.call(grad, x, normalized_shape, mean, rstd, weight, output_mask);
}

namespace {

void check(const char* op, const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
           const OptionalTensor& bias) {
  detail::check_dtype(op, "x", x);
  TORCH_CHECK(!normalized_shape.empty(), op, ": expected normalized_shape of at least 1 dimension, got ()");
  const auto dims = static_cast<int64_t>(normalized_shape.size());
  const auto expected = [&] {
    const std::string shape = detail::to_string(normalized_shape);
    return "(..., " + shape.substr(1, shape.size() - (dims == 1 ? 3 : 2)) + ")";
  };
  TORCH_CHECK(x.dim() >= dims, op, ": expected x of shape ", expected(), " to match normalized_shape, got ",
              detail::to_string(x.sym_sizes()));
  for (int64_t i = 0; i < dims; ++i) {
    TORCH_SYM_CHECK(x.sym_size(x.dim() - dims + i).sym_eq(normalized_shape[i]), op, ": expected x of shape ",
                    expected(), " to match normalized_shape, got ", detail::to_string(x.sym_sizes()));
  }
  const auto check_affine = [&](const char* name, const OptionalTensor& parameter) {
    if (!parameter) return;
    detail::check_norm_parameter(op, name, *parameter, "x", x);
    detail::check_shape(op, name, *parameter, "normalized_shape", normalized_shape);
  };
  check_affine("weight", weight);
  check_affine("bias", bias);
}

c10::SymDimVector moments_shape(const Tensor& x, size_t trailing_dims) {
  c10::SymDimVector shape(x.sym_sizes());
  std::fill(shape.end() - static_cast<std::ptrdiff_t>(trailing_dims), shape.end(), c10::SymInt(1));
  return shape;
}

}  // namespace

void check_layer_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                      const OptionalTensor& bias) {
  check("layer_norm", x, normalized_shape, weight, bias);
}

void check_layer_norm_(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias) {
  check("layer_norm_", x, normalized_shape, weight, bias);
  detail::check_writable("layer_norm_", "x", x);
}

void detail::check_layer_norm_backward(const Tensor& grad, const Tensor& x, c10::SymIntArrayRef normalized_shape,
                                       const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight) {
  constexpr const char* op = "_layer_norm_backward";
  check(op, x, normalized_shape, weight, std::nullopt);
  check_matches(op, "grad", grad, "x", x);
  check_shape(op, "grad", grad, "x", x.sym_sizes());
  const c10::SymDimVector shape = moments_shape(x, normalized_shape.size());
  for (const auto& [name, moment] : {std::pair("mean", &mean), std::pair("rstd", &rstd)}) {
    const at::ScalarType expected = moments_dtype(x.scalar_type());
    check_dtype(op, name, *moment);
    TORCH_CHECK(moment->scalar_type() == expected, op, ": expected ", name, " of dtype ", to_string(expected),
                " for x of dtype ", to_string(x.scalar_type()), ", got ", to_string(moment->scalar_type()));
    TORCH_CHECK(moment->device() == x.device(), op, ": expected ", name, " on device ", x.device().str(),
                " to match x, got ", moment->device().str());
    check_shape(op, name, *moment, "x", shape);
  }
}

std::tuple<Tensor, Tensor> detail::empty_moments(const Tensor& x, size_t trailing_dims) {
  const c10::SymDimVector sizes = moments_shape(x, trailing_dims);
  const auto options = x.options().dtype(moments_dtype(x.scalar_type()));
  return {at::empty_symint(sizes, options), at::empty_symint(sizes, options)};
}

namespace {

Tensor layer_norm_meta(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias, double) {
  check_layer_norm(x, normalized_shape, weight, bias);
  return at::empty_symint(x.sym_sizes(), x.options());
}

void layer_norm_meta_(Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                      const OptionalTensor& bias, double) {
  check_layer_norm_(x, normalized_shape, weight, bias);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_with_moments_meta(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& bias, double eps) {
  // Two statements, because the shape of the moments is only defined after the check.
  const Tensor y = layer_norm_meta(x, normalized_shape, weight, bias, eps);
  return std::tuple_cat(std::tuple(y), detail::empty_moments(x, normalized_shape.size()));
}

std::tuple<Tensor, Tensor> layer_norm_with_moments_meta_(Tensor& x, c10::SymIntArrayRef normalized_shape,
                                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                                         double eps) {
  layer_norm_meta_(x, normalized_shape, weight, bias, eps);
  return detail::empty_moments(x, normalized_shape.size());
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward_meta(const Tensor& grad, const Tensor& x,
                                                            c10::SymIntArrayRef normalized_shape, const Tensor& mean,
                                                            const Tensor& rstd, const OptionalTensor& weight,
                                                            std::array<bool, 3> output_mask) {
  detail::check_layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight);
  const auto of_parameters = x.options().dtype(detail::norm_gradient_dtype(x, weight));
  const c10::SymDimVector none{0};
  const auto empty_vector = [&](bool wanted) {
    return at::empty_symint(wanted ? normalized_shape : none, of_parameters);
  };
  return {detail::empty_if(output_mask[0], x.sym_sizes(), x), empty_vector(output_mask[1]),
          empty_vector(output_mask[2])};
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> "
      "Tensor",
      tags);
  m.def(
      "layer_norm_(Tensor(a!) x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) "
      "-> ()",
      tags);
  m.def(
      "_layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, "
      "Tensor)",
      tags);
  m.def(
      "_layer_norm_(Tensor(a!) x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, "
      "Tensor)",
      tags);
  m.def(
      "_layer_norm_backward(Tensor grad, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? "
      "weight, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("layer_norm", layer_norm_meta);
  m.impl("layer_norm_", layer_norm_meta_);
  m.impl("_layer_norm", layer_norm_with_moments_meta);
  m.impl("_layer_norm_", layer_norm_with_moments_meta_);
  m.impl("_layer_norm_backward", layer_norm_backward_meta);
}

}  // namespace
}  // namespace torchops
