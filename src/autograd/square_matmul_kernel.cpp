#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/linear.h"
#include "autograd/path.h"
#include "autograd/recipe.h"
#include "ops/square_matmul.h"

namespace torchops::autograd {
namespace {

struct SquareMatmulFunctional : FunctionalOp<SquareMatmulFunctional, square_matmul> {
  static void check(const Tensor& a, const Tensor& b, bool) { check_square_matmul(a, b); }
  static Tensor decomposed(const Tensor& a, const Tensor& b, bool transpose_b) {
    return autograd::matmul(a, transpose_b ? b.mT() : b);
  }
  static Tensor train(const Tensor& a, const Tensor& b, bool transpose_b);
};

struct SquareMatmulInPlace : MutatingOp<SquareMatmulInPlace, const Tensor&, bool> {
  static constexpr const char* name = "square_matmul_";
  static void check(const Tensor& a, const Tensor& b, bool) { check_square_matmul_(a, b); }
  static Tensor decomposed(const Tensor& a, const Tensor& b, bool transpose_b) {
    return SquareMatmulFunctional::decomposed(a, b, transpose_b);
  }
  static Tensor functional(const Tensor& a, const Tensor& b, bool transpose_b) {
    return square_matmul(a, b, transpose_b);
  }
  static Tensor traced(const Tensor& a, const Tensor& b, bool transpose_b) {
    return functional(b.requires_grad() ? detail::saved_copy(a) : a, b, transpose_b);
  }
  static void in_place(Tensor& a, const Tensor& b, bool transpose_b) { square_matmul_(a, b, transpose_b); }
  static Tensor train(const Tensor& a, const Tensor& target, const Tensor& b, bool transpose_b);
};

// With out = a @ b and the cotangent g: da = g @ b.T, db = a.T @ g; with out = a @ b.T: da = g @ b, db = g.T @ a.
// Only db needs the old a, so a is not copied if b is frozen.
struct SquareMatmul : torch::autograd::Function<SquareMatmul> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, bool transpose_b,
                        const std::optional<Tensor>& target) {
    at::AutoDispatchBelowAutograd below_autograd;
    variable_list saved{b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()};
    if (target) check_can_be_saved(saved);
    ctx->save_for_backward(std::move(saved));
    save_path(ctx);
    ctx->saved_data["transpose_b"] = transpose_b;
    ctx->saved_data["batched"] = b.dim() > 2;
    if (!target) return square_matmul(a, b, transpose_b);
    return overwrite(*target, [&](Tensor& self) { SquareMatmulInPlace::in_place(self, b, transpose_b); });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::KernelPathGuard on_path(saved_path(ctx));
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1], &grad = grads[0];
    const bool transpose_b = ctx->saved_data["transpose_b"].toBool(), batched = ctx->saved_data["batched"].toBool();
    Tensor da, db;
    if (ctx->needs_input_grad(0)) da = square_matmul(grad, b, !transpose_b);
    if (ctx->needs_input_grad(1)) {
      // A batched b has one gradient per matrix; otherwise one product covers all rows.
      const Tensor &left = transpose_b ? grad : a, &right = transpose_b ? a : grad;
      db = batched ? matmul(left.mT(), right) : weight_gradient(left, right);
    }
    return {da, db, Tensor(), Tensor()};
  }
};

Tensor SquareMatmulFunctional::train(const Tensor& a, const Tensor& b, bool transpose_b) {
  return SquareMatmul::apply(a, b, transpose_b, std::nullopt);
}

Tensor SquareMatmulInPlace::train(const Tensor& a, const Tensor& target, const Tensor& b, bool transpose_b) {
  return SquareMatmul::apply(b.requires_grad() ? a.clone() : a, b, transpose_b, target);
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) { m.impl("square_matmul", SquareMatmulFunctional::autograd); }

TORCHOPS_MUTATING(SquareMatmulInPlace)

TORCHOPS_AUTOCAST(m) {
  m.impl("square_matmul", autocast<CastTo::kLowerPrecision, square_matmul>);
  m.impl("square_matmul_", autocast<CastTo::kFirst, SquareMatmulInPlace::in_place>);
}

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("square_matmul", autocast<CastTo::kLowerPrecision, SquareMatmulFunctional::batched>);
  m.impl("square_matmul_", autocast<CastTo::kFirst, SquareMatmulInPlace::batched>);
}

}  // namespace
}  // namespace torchops::autograd
