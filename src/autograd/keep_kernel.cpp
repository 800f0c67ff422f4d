#include <ATen/ops/clone.h>

#include "autograd/functional.h"

namespace torchops::autograd {
namespace {

struct Keep : torch::autograd::Function<Keep> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext*, const Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return detail::keep(x);
  }

  static variable_list backward(AutogradContext*, const variable_list& grads) { return {grads[0]}; }
};

struct KeepFunctional : FunctionalOp<KeepFunctional, detail::keep> {
  static void check(const Tensor&) {}
  static Tensor decomposed(const Tensor& x) { return x.clone(); }
  static Tensor train(const Tensor& x) { return Keep::apply(x); }
};

TORCH_LIBRARY_IMPL(myops, Autograd, m) { m.impl("_keep", KeepFunctional::autograd); }

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) { m.impl("_keep", KeepFunctional::batched); }

}  // namespace
}  // namespace torchops::autograd
