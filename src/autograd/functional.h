#pragma once

#include "autograd/recipe.h"

namespace torchops::autograd {

/// The kernels that a functional operator, `function`, registers above its backends.
///
/// `Op` derives from this and provides
///   static void check(Args...)         the argument checks
///   static Return decomposed(Args...)  the operator in ATen operators, with results of the same strides
///   static Return train(Args...)       applies an autograd Function; its backward is written in dispatcher
///                                      operators, so that it can be traced and differentiated.
///                                      Optional: the default is decomposed(), where autograd
///                                      differentiates ATen's operators.
template <class Op, auto function>
struct FunctionalOp;

template <class Op, class Return, class... Args, Return (*function)(Args...)>
struct FunctionalOp<Op, function> {
  /// For the key Autograd. Takes the first of these that applies:
  ///   1. torch.func or a tangent: ATen operators, which those transforms know.
  ///   2. A gradient is needed, traced or not: the autograd Function.
  ///   3. Otherwise: the operator itself, below autograd.
  static Return autograd(Args... args) {
    Op::check(args...);
    if (needs_decomposition(args...)) return Op::decomposed(args...);
    if (needs_grad(args...)) return Op::train(args...);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return function(args...);
  }

  /// For the key FuncTorchBatched (vmap).
  static Return batched(Args... args) {
    Op::check(args...);
    return Op::decomposed(args...);
  }

  static Return train(Args... args) { return Op::decomposed(args...); }
};

}  // namespace torchops::autograd
