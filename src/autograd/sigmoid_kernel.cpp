#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>

#include "autograd/functional.h"
#include "autograd/recipe.h"
#include "ops/sigmoid.h"

namespace torchops::autograd {
namespace {

struct SigmoidFunctional : FunctionalOp<SigmoidFunctional, torchops::sigmoid> {
  static void check(const Tensor& x) { check_sigmoid(x); }
  static Tensor decomposed(const Tensor& x) { return at::sigmoid(x).contiguous(); }
  static Tensor train(const Tensor& x);
};

// dx = g * y * (1 - y). Backward needs only the output, which in place is x itself.
struct SigmoidInPlace : MutatingOp<SigmoidInPlace> {
  static constexpr const char* name = "sigmoid_";
  static void check(const Tensor& x) { check_sigmoid_(x); }
  static Tensor decomposed(const Tensor& x) { return SigmoidFunctional::decomposed(x); }
  static Tensor functional(const Tensor& x) { return torchops::sigmoid(x); }
  static Tensor traced(const Tensor& x) { return functional(x); }
  static void in_place(Tensor& x) { torchops::sigmoid_(x); }
  static Tensor train(const Tensor& x, const Tensor& target);
};

struct Sigmoid : torch::autograd::Function<Sigmoid> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::optional<Tensor>& target) {
    at::AutoDispatchBelowAutograd below_autograd;
    const Tensor y = target ? overwrite(*target, SigmoidInPlace::in_place) : torchops::sigmoid(x);
    ctx->save_for_backward({y});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {at::sigmoid_backward(grads[0], ctx->get_saved_variables()[0]), Tensor()};
  }
};

Tensor SigmoidFunctional::train(const Tensor& x) { return Sigmoid::apply(x, std::nullopt); }

Tensor SigmoidInPlace::train(const Tensor& x, const Tensor& target) { return Sigmoid::apply(x, target); }

TORCH_LIBRARY_IMPL(myops, Autograd, m) { m.impl("sigmoid", SigmoidFunctional::autograd); }

TORCHOPS_MUTATING(SigmoidInPlace)

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("sigmoid", SigmoidFunctional::batched);
  m.impl("sigmoid_", SigmoidInPlace::batched);
}

}  // namespace
}  // namespace torchops::autograd
