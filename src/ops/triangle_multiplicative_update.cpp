#include "ops/triangle_multiplicative_update.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/common.h"

namespace torchops {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleArguments;
using detail::TriangleOutputMask;
using detail::TriangleParameterList;
using detail::TriangleParameterOutputMask;
using detail::TriangleProduct;
using detail::TriangleResults;
using detail::TriangleUpdate;

Tensor triangle_multiplicative_update(const Tensor& x, std::string_view direction, const OptionalTensor& mask,
                                      const OptionalTensor& norm_in_weight, const OptionalTensor& norm_in_bias,
                                      const Tensor& p_in_weight, const OptionalTensor& p_in_bias,
                                      const Tensor& g_in_weight, const OptionalTensor& g_in_bias,
                                      const OptionalTensor& norm_out_weight, const OptionalTensor& norm_out_bias,
                                      const Tensor& p_out_weight, const OptionalTensor& p_out_bias,
                                      const Tensor& g_out_weight, const OptionalTensor& g_out_bias, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::triangle_multiplicative_update", "")
                             .typed<decltype(triangle_multiplicative_update)>();
  return op.call(x, direction, mask, norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias,
                 norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias, eps);
}

Tensor& add_triangle_multiplicative_update_(Tensor& x, std::string_view direction, const OptionalTensor& mask,
                                            const OptionalTensor& norm_in_weight, const OptionalTensor& norm_in_bias,
                                            const Tensor& p_in_weight, const OptionalTensor& p_in_bias,
                                            const Tensor& g_in_weight, const OptionalTensor& g_in_bias,
                                            const OptionalTensor& norm_out_weight, const OptionalTensor& norm_out_bias,
                                            const Tensor& p_out_weight, const OptionalTensor& p_out_bias,
                                            const Tensor& g_out_weight, const OptionalTensor& g_out_bias, double eps) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("myops::add_triangle_multiplicative_update_", "")
          .typed<void(Tensor&, std::string_view, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                      double)>();
  op.call(x, direction, mask, norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias,
          norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias, eps);
  return x;
}

std::tuple<Tensor, Tensor> detail::triangle_update(const Tensor& x, const OptionalTensor& mask,
                                                   const TriangleParameterList& parameters, bool outgoing, double eps,
                                                   bool keep_product, bool add_residual) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_multiplicative_update", "")
                             .typed<decltype(triangle_update)>();
  return op.call(x, mask, parameters, outgoing, eps, keep_product, add_residual);
}

Tensor detail::triangle_update_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                                bool outgoing, double eps, bool keep_product) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_multiplicative_update_", "")
                             .typed<decltype(triangle_update_)>();
  return op.call(x, mask, parameters, outgoing, eps, keep_product);
}

std::vector<Tensor> detail::triangle_update_backward(const Tensor& grad, const Tensor& x,
                                                     const TriangleProduct& product, const OptionalTensor& mask,
                                                     const TriangleParameterList& parameters, bool outgoing, double eps,
                                                     TriangleOutputMask output_mask, bool add_residual) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_multiplicative_update_backward", "")
                             .typed<decltype(triangle_update_backward)>();
  return op.call(grad, x, product, mask, parameters, outgoing, eps, output_mask, add_residual);
}

std::vector<Tensor> detail::empty_triangle_gradients(
    const TriangleUpdate& t, const TriangleOutputMask& output_mask,
    c10::function_ref<Tensor(c10::SymIntArrayRef, const at::TensorOptions&)> empty) {
  std::vector<Tensor> gradients;
  gradients.reserve(kTriangleGradients);
  const auto make = [&](const OptionalTensor& argument, const at::TensorOptions& options) {
    const c10::SymDimVector none{0};
    gradients.push_back(empty(output_mask[gradients.size()] ? argument->sym_sizes() : none, options));
  };
  make(t.x, t.x.options());
  make(t.mask, t.mask ? t.mask->options() : t.weight(kPA).options());
  TriangleParameterOutputMask of_parameters;
  std::copy(output_mask.begin() + 2, output_mask.end(), of_parameters.begin());
  for (Tensor& gradient : empty_triangle_parameter_gradients(t, of_parameters, empty)) {
    gradients.push_back(std::move(gradient));
  }
  return gradients;
}

std::vector<Tensor> detail::empty_triangle_parameter_gradients(
    const TriangleUpdate& t, const TriangleParameterOutputMask& output_mask,
    c10::function_ref<Tensor(c10::SymIntArrayRef, const at::TensorOptions&)> empty) {
  std::vector<Tensor> gradients;
  gradients.reserve(kTriangleParameters);
  for (size_t i = 0; i < kTriangleParameters; ++i) {
    c10::SymDimVector shape{0};
    if (output_mask[i]) {
      shape = c10::SymDimVector(t.parameters[i]->sym_sizes());
      if (t.packed && kPA <= i && i < kNormOut) shape[0] = shape[0] * 2;
    }
    gradients.push_back(empty(shape, t.parameters[i].value_or(t.weight(kPA)).options()));
  }
  return gradients;
}

TriangleResults detail::gradients_apart(const TriangleUpdate& t, at::ArrayRef<Tensor> parameter_gradients,
                                        const TriangleParameterOutputMask& output_mask) {
  TriangleResults parts;
  for (size_t i = 0; i < kTriangleParameters; ++i) {
    if (output_mask[i]) parts[i] = parameter_gradients[i];
  }
  if (!t.packed) return parts;
  for (const size_t of_a : {size_t{kPA}, kPA + 1, size_t{kGA}, kGA + 1}) {
    const Tensor both = parts[of_a];
    if (!both.defined()) continue;
    at::DimVector sizes(both.sizes());
    sizes[0] /= 2;
    parts[of_a] = strided_view(both, sizes, both.strides(), 0);
    parts[of_a + kPB - kPA] = strided_view(both, sizes, both.strides(), sizes[0] * both.stride(0));
  }
  return parts;
}

namespace {

// The public operators call the private ones with the halves of the packed weights.
template <auto function>
struct Public;

template <class... Args, Tensor (*function)(const Tensor&, Args...)>
struct Public<function> {
  static Tensor update(const Tensor& x, Args... args) {
    const TriangleArguments arguments{x, args...};
    detail::check_triangle("triangle_multiplicative_update", arguments, false);
    return std::get<0>(detail::triangle_update(x, arguments.mask, detail::to_list(arguments),
                                               arguments.direction == "outgoing", arguments.eps,
                                               /*keep_product=*/false, /*add_residual=*/false));
  }
  static void update_(Tensor& x, Args... args) {
    const TriangleArguments arguments{x, args...};
    detail::check_triangle("add_triangle_multiplicative_update_", arguments, true);
    detail::triangle_update_(x, arguments.mask, detail::to_list(arguments), arguments.direction == "outgoing",
                             arguments.eps, false);
  }
  static Tensor meta(const Tensor& x, Args... args) {
    const TriangleArguments arguments{x, args...};
    detail::check_triangle("triangle_multiplicative_update", arguments, false);
    return at::empty_symint(x.sym_sizes(), arguments.p_in_weight.options());
  }
  static void meta_(Tensor& x, Args... args) {
    detail::check_triangle("add_triangle_multiplicative_update_", {x, args...}, true);
  }
};
using PublicKernels = Public<triangle_multiplicative_update>;

std::tuple<Tensor, Tensor> update_meta(const Tensor& x, const OptionalTensor& mask,
                                       const TriangleParameterList& parameters, bool outgoing, double eps,
                                       bool keep_product, bool add_residual) {
  const TriangleUpdate t = detail::checked_triangle_update(x, mask, parameters, outgoing, eps);
  return {at::empty_symint(x.sym_sizes(), (add_residual ? x : t.weight(detail::kPA)).options()),
          detail::empty_if(keep_product, detail::triangle_product_shape(t), t.weight(detail::kPA))};
}

Tensor update_meta_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                    double eps, bool keep_product) {
  const TriangleUpdate t = detail::checked_triangle_update_(x, mask, parameters, outgoing, eps);
  return detail::empty_if(keep_product, detail::triangle_product_shape(t), t.weight(detail::kPA));
}

std::vector<Tensor> update_backward_meta(const Tensor& grad, const Tensor& x, const TriangleProduct& product,
                                         const OptionalTensor& mask, const TriangleParameterList& parameters,
                                         bool outgoing, double eps, TriangleOutputMask output_mask,
                                         bool /*add_residual*/) {
  return detail::empty_triangle_gradients(
      detail::checked_triangle_update_backward(grad, x, product, mask, parameters, outgoing, eps, output_mask),
      output_mask,
      [](c10::SymIntArrayRef shape, const at::TensorOptions& options) { return at::empty_symint(shape, options); });
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto define = [&](const std::string& schema) { m.def(schema.c_str(), tags); };
  const std::string arguments =
      "str direction=\"outgoing\", *, Tensor? mask=None, Tensor? norm_in_weight=None, Tensor? norm_in_bias=None, "
      "Tensor p_in_weight, Tensor? p_in_bias=None, Tensor g_in_weight, Tensor? g_in_bias=None, "
      "Tensor? norm_out_weight=None, Tensor? norm_out_bias=None, Tensor p_out_weight, Tensor? p_out_bias=None, "
      "Tensor g_out_weight, Tensor? g_out_bias=None, float eps=1e-5";
  define("triangle_multiplicative_update(Tensor x, " + arguments + ") -> Tensor");
  define("add_triangle_multiplicative_update_(Tensor(a!) x, " + arguments + ") -> ()");
  const std::string private_arguments = "Tensor? mask, Tensor?[] parameters, bool outgoing, float eps";
  define("_triangle_multiplicative_update(Tensor x, " + private_arguments +
         ", bool keep_product=False, bool add_residual=False) -> (Tensor, Tensor)");
  define("_triangle_multiplicative_update_(Tensor(a!) x, " + private_arguments +
         ", bool keep_product=False) -> Tensor");
  define("_triangle_multiplicative_update_backward(Tensor grad, Tensor x, Tensor?[] product, " + private_arguments +
         ", bool[18] output_mask, bool add_residual=False) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("triangle_multiplicative_update", PublicKernels::meta);
  m.impl("add_triangle_multiplicative_update_", PublicKernels::meta_);
  m.impl("_triangle_multiplicative_update", update_meta);
  m.impl("_triangle_multiplicative_update_", update_meta_);
  m.impl("_triangle_multiplicative_update_backward", update_backward_meta);
}

}  // namespace

void detail::register_triangle_update(torch::Library& backend) {
  backend.impl("triangle_multiplicative_update", PublicKernels::update);
  backend.impl("add_triangle_multiplicative_update_", PublicKernels::update_);
}

}  // namespace torchops
