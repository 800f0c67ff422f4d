#include <ATen/ops/clone.h>

#include "autograd/recipe.h"

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

Tensor keep_decomposed(const Tensor& x) { return x.clone(); }

Tensor keep_autograd(const Tensor& x) {
  if (needs_decomposition(x)) return keep_decomposed(x);
  if (needs_grad(x)) return Keep::apply(x);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return detail::keep(x);
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) { m.impl("_keep", keep_autograd); }

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) { m.impl("_keep", keep_decomposed); }

}  // namespace
}  // namespace torchops::autograd
