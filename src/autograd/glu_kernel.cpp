#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/linear.h"
#include "autograd/path.h"
#include "autograd/recipe.h"
#include "ops/glu.h"
#include "ops/kept_products.h"

namespace torchops::autograd {
namespace {

using OptionalTensor = std::optional<Tensor>;
using detail::GluActivation;

Tensor gated(const Tensor& z, const Tensor& u, std::string_view activation) {
  return z * (detail::glu_activation(activation) == GluActivation::kSilu ? at::silu(u) : at::sigmoid(u));
}

struct GluFunctional : FunctionalOp<GluFunctional, glu> {
  static void check(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                    const OptionalTensor& bg, std::string_view activation) {
    check_glu(x, w, wg, b, bg, activation);
  }
  static Tensor decomposed(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                           const OptionalTensor& bg, std::string_view activation) {
    const bool is_silu = detail::glu_activation(activation) == GluActivation::kSilu;
    const Tensor u = linear(x, wg, bg);
    return linear(x, w, b) * (is_silu ? silu_written_out(u) : at::sigmoid(u));
  }
  static Tensor train(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                      const OptionalTensor& bg, std::string_view activation);
};

// Saves its arguments. Both products are saved only where that is faster (keeps_products()); otherwise backward
// recomputes them, which saves two tensors the size of the result.
struct Glu : torch::autograd::Function<Glu> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, const Tensor& wg,
                        const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    save_path(ctx);
    ctx->saved_data["activation"] = std::string(activation);
    Tensor y, z, u;
    if (detail::keeps_products(x, w, detail::Gated::kProduct)) {
      std::tie(y, z, u) = detail::glu_with_products(x, w, wg, b, bg, activation);
    } else {
      y = glu(x, w, wg, b, bg, activation);
    }
    ctx->save_for_backward({x, w, wg, b.value_or(Tensor()), bg.value_or(Tensor()), z, u});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const detail::KernelPathGuard on_path(saved_path(ctx));
    const OptionalTensor b = optional_of(saved[3]), bg = optional_of(saved[4]);
    // needs_input_grad counts only the tensors that were passed.
    const std::array<bool, 5> output_mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                                          b && ctx->needs_input_grad(3), bg && ctx->needs_input_grad(b ? 4 : 3)};
    const auto [dx, dw, dwg, db, dbg] = detail::glu_backward(grads[0], saved[0], saved[1], saved[2], b, bg,
                                                             ctx->saved_data["activation"].toStringView(), output_mask,
                                                             optional_of(saved[5]), optional_of(saved[6]));
    return {output_mask[0] ? dx : Tensor(), output_mask[1] ? dw : Tensor(),  output_mask[2] ? dwg : Tensor(),
            output_mask[3] ? db : Tensor(), output_mask[4] ? dbg : Tensor(), Tensor()};
  }
};

Tensor GluFunctional::train(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                            const OptionalTensor& bg, std::string_view activation) {
  return Glu::apply(x, w, wg, b, bg, activation);
}

// With z = x @ w.T + b, u = x @ wg.T + bg, s = sigmoid(u) and the cotangent g: dz = g * act(u), du = g * z * act'(u),
// where sigmoid' = s * (1 - s) and silu' = s * (1 + u * (1 - s)); the rest from dz and du.
// Differentiated only by double backward, which recomputes the products even if they are given, since they depend on x
// and the weights too.
struct GluBackward : FunctionalOp<GluBackward, detail::glu_backward> {
  static void check(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                    const OptionalTensor& bg, std::string_view activation, std::array<bool, 5> output_mask,
                    const OptionalTensor& z, const OptionalTensor& u) {
    detail::check_glu_backward(grad, x, w, wg, b, bg, activation, output_mask, z, u);
  }
  static detail::GluGradients decomposed(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg,
                                         const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation,
                                         std::array<bool, 5> output_mask, const OptionalTensor&,
                                         const OptionalTensor&) {
    const Tensor u = linear(x, wg, bg), s = at::sigmoid(u);
    const bool silu = detail::glu_activation(activation) == GluActivation::kSilu;
    const auto none = [](const Tensor& like) { return at::empty({0}, like.options()); };
    Tensor dz, du;
    if (output_mask[0] || output_mask[1] || output_mask[3]) dz = grad * (silu ? u * s : s);
    if (output_mask[0] || output_mask[2] || output_mask[4])
      du = grad * linear(x, w, b) * s * (silu ? 1 + u * at::rsub(s, 1) : at::rsub(s, 1));
    return {output_mask[0] ? (matmul(dz, w) + matmul(du, wg)).to(x.scalar_type()) : none(x),
            output_mask[1] ? weight_gradient(dz, x) : none(w), output_mask[2] ? weight_gradient(du, x) : none(wg),
            output_mask[3] ? bias_gradient(dz) : none(w), output_mask[4] ? bias_gradient(du) : none(wg)};
  }
};

std::tuple<Tensor, Tensor, Tensor> glu_with_products_composite(const Tensor& x, const Tensor& w, const Tensor& wg,
                                                               const OptionalTensor& b, const OptionalTensor& bg,
                                                               std::string_view activation) {
  detail::check_glu_with_products(x, w, wg, b, bg, activation);
  const Tensor z = linear(x, w, b), u = linear(x, wg, bg);
  return {gated(z, u, activation).contiguous(), z.contiguous(), u.contiguous()};
}

// Returns the strides that the kernels promise.
detail::GluGradients glu_backward_composite(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg,
                                            const OptionalTensor& b, const OptionalTensor& bg,
                                            std::string_view activation, std::array<bool, 5> output_mask,
                                            const OptionalTensor& z, const OptionalTensor& u) {
  const auto [dx, dw, dwg, db, dbg] = GluBackward::batched(grad, x, w, wg, b, bg, activation, output_mask, z, u);
  return {dx.contiguous(), dw.contiguous(), dwg.contiguous(), db.contiguous(), dbg.contiguous()};
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("glu", GluFunctional::autograd);
  m.impl("_glu_backward", GluBackward::autograd);
}

TORCHOPS_AUTOCAST(m) { m.impl("glu", cast_parameters<glu>); }

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("glu", cast_parameters<GluFunctional::batched>);
  m.impl("_glu_backward", GluBackward::batched);
}

// For backends that implement only glu.
TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) {
  m.impl("_glu", glu_with_products_composite);
  m.impl("_glu_backward", glu_backward_composite);
}

}  // namespace
}  // namespace torchops::autograd
