#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros_like.h>

#include "autograd/recipe.h"
#include "ops/layer_norm.h"

namespace torchops::autograd {
namespace {

using OptionalTensor = std::optional<Tensor>;

Tensor layer_norm_decomposed(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps) {
  check_layer_norm(x, normalized_shape, weight, bias);
  return at::layer_norm_symint(x, normalized_shape, weight, bias, eps);
}

struct LayerNormInPlace : MutatingOp<LayerNormInPlace, c10::SymIntArrayRef, const OptionalTensor&,
                                     const OptionalTensor&, double> {
  static void check(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                    const OptionalTensor& bias, double) {
    check_layer_norm_(x, normalized_shape, weight, bias);
  }
  static Tensor decomposed(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
    return at::layer_norm_symint(x, normalized_shape, weight, bias, eps);
  }
  static Tensor traced(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps) {
    return layer_norm(detail::keep(x), normalized_shape, weight, bias, eps);
  }
  static void in_place(Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps) {
    layer_norm_(x, normalized_shape, weight, bias, eps);
  }
  static Tensor train(const Tensor& x, const Tensor& target, c10::SymIntArrayRef normalized_shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps);
};

// Function::apply takes an array argument apart into its elements; in a struct it stays one argument.
struct Normalization {
  c10::SymIntArrayRef shape;
  double eps;
};

std::vector<int64_t> trailing_dims(int64_t count) {
  std::vector<int64_t> dims;
  for (int64_t dim = -count; dim < 0; ++dim) dims.push_back(dim);
  return dims;
}

// The gradient in differentiable operators, with the moments as functions of x: what double backward differentiates.
// With xhat = (x - mean) * rstd and h = g * weight:
//   dx = rstd * (h - mean(h) - xhat * mean(h * xhat)),  dweight = sum(g * xhat),  dbias = sum(g) over the rows.
std::array<Tensor, 3> differentiable_backward(const Tensor& grad, const Tensor& x, int64_t dims,
                                              const OptionalTensor& weight, double eps, std::array<bool, 3> mask) {
  const std::vector<int64_t> over = trailing_dims(dims);
  const auto [var, mean] = at::var_mean(x, over, /*correction=*/0, /*keepdim=*/true);
  const Tensor rstd = at::rsqrt(var + eps);
  const Tensor xhat = (x - mean) * rstd;
  std::array<Tensor, 3> out;
  if (mask[0]) {
    const Tensor h = weight ? grad * *weight : grad;
    out[0] = rstd * (h - h.mean(over, true) - xhat * (h * xhat).mean(over, true));
  }
  const auto over_rows = [&](const Tensor& t) { return dims == t.dim() ? t : t.flatten(0, -dims - 1).sum(0); };
  if (mask[1]) out[1] = over_rows(grad * xhat);
  if (mask[2]) out[2] = over_rows(grad);
  return out;
}

// Saves x and its moments. With a `target` it overwrites that in place of returning a new tensor.
struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Normalization& normalization,
                        const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& target) {
    at::AutoDispatchBelowAutograd below_autograd;
    const auto [shape, eps] = normalization;
    Tensor y, mean, rstd;
    if (target) {
      y = overwrite(*target, [&, &shape = shape, &eps = eps](Tensor& self) {
        std::tie(mean, rstd) = detail::layer_norm_with_moments_(self, shape, weight, bias, eps);
      });
    } else {
      std::tie(y, mean, rstd) = detail::layer_norm_with_moments(x, shape, weight, bias, eps);
    }
    ctx->save_for_backward({x, weight.value_or(Tensor()), mean, rstd});
    ctx->saved_data["dims"] = static_cast<int64_t>(shape.size());
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["x_requires_grad"] = requires_grad(x);
    ctx->saved_data["weight_requires_grad"] = requires_grad(weight);
    ctx->saved_data["bias_requires_grad"] = requires_grad(bias);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &mean = saved[2], &rstd = saved[3];
    const OptionalTensor weight = saved[1].defined() ? OptionalTensor(saved[1]) : std::nullopt;
    const std::array<bool, 3> mask{ctx->saved_data["x_requires_grad"].toBool(),
                                   ctx->saved_data["weight_requires_grad"].toBool(),
                                   ctx->saved_data["bias_requires_grad"].toBool()};
    const int64_t dims = ctx->saved_data["dims"].toInt();
    std::array<Tensor, 3> out;
    if (at::GradMode::is_enabled()) {
      out = differentiable_backward(grads[0], x, dims, weight, ctx->saved_data["eps"].toDouble(), mask);
    } else {
      std::tie(out[0], out[1], out[2]) =
          detail::layer_norm_backward(grads[0], x, x.sym_sizes().slice(x.dim() - dims), mean, rstd, weight, mask);
    }
    return {mask[0] ? out[0] : Tensor(), Tensor(), mask[1] ? out[1] : Tensor(), mask[2] ? out[2] : Tensor(), Tensor()};
  }
};

// Without weight and bias the output is the normalised input, which is all that the gradient needs beside rstd. rstd is an
// output of the Function, so that double backward can differentiate through it: with N elements a row,
//   drstd/dx = -rstd^2 * y / N.
struct LayerNormFromOutput : torch::autograd::Function<LayerNormFromOutput> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor&, const Normalization& normalization,
                               const Tensor& target) {
    at::AutoDispatchBelowAutograd below_autograd;
    const auto [shape, eps] = normalization;
    Tensor rstd;
    const Tensor y = overwrite(target, [&, &shape = shape, &eps = eps](Tensor& self) {
      rstd = std::get<1>(detail::layer_norm_with_moments_(self, shape, std::nullopt, std::nullopt, eps));
    });
    ctx->save_for_backward({y, rstd});
    ctx->set_materialize_grads(false);
    ctx->saved_data["dims"] = static_cast<int64_t>(shape.size());
    return {y, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &y = saved[0], &rstd = saved[1];
    const Tensor grad = grads[0].defined() ? grads[0] : at::zeros_like(y);
    const int64_t dims = ctx->saved_data["dims"].toInt();
    const c10::SymIntArrayRef shape = y.sym_sizes().slice(y.dim() - dims);
    Tensor dx;
    if (at::GradMode::is_enabled()) {
      const std::vector<int64_t> over = trailing_dims(dims);
      dx = rstd * (grad - grad.mean(over, true) - y * (grad * y).mean(over, true));
    } else {
      // y has mean 0 and stands for its own normalisation: the fused backward with rstd = 1, then the factor.
      dx = std::get<0>(detail::layer_norm_backward(grad, y, shape, at::zeros_like(rstd), at::ones_like(rstd),
                                                   std::nullopt, {true, false, false}));
      dx.mul_(rstd);
    }
    if (grads[1].defined()) dx = dx - grads[1] * rstd * rstd * y / c10::multiply_integers(shape.begin(), shape.end());
    return {dx.to(y.scalar_type()), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> layer_norm_with_moments_version_(Tensor& x, c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight, const OptionalTensor& bias,
                                                            double eps) {
  return bump_version_after(x, [&] { return detail::layer_norm_with_moments_(x, normalized_shape, weight, bias, eps); });
}

Tensor LayerNormInPlace::train(const Tensor& x, const Tensor& target, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const Normalization normalization{normalized_shape, eps};
  // History moves only to a node of one output (a view of self may have to see it too), hence the alias.
  if (!weight && !bias) return LayerNormFromOutput::apply(x, normalization, target)[0].alias();
  return LayerNorm::apply(x.clone(), normalization, weight, bias, target);
}

Tensor layer_norm_autograd(const Tensor& x, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
  check_layer_norm(x, normalized_shape, weight, bias);
  if (needs_decomposition(x, weight, bias)) return layer_norm_decomposed(x, normalized_shape, weight, bias, eps);
  if (needs_grad(x, weight, bias)) {
    return LayerNorm::apply(x, Normalization{normalized_shape, eps}, weight, bias, std::nullopt);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return layer_norm(x, normalized_shape, weight, bias, eps);
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("layer_norm", layer_norm_autograd);
  m.impl("layer_norm_", LayerNormInPlace::autograd);
}

TORCH_LIBRARY_IMPL(myops, ADInplaceOrView, m) {
  m.impl("layer_norm_", LayerNormInPlace::version);
  m.impl("_layer_norm_", layer_norm_with_moments_version_);
}

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("layer_norm", layer_norm_decomposed);
  m.impl("layer_norm_", LayerNormInPlace::batched);
}

}  // namespace
}  // namespace torchops::autograd
