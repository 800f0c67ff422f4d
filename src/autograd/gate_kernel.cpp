#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/linear.h"
#include "autograd/path.h"
#include "autograd/recipe.h"
#include "ops/gate.h"
#include "ops/kept_products.h"

namespace torchops::autograd {
namespace {

using OptionalTensor = std::optional<Tensor>;

struct GateFunctional : FunctionalOp<GateFunctional, gate> {
  static void check(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
    check_gate(v, x, w, b);
  }
  static Tensor decomposed(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
    return (v * at::sigmoid(linear(x, w, b).to(v.scalar_type()))).contiguous();
  }
  static Tensor train(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b);
};

// Whether a gradient reads v or the result; that of v needs only x, w and b.
bool reads_v(const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  return requires_grad(x) || requires_grad(w) || requires_grad(b);
}

// Whether the result is as good as v for that. In float16, the product of a small v and an almost closed gate is 0 or
// has few digits, where a large cotangent (of a scaled loss) makes a gradient that is neither.
bool result_suffices(const Tensor& v) { return v.scalar_type() != at::kHalf; }

// Whether training in place needs a copy of v.
bool copies_v(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  return !result_suffices(v) && reads_v(x, w, b);
}

struct GateInPlace : MutatingOp<GateInPlace, const Tensor&, const Tensor&, const OptionalTensor&> {
  static constexpr const char* name = "gate_";
  static void check(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
    check_gate_(v, x, w, b);
  }
  static Tensor decomposed(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
    return GateFunctional::decomposed(v, x, w, b);
  }
  static Tensor functional(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
    return gate(v, x, w, b);
  }
  static Tensor traced(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b);
  static void in_place(Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) { gate_(v, x, w, b); }
  static Tensor train(const Tensor& v, const Tensor& target, const Tensor& x, const Tensor& w, const OptionalTensor& b);
};

// Doesn't save the gate: backward recomputes it from x, w and b, which costs one product and saves a tensor the size of
// v. Where that is slow, the product is saved instead, but not in place. There, backward reads the result instead of v,
// if that suffices: with s = sigmoid(x @ w.T + b) and the cotangent g, the cotangent of the product is
// g * v * s * (1 - s), and v * s is the result.
struct Gate : torch::autograd::Function<Gate> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& v, const Tensor& x, const Tensor& w,
                        const OptionalTensor& b, const OptionalTensor& target, bool saves_result, bool saves_product) {
    at::AutoDispatchBelowAutograd below_autograd;
    save_path(ctx);
    ctx->saved_data["v_is_y"] = saves_result;
    if (target) check_can_be_saved({x, w, b.value_or(Tensor())});
    Tensor y, z;
    if (target) {
      y = overwrite(*target, [&](Tensor& self) { GateInPlace::in_place(self, x, w, b); });
    } else if (saves_product) {
      std::tie(y, z) = detail::gate_with_product(v, x, w, b);
    } else {
      y = gate(v, x, w, b);
    }
    ctx->save_for_backward({!reads_v(x, w, b) ? Tensor() : saves_result ? y : v, x, w, b.value_or(Tensor()), z});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const detail::KernelPathGuard on_path(saved_path(ctx));
    const Tensor &v = saved[0], &x = saved[1], &w = saved[2];
    const OptionalTensor b = optional_of(saved[3]);
    const std::array<bool, 4> output_mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                                          b && ctx->needs_input_grad(3)};
    if (!output_mask[1] && !output_mask[2] && !output_mask[3]) {
      return {output_mask[0] ? gate(grads[0], x, w, b) : Tensor(),
              Tensor(),
              Tensor(),
              Tensor(),
              Tensor(),
              Tensor(),
              Tensor()};
    }
    const bool v_is_y = ctx->saved_data["v_is_y"].toBool();
    const auto [dv, dx, dw, db] =
        detail::gate_backward(grads[0], v, x, w, b, output_mask, v_is_y, optional_of(saved[4]));
    return {output_mask[0] ? dv : Tensor(),
            output_mask[1] ? dx : Tensor(),
            output_mask[2] ? dw : Tensor(),
            output_mask[3] ? db : Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

Tensor GateInPlace::traced(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  return Gate::apply(copies_v(v, x, w, b) ? detail::saved_copy(v) : v, x, w, b, std::nullopt, result_suffices(v),
                     /*saves_product=*/false);
}

Tensor GateInPlace::train(const Tensor& v, const Tensor& target, const Tensor& x, const Tensor& w,
                          const OptionalTensor& b) {
  return Gate::apply(copies_v(v, x, w, b) ? v.clone() : v, x, w, b, target, result_suffices(v),
                     /*saves_product=*/false);
}

Tensor GateFunctional::train(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  const bool saves_product =
      reads_v(x, w, b) && v.scalar_type() == w.scalar_type() && detail::keeps_products(x, w, detail::Gated::kTensor);
  return Gate::apply(v, x, w, b, std::nullopt, /*saves_result=*/false, saves_product);
}

// With s = sigmoid(x @ w.T + b) and the cotangent g: dv = g * s, dz = g * v * s * (1 - s), and the rest from dz.
// Differentiated only by double backward, in which a result in v's place has a gradient of its own, and which
// recomputes the product even if it is given, since that depends on x, w and b too.
struct GateBackward : FunctionalOp<GateBackward, detail::gate_backward> {
  static void check(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b,
                    std::array<bool, 4> output_mask, bool, const OptionalTensor& z) {
    detail::check_gate_backward(grad, v, x, w, b, output_mask, z);
  }
  static detail::GateGradients decomposed(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w,
                                          const OptionalTensor& b, std::array<bool, 4> output_mask, bool v_is_y,
                                          const OptionalTensor&) {
    const Tensor s = at::sigmoid(linear(x, w, b).to(v.scalar_type())), dv = grad * s;
    const Tensor dz = ((v_is_y ? grad : dv) * v * at::rsub(s, 1)).to(w.scalar_type());
    const auto none = [](const Tensor& like) { return at::empty({0}, like.options()); };
    return {output_mask[0] ? dv : none(v), output_mask[1] ? matmul(dz, w).to(x.scalar_type()) : none(x),
            output_mask[2] ? weight_gradient(dz, x) : none(w), output_mask[3] ? bias_gradient(dz) : none(w)};
  }
};

std::tuple<Tensor, Tensor> gate_with_product_composite(const Tensor& v, const Tensor& x, const Tensor& w,
                                                       const OptionalTensor& b) {
  detail::check_gate_with_product(v, x, w, b);
  const Tensor z = linear(x, w, b);
  return {(v * at::sigmoid(z.to(v.scalar_type()))).contiguous(), z.contiguous()};
}

// Returns the strides that the kernels promise.
detail::GateGradients gate_backward_composite(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w,
                                              const OptionalTensor& b, std::array<bool, 4> output_mask, bool v_is_y,
                                              const OptionalTensor& z) {
  const auto [dv, dx, dw, db] = GateBackward::batched(grad, v, x, w, b, output_mask, v_is_y, z);
  return {dv.contiguous(), dx.contiguous(), dw.contiguous(), db.contiguous()};
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("gate", GateFunctional::autograd);
  m.impl("_gate_backward", GateBackward::autograd);
}

TORCHOPS_MUTATING(GateInPlace)

// Casts w and b, but not a float32 x or v: the kernels read those as they are, without a 16-bit copy.
template <auto function, class V>
auto with_cast_weights(V& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  const Casting cast(of_parameters(v), v);
  return function(cast.unless_float32(v), cast.unless_float32(x), cast(w), cast(b));
}

TORCHOPS_AUTOCAST(m) {
  m.impl("gate", with_cast_weights<gate, const Tensor>);
  m.impl("gate_", with_cast_weights<GateInPlace::in_place, Tensor>);
}

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("gate", with_cast_weights<GateFunctional::batched, const Tensor>);
  m.impl("gate_", with_cast_weights<GateInPlace::batched, Tensor>);
  m.impl("_gate_backward", GateBackward::batched);
}

// For backends that implement only gate and gate_.
TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) {
  m.impl("_gate", gate_with_product_composite);
  m.impl("_gate_backward", gate_backward_composite);
}

}  // namespace
}  // namespace torchops::autograd
