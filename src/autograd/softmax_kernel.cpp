#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/softmax.h>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/recipe.h"
#include "ops/softmax.h"

namespace torchops::autograd {
namespace {

struct SoftmaxFunctional : FunctionalOp<SoftmaxFunctional, torchops::softmax> {
  static void check(const Tensor& x, int64_t dim) { check_softmax(x, dim); }
  static Tensor decomposed(const Tensor& x, int64_t dim) { return at::softmax(x, dim).contiguous(); }
  static Tensor train(const Tensor& x, int64_t dim);
};

struct SoftmaxInPlace : MutatingOp<SoftmaxInPlace, int64_t> {
  static constexpr const char* name = "softmax_";
  static void check(const Tensor& x, int64_t dim) { check_softmax_(x, dim); }
  static Tensor decomposed(const Tensor& x, int64_t dim) { return SoftmaxFunctional::decomposed(x, dim); }
  static Tensor functional(const Tensor& x, int64_t dim) { return torchops::softmax(x, dim); }
  static Tensor traced(const Tensor& x, int64_t dim) { return functional(x, dim); }
  static void in_place(Tensor& x, int64_t dim) { torchops::softmax_(x, dim); }
  static Tensor train(const Tensor& x, const Tensor& target, int64_t dim);
};

// dx = y * (g - sum(g * y)). Backward needs only the output, which in place is x itself.
struct Softmax : torch::autograd::Function<Softmax> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t dim, const std::optional<Tensor>& target) {
    at::AutoDispatchBelowAutograd below_autograd;
    const Tensor y = target ? overwrite(*target, [&](Tensor& self) { SoftmaxInPlace::in_place(self, dim); })
                            : torchops::softmax(x, dim);
    ctx->save_for_backward({y});
    ctx->saved_data["dim"] = dim;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor y = ctx->get_saved_variables()[0];
    return {detail::softmax_backward(grads[0], y, ctx->saved_data["dim"].toInt()), Tensor(), Tensor()};
  }
};

Tensor SoftmaxFunctional::train(const Tensor& x, int64_t dim) { return Softmax::apply(x, dim, std::nullopt); }

Tensor SoftmaxInPlace::train(const Tensor& x, const Tensor& target, int64_t dim) {
  return Softmax::apply(x, dim, target);
}

// Only double backward differentiates it.
struct SoftmaxBackward : FunctionalOp<SoftmaxBackward, detail::softmax_backward> {
  static void check(const Tensor& grad, const Tensor& y, int64_t dim) { detail::check_softmax_backward(grad, y, dim); }
  static Tensor decomposed(const Tensor& grad, const Tensor& y, int64_t dim) {
    return at::_softmax_backward_data(grad, y, dim, y.scalar_type()).contiguous();
  }
};

// The cast makes a new tensor, so the result can overwrite it.
Tensor softmax_autocast(const Tensor& x, int64_t dim) {
  const Casting cast(CastTo::kFloat32, x);
  Tensor y = cast(x);
  return y.is_same(x) ? torchops::softmax(x, dim) : torchops::softmax_(y, dim);
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("softmax", SoftmaxFunctional::autograd);
  m.impl("_softmax_backward", SoftmaxBackward::autograd);
}

TORCHOPS_MUTATING(SoftmaxInPlace)

TORCHOPS_AUTOCAST(m) {
  m.impl("softmax", softmax_autocast);
  m.impl("softmax_", autocast<CastTo::kFirst, SoftmaxInPlace::in_place>);
}

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("softmax", autocast<CastTo::kFloat32, SoftmaxFunctional::batched>);
  m.impl("softmax_", autocast<CastTo::kFirst, SoftmaxInPlace::batched>);
  m.impl("_softmax_backward", SoftmaxBackward::batched);
}

// The CPU's kernel too.
TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { m.impl("_softmax_backward", SoftmaxBackward::batched); }

}  // namespace
}  // namespace torchops::autograd
