#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/linear.h"
#include "autograd/normalize.h"
#include "autograd/path.h"
#include "autograd/recipe.h"
#include "ops/kept_products.h"
#include "ops/transition.h"

namespace torchops::autograd {
namespace {

using OptionalTensor = std::optional<Tensor>;
using detail::TransitionGradients;
using detail::TransitionOutputMask;
using detail::TransitionProducts;

// The operator and its gradients in differentiable ATen operators. The formulas are in src/cpu/transition_kernel.cpp.
class WrittenOut {
 public:
  explicit WrittenOut(const detail::Transition& t)
      : t_(t),
        norm_(normalize(t.x, 1, t.eps)),
        z_(scale_and_shift(norm_.xhat, t.norm_weight, t.norm_bias, t.dtype())),
        gate_(linear(z_, t.gate_weight, t.gate_bias)) {}

  const Tensor& gate() const { return gate_; }
  Tensor up() const { return linear(z_, t_.up_weight, t_.up_bias); }
  Tensor result() const { return linear(silu_written_out(gate_) * up(), t_.down_weight, t_.down_bias).contiguous(); }

  TransitionGradients gradients(const Tensor& grad, const TransitionOutputMask& output_mask, bool add_residual) const {
    const detail::TransitionNeeds needs(output_mask);
    const auto none = [](const Tensor& like) { return at::empty({0}, like.options()); };
    const Tensor &w = t_.gate_weight, s = at::sigmoid(gate_), v = needs.gate || output_mask[7] ? up() : Tensor();
    const Tensor dh = needs.gate || needs.value ? matmul(grad, t_.down_weight) : Tensor();
    const Tensor dv = needs.value ? dh * gate_ * s : Tensor();
    const Tensor du = needs.gate ? dh * v * s * (1 + gate_ * at::rsub(s, 1)) : Tensor();
    std::array<Tensor, 3> of_norm;
    if (needs.z) {
      const Tensor dz = (matmul(dv, t_.up_weight) + matmul(du, w)).to(norm_.xhat.scalar_type());
      of_norm = normalization_gradients(dz, norm_, 1, t_.norm_weight, {output_mask[0], output_mask[1], output_mask[2]},
                                        norm_.xhat.scalar_type());
      if (output_mask[0] && add_residual) of_norm[0] = of_norm[0] + grad;
    }
    return {output_mask[0] ? of_norm[0].to(t_.x.scalar_type()) : none(t_.x),
            output_mask[1] ? of_norm[1].to(t_.norm_weight->scalar_type()) : none(t_.norm_weight.value_or(w)),
            output_mask[2] ? of_norm[2].to(t_.norm_bias->scalar_type()) : none(t_.norm_bias.value_or(w)),
            output_mask[3] ? weight_gradient(du, z_) : none(w),
            output_mask[4] ? bias_gradient(du) : none(w),
            output_mask[5] ? weight_gradient(dv, z_) : none(w),
            output_mask[6] ? bias_gradient(dv) : none(w),
            output_mask[7] ? weight_gradient(grad, gate_ * s * v) : none(w),
            output_mask[8] ? bias_gradient(grad) : none(w)};
  }

 private:
  const detail::Transition& t_;
  Normalized norm_;
  Tensor z_, gate_;
};

// Saves x and the parameters. The hidden products are saved only where that is faster (keeps_products()), and never of
// a call in place; otherwise backward recomputes them. With `add_residual`, the result is x plus the layer's
// output; it overwrites `target`, which was x, if there is one.
struct Layer : torch::autograd::Function<Layer> {
  static constexpr bool is_traceable = true;
  static constexpr size_t kSavedParameters = 8;  // x among them; down_bias is not

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& norm_weight,
                        const OptionalTensor& norm_bias, const Tensor& gate_weight, const OptionalTensor& gate_bias,
                        const Tensor& up_weight, const OptionalTensor& up_bias, const Tensor& down_weight,
                        const OptionalTensor& down_bias, double eps, bool add_residual, const OptionalTensor& target,
                        bool saves_products) {
    at::AutoDispatchBelowAutograd below_autograd;
    save_path(ctx);
    const auto or_undefined = [](const OptionalTensor& t) { return t.value_or(Tensor()); };
    variable_list saved{x,
                        or_undefined(norm_weight),
                        or_undefined(norm_bias),
                        gate_weight,
                        or_undefined(gate_bias),
                        up_weight,
                        or_undefined(up_bias),
                        down_weight};
    if (target) check_can_be_saved(saved);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["has_down_bias"] = down_bias.has_value();
    ctx->saved_data["add_residual"] = add_residual;
    const auto call = [&](const auto& operation, auto& self, auto... residual) {
      return operation(self, norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias,
                       eps, residual...);
    };
    Tensor y, up, gate;
    if (saves_products) {
      std::tie(y, up, gate) = call(detail::transition_with_products, x, add_residual);
    }
    saved.insert(saved.end(), {up, gate});
    ctx->save_for_backward(std::move(saved));
    if (y.defined()) return y;
    if (!add_residual) return call(transition, x);
    if (!target) return call(detail::add_transition, x);
    return overwrite(*target, [&](Tensor& self) { call(add_transition_, self); });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const detail::KernelPathGuard on_path(saved_path(ctx));
    TransitionOutputMask output_mask{};
    size_t edges = 0;  // counts only the tensors that were passed
    for (size_t i = 0; i < output_mask.size(); ++i) {
      const bool given = i < kSavedParameters ? saved[i].defined() : ctx->saved_data["has_down_bias"].toBool();
      output_mask[i] = given && ctx->needs_input_grad(edges++);
    }
    const Tensor& gate_weight = saved[3];
    // The gradient of the layer, in the dtype of the parameters. If x is wider, its own gradient keeps the full
    // precision.
    const Tensor grad = grads[0].to(gate_weight.scalar_type());
    const bool is_sum = ctx->saved_data["add_residual"].toBool(),
               add_residual = is_sum && grad.scalar_type() == grads[0].scalar_type();
    TransitionGradients gradients = detail::transition_backward(
        grad, saved[0], optional_of(saved[1]), optional_of(saved[2]), gate_weight, optional_of(saved[4]), saved[5],
        optional_of(saved[6]), saved[7], ctx->saved_data["eps"].toDouble(), output_mask, add_residual,
        optional_of(saved[kSavedParameters]), optional_of(saved[kSavedParameters + 1]));
    variable_list out = std::apply([](auto&... gradient) { return variable_list{gradient...}; }, gradients);
    for (size_t i = 0; i < output_mask.size(); ++i) {
      if (!output_mask[i]) out[i] = Tensor();
    }
    if (output_mask[0] && is_sum && !add_residual) out[0] = out[0] + grads[0];
    out.resize(out.size() + 4);  // for eps, add_residual, target and saves_products
    return out;
  }
};

bool saves_products(const detail::Transition& t) {
  return detail::keeps_products(t.x, t.gate_weight, detail::Gated::kHidden);
}

struct Functional : FunctionalOp<Functional, transition> {
  template <class... Args>
  static void check(const Args&... args) {
    detail::check_transition({args...});
  }
  template <class... Args>
  static Tensor decomposed(const Args&... args) {
    const detail::Transition t{args...};
    return WrittenOut(t).result();
  }
  template <class... Args>
  static Tensor train(const Args&... args) {
    return Layer::apply(args..., /*add_residual=*/false, OptionalTensor(), saves_products({args...}));
  }
};

struct Sum : FunctionalOp<Sum, detail::add_transition> {
  template <class... Args>
  static void check(const Args&... args) {
    detail::check_transition({args...});
  }
  template <class... Args>
  static Tensor decomposed(const Tensor& x, const Args&... args) {
    return (x + Functional::decomposed(x, args...)).contiguous();
  }
  template <class... Args>
  static Tensor train(const Args&... args) {
    return Layer::apply(args..., /*add_residual=*/true, OptionalTensor(), saves_products({args...}));
  }
};

template <auto function>
struct InPlaceOf;

template <class... Args, Tensor (*function)(const Tensor&, Args...)>
struct InPlaceOf<function> : MutatingOp<InPlaceOf<function>, Args...> {
  static constexpr const char* name = "add_transition_";
  static void check(const Tensor& x, Args... args) { detail::check_transition_({x, args...}); }
  static Tensor decomposed(const Tensor& x, Args... args) { return Sum::decomposed(x, args...); }
  static Tensor functional(const Tensor& x, Args... args) { return function(x, args...); }
  static Tensor traced(const Tensor& x, Args... args) {
    return Layer::apply(detail::saved_copy(x), args..., /*add_residual=*/true, OptionalTensor(),
                        /*saves_products=*/false);
  }
  static void in_place(Tensor& x, Args... args) { add_transition_(x, args...); }
  static Tensor train(const Tensor& x, const Tensor& target, Args... args) {
    return Layer::apply(x.clone(), args..., /*add_residual=*/true, OptionalTensor(target), /*saves_products=*/false);
  }
};
using InPlace = InPlaceOf<detail::add_transition>;

// Differentiated only by double backward, which recomputes the products even if they are given, since they depend on x
// and the weights too.
struct Backward : FunctionalOp<Backward, detail::transition_backward> {
  template <class... Args>
  static void check(const Args&... args) {
    detail::transition_backward_kernel<checked>(args...);
  }
  template <class... Args>
  static TransitionGradients decomposed(const Args&... args) {
    return detail::transition_backward_kernel<written_out>(args...);
  }

 private:
  static TransitionGradients checked(const Tensor& grad, const detail::Transition& t,
                                     const TransitionOutputMask& output_mask, bool /*add_residual*/,
                                     const TransitionProducts& products) {
    detail::check_transition_backward(grad, t, output_mask, products);
    return {};
  }
  static TransitionGradients written_out(const Tensor& grad, const detail::Transition& t,
                                         const TransitionOutputMask& output_mask, bool add_residual,
                                         const TransitionProducts&) {
    return WrittenOut(t).gradients(grad, output_mask, add_residual);
  }
};

// Returns the strides that the kernels promise.
TransitionGradients composite(const Tensor& grad, const detail::Transition& t, const TransitionOutputMask& output_mask,
                              bool add_residual, const TransitionProducts& products) {
  detail::check_transition_backward(grad, t, output_mask, products);
  const TransitionGradients gradients = WrittenOut(t).gradients(grad, output_mask, add_residual);
  return std::apply([](const auto&... gradient) { return TransitionGradients{gradient.contiguous()...}; }, gradients);
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("transition", Functional::autograd);
  m.impl("_add_transition", Sum::autograd);
  m.impl("_transition_backward", Backward::autograd);
}

TORCHOPS_MUTATING(InPlace)

constexpr std::array<size_t, 2> kNorms{1, 2};  // the places of their parameters among the arguments

TORCHOPS_AUTOCAST(m) {
  m.impl("transition", cast_parameters<transition, kNorms>);
  m.impl("add_transition_", cast_parameters<InPlace::in_place, kNorms>);
  m.impl("_add_transition", cast_parameters<detail::add_transition, kNorms>);
}

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("transition", cast_parameters<Functional::batched, kNorms>);
  m.impl("add_transition_", cast_parameters<InPlace::batched, kNorms>);
  m.impl("_add_transition", cast_parameters<Sum::batched, kNorms>);
  m.impl("_transition_backward", Backward::batched);
}

Tensor composite_sum(const detail::Transition& t) {
  detail::check_transition(t);
  return (t.x + transition(t.x, t.norm_weight, t.norm_bias, t.gate_weight, t.gate_bias, t.up_weight, t.up_bias,
                           t.down_weight, t.down_bias, t.eps))
      .contiguous();
}

std::tuple<Tensor, Tensor, Tensor> composite_with_products(const detail::Transition& t, bool add_residual) {
  detail::check_transition_with_products(t);
  const WrittenOut written(t);
  const Tensor y = add_residual ? t.x + written.result() : written.result();
  return {y.contiguous(), written.up().contiguous(), written.gate().contiguous()};
}

// For backends that implement only transition and add_transition_.
TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) {
  m.impl("_add_transition", detail::TransitionKernel::functional<composite_sum>);
  m.impl("_transition", detail::transition_with_products_kernel<composite_with_products>);
  m.impl("_transition_backward", detail::transition_backward_kernel<composite>);
}

}  // namespace
}  // namespace torchops::autograd
