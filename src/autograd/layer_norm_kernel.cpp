#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/normalize.h"
#include "autograd/recipe.h"
#include "ops/layer_norm.h"

namespace torchops::autograd {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr Tensor (*functional)(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&,
                               double) = layer_norm;

struct LayerNormFunctional : FunctionalOp<LayerNormFunctional, functional> {
  static void check(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                    const OptionalTensor& bias, double) {
    check_layer_norm(x, normalized_shape, weight, bias);
  }
  static Tensor decomposed(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
    return scale_and_shift(normalize(x, normalized_shape.size(), eps).xhat, weight, bias, x.scalar_type()).contiguous();
  }
  static Tensor train(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps);
};

struct LayerNormInPlace
    : MutatingOp<LayerNormInPlace, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&, double> {
  static constexpr const char* name = "layer_norm_";
  static void check(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                    const OptionalTensor& bias, double) {
    check_layer_norm_(x, normalized_shape, weight, bias);
  }
  static Tensor decomposed(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
    return LayerNormFunctional::decomposed(x, normalized_shape, weight, bias, eps);
  }
  static Tensor functional(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
    return layer_norm(x, normalized_shape, weight, bias, eps);
  }
  static Tensor traced(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps);
  static void in_place(Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps) {
    layer_norm_(x, normalized_shape, weight, bias, eps);
  }
  static Tensor train(const Tensor& x, const Tensor& target, c10::SymIntArrayRef normalized_shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps);
};

// Function::apply unpacks an array argument into its elements; a struct stays one argument.
struct Normalization {
  c10::SymIntArrayRef shape;
  double eps;
};

// For double backward, which also differentiates through the moments.
std::array<Tensor, 3> differentiable_backward(const Tensor& grad, const Tensor& x, int64_t dims,
                                              const OptionalTensor& weight, double eps,
                                              std::array<bool, 3> output_mask) {
  auto out = normalization_gradients(grad, normalize(x, dims, eps), dims, weight, output_mask, x.scalar_type());
  for (const size_t i : {1, 2}) {
    if (output_mask[i]) out[i] = out[i].to(detail::norm_gradient_dtype(x, weight));
  }
  return out;
}

// layer_norm() with the moments of x, below autograd. Overwrites `target` if there is one, instead of making a new
// tensor.
std::tuple<Tensor, Tensor, Tensor> with_moments(const Tensor& x, const Normalization& normalization,
                                                const OptionalTensor& weight, const OptionalTensor& bias,
                                                const OptionalTensor& target) {
  const auto [shape, eps] = normalization;
  if (!target) return detail::layer_norm_with_moments(x, shape, weight, bias, eps);
  Tensor mean, rstd;
  const Tensor y = overwrite(*target, [&, &shape = shape, &eps = eps](Tensor& self) {
    std::tie(mean, rstd) = detail::layer_norm_with_moments_(self, shape, weight, bias, eps);
  });
  return {y, mean, rstd};
}

// Saves x and its moments.
struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Normalization& normalization,
                        const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& target) {
    at::AutoDispatchBelowAutograd below_autograd;
    if (target) check_can_be_saved({x, weight.value_or(Tensor())});
    const auto [y, mean, rstd] = with_moments(x, normalization, weight, bias, target);
    ctx->save_for_backward({x, weight.value_or(Tensor()), mean, rstd});
    ctx->saved_data["dims"] = static_cast<int64_t>(normalization.shape.size());
    ctx->saved_data["eps"] = normalization.eps;
    ctx->saved_data["has_bias"] = bias.has_value();
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &mean = saved[2], &rstd = saved[3];
    const OptionalTensor weight = optional_of(saved[1]);
    // Edges are numbered among the tensors that were passed.
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const std::array<bool, 3> output_mask{ctx->needs_input_grad(0), weight && ctx->needs_input_grad(1),
                                          has_bias && ctx->needs_input_grad(weight ? 2 : 1)};
    const int64_t dims = ctx->saved_data["dims"].toInt();
    std::array<Tensor, 3> out;
    if (at::GradMode::is_enabled()) {
      out = differentiable_backward(grads[0], x, dims, weight, ctx->saved_data["eps"].toDouble(), output_mask);
    } else {
      std::tie(out[0], out[1], out[2]) = detail::layer_norm_backward(grads[0], x, x.sym_sizes().slice(x.dim() - dims),
                                                                     mean, rstd, weight, output_mask);
    }
    return {output_mask[0] ? out[0] : Tensor(), Tensor(), output_mask[1] ? out[1] : Tensor(),
            output_mask[2] ? out[2] : Tensor(), Tensor()};
  }
};

// Without weight and bias, the output is the normalised input. Together with the moments of each row, it is all that
// backward needs, so nothing else of x's size is saved. Traced, too: a checkpoint may trace only one of its two passes,
// and would take what the other one saves for what it saved itself.
struct LayerNormFromOutput : torch::autograd::Function<LayerNormFromOutput> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Normalization& normalization,
                        const OptionalTensor& target) {
    at::AutoDispatchBelowAutograd below_autograd;
    const auto [y, mean, rstd] = with_moments(x, normalization, std::nullopt, std::nullopt, target);
    ctx->save_for_backward({y, mean, rstd});
    ctx->saved_data["dims"] = static_cast<int64_t>(normalization.shape.size());
    ctx->saved_data["eps"] = normalization.eps;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &y = saved[0], &mean = saved[1], &rstd = saved[2];
    const int64_t dims = ctx->saved_data["dims"].toInt();
    constexpr std::array<bool, 3> only_x{true, false, false};
    Tensor dx;
    if (at::GradMode::is_enabled()) {
      // Double backward also differentiates through the moments, so it needs x itself: rebuild its value, and take its
      // history from the input edge of this node, which made y.
      Tensor x = (y.detach() / rstd + mean).to(y.scalar_type());
      torch::autograd::impl::set_gradient_edge(x, y.grad_fn()->next_edge(0));
      dx = differentiable_backward(grads[0], x, dims, std::nullopt, ctx->saved_data["eps"].toDouble(), only_x)[0];
    } else {
      // y has mean 0 and is its own normalisation: call the fused backward with rstd = 1, then apply the factor.
      dx = std::get<0>(detail::layer_norm_backward(grads[0], y, y.sym_sizes().slice(y.dim() - dims),
                                                   at::zeros_like(rstd), at::ones_like(rstd), std::nullopt, only_x));
      dx.mul_(rstd);
    }
    return {dx, Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> layer_norm_with_moments_version_(Tensor& x, c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight, const OptionalTensor& bias,
                                                            double eps) {
  return bump_version_after(x,
                            [&] { return detail::layer_norm_with_moments_(x, normalized_shape, weight, bias, eps); });
}

Tensor LayerNormFunctional::train(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps) {
  return LayerNorm::apply(x, Normalization{normalized_shape, eps}, weight, bias, std::nullopt);
}

Tensor LayerNormInPlace::traced(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                const OptionalTensor& bias, double eps) {
  if (!weight && !bias) return LayerNormFromOutput::apply(x, Normalization{normalized_shape, eps}, std::nullopt);
  return layer_norm(detail::saved_copy(x), normalized_shape, weight, bias, eps);
}

Tensor LayerNormInPlace::train(const Tensor& x, const Tensor& target, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const Normalization normalization{normalized_shape, eps};
  if (!weight && !bias) return LayerNormFromOutput::apply(x, normalization, target);
  return LayerNorm::apply(x.clone(), normalization, weight, bias, target);
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) { m.impl("layer_norm", LayerNormFunctional::autograd); }

TORCHOPS_MUTATING(LayerNormInPlace)

TORCH_LIBRARY_IMPL(myops, ADInplaceOrView, m) { m.impl("_layer_norm_", layer_norm_with_moments_version_); }

std::tuple<Tensor, Tensor> layer_norm_with_moments_functionalized_(Tensor& x, c10::SymIntArrayRef normalized_shape,
                                                                   const OptionalTensor& weight,
                                                                   const OptionalTensor& bias, double eps) {
  check_layer_norm_(x, normalized_shape, weight, bias);
  Tensor y, mean, rstd;
  overwrite_with_new(x, [&] {
    std::tie(y, mean, rstd) = detail::layer_norm_with_moments(x, normalized_shape, weight, bias, eps);
    return y;
  });
  return {mean, rstd};
}

TORCH_LIBRARY_IMPL(myops, Functionalize, m) { m.impl("_layer_norm_", layer_norm_with_moments_functionalized_); }

TORCHOPS_LAZY("_layer_norm_", detail::layer_norm_with_moments_)

TORCHOPS_AUTOCAST(m) {
  m.impl("layer_norm", autocast<CastTo::kFloat32, functional>);
  m.impl("layer_norm_", autocast<CastTo::kFirst, LayerNormInPlace::in_place>);
}

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("layer_norm", autocast<CastTo::kFloat32, LayerNormFunctional::batched>);
  m.impl("layer_norm_", autocast<CastTo::kFirst, LayerNormInPlace::batched>);
}

// For backends that implement only layer_norm and layer_norm_.
std::tuple<Tensor, Tensor, Tensor> layer_norm_with_moments_composite(const Tensor& x,
                                                                     c10::SymIntArrayRef normalized_shape,
                                                                     const OptionalTensor& weight,
                                                                     const OptionalTensor& bias, double eps) {
  check_layer_norm(x, normalized_shape, weight, bias);
  const auto [xhat, mean, rstd] = normalize(x, normalized_shape.size(), eps);
  return {scale_and_shift(xhat, weight, bias, x.scalar_type()).contiguous(), mean, rstd};
}

std::tuple<Tensor, Tensor> layer_norm_with_moments_composite_(Tensor& x, c10::SymIntArrayRef normalized_shape,
                                                              const OptionalTensor& weight, const OptionalTensor& bias,
                                                              double eps) {
  check_layer_norm_(x, normalized_shape, weight, bias);
  const auto [y, mean, rstd] = layer_norm_with_moments_composite(x, normalized_shape, weight, bias, eps);
  x.copy_(y);
  return {mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward_composite(const Tensor& grad, const Tensor& x,
                                                                 c10::SymIntArrayRef normalized_shape,
                                                                 const Tensor& mean, const Tensor& rstd,
                                                                 const OptionalTensor& weight,
                                                                 std::array<bool, 3> output_mask) {
  detail::check_layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight);
  const at::ScalarType wide = rstd.scalar_type();
  const Normalized normalized{(x.to(wide) - mean) * rstd, mean, rstd};
  auto out = normalization_gradients(grad.to(wide), normalized, static_cast<int64_t>(normalized_shape.size()), weight,
                                     output_mask, x.scalar_type());
  for (size_t i = 0; i < out.size(); ++i) {
    const at::ScalarType dtype = i == 0 ? x.scalar_type() : detail::norm_gradient_dtype(x, weight);
    out[i] = output_mask[i] ? out[i].to(dtype).contiguous() : at::empty({0}, x.options().dtype(dtype));
  }
  return {out[0], out[1], out[2]};
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) {
  m.impl("_layer_norm", layer_norm_with_moments_composite);
  m.impl("_layer_norm_", layer_norm_with_moments_composite_);
  m.impl("_layer_norm_backward", layer_norm_backward_composite);
}

}  // namespace
}  // namespace torchops::autograd
