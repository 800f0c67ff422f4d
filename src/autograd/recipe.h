#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <type_traits>

#include "autograd/lazy.h"
#include "ops/common.h"
#include "ops/saved_copy.h"

// How the operators of this library implement autograd. A functional operator takes one of three ways, see FunctionalOp
// in autograd/functional.h; a mutating one takes one of four, see MutatingOp. test/test_traps.py has what silently goes
// wrong without them.
namespace torchops::autograd {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A saved argument that may be missing, which is saved as an undefined tensor.
inline std::optional<Tensor> optional_of(const Tensor& saved) {
  return saved.defined() ? std::optional<Tensor>(saved) : std::nullopt;
}

/// Whether a torch.func transform (grad, jvp, vmap, functionalize) is on. C++ autograd Functions don't run under one.
bool functorch_active();

/// Raises as ATen does if a transform of torch.func that differentiates (grad, vjp, jvp) runs the in-place operator
/// `name` on a tensor that the transformed function has captured: the derivative would be lost. torch.func itself only
/// looks at operators that return what they overwrite.
void check_not_captured(const char* name, const Tensor& self);

/// Whether this call is recorded rather than executed (torch.compile, export, a dispatch mode, a tensor subclass, a
/// meta tensor), so that history cannot be moved by hand.
bool is_traced(const Tensor& input);

/// Whether this call becomes part of a graph (torch.compile, torch.export, make_fx), which runs later, anywhere, often.
bool is_recorded();

inline bool requires_grad(const Tensor& input) { return input.requires_grad(); }
inline bool has_tangent(const Tensor& input) { return torch::autograd::isFwGradDefined(input); }

/// Returns `argument`, or a copy (with identity gradient) if it may share memory with the tensor that is mutated:
/// operators read such an argument before they write, and the gradient needs the value from before.
Tensor without_alias(const Tensor& mutated, const Tensor& argument);

// The same for optional tensors, and below for arguments that are not tensors.
inline bool is_traced(const std::optional<Tensor>& input) { return input && is_traced(*input); }
inline bool requires_grad(const std::optional<Tensor>& input) { return input && requires_grad(*input); }
inline bool has_tangent(const std::optional<Tensor>& input) { return input && has_tangent(*input); }
inline std::optional<Tensor> without_alias(const Tensor& mutated, const std::optional<Tensor>& argument) {
  return argument ? std::optional<Tensor>(without_alias(mutated, *argument)) : argument;
}

using OptionalTensorList = c10::List<std::optional<Tensor>>;

// The same for lists.
bool is_traced(const OptionalTensorList& inputs);
bool requires_grad(const OptionalTensorList& inputs);
bool has_tangent(const OptionalTensorList& inputs);

template <class Other>
bool is_traced(const Other&) {
  return false;
}
template <class Other>
bool requires_grad(const Other&) {
  return false;
}
template <class Other>
bool has_tangent(const Other&) {
  return false;
}
template <class Other>
const Other& without_alias(const Tensor&, const Other& argument) {
  return argument;
}

/// Whether the operator must be decomposed into ATen operators: under torch.func, and if there is a forward-mode
/// tangent (even if nothing requires grad).
template <class... Inputs>
bool needs_decomposition(const Inputs&... inputs) {
  return functorch_active() || (has_tangent(inputs) || ...);
}

template <class... Inputs>
bool needs_grad(const Inputs&... inputs) {
  return at::GradMode::is_enabled() && (requires_grad(inputs) || ...);
}

/// a (..., n) @ m (n, k) in differentiable operators. at::matmul squeezes a vector's product in place, which batched
/// gradients (torch.autograd.grad(..., is_grads_batched=True)) get wrong.
Tensor matmul(const Tensor& a, const Tensor& m);

/// Raises if one of `tensors` is an inference tensor, which cannot be saved for backward. Autograd itself raises only
/// after a Function has run, which is too late if the Function has overwritten its argument.
void check_can_be_saved(at::TensorList tensors);

/// Overwrites `target` with `in_place(target, ...)` and returns an alias of it: the output of an autograd Function that
/// works in place. Called below autograd but above ADInplaceOrView, so that the version counter, which the alias
/// shares, has moved before the Function saves the alias: backward then detects a later overwrite of the result.
template <class InPlace>
Tensor overwrite(const Tensor& target, InPlace in_place) {
  Tensor mutated = target;
  {
    // The profiler has recorded this call already: a nested call of the same name would be counted twice.
    const at::DisableRecordFunctionGuard not_recorded;
    in_place(mutated);
  }
  return mutated.detach();
}

/// Calls `in_place()`, which overwrites `self`, below ADInplaceOrView, and bumps the version counter, from which
/// autograd sees that a saved tensor was overwritten: kernels that write raw memory don't bump it. A call that raises
/// has written nothing and bumps nothing (for the exception, see detail::overwriting()).
template <class InPlace>
auto bump_version_after(Tensor& self, InPlace in_place) {
  TORCH_CHECK(!self.is_inference() || c10::InferenceMode::is_enabled(),
              "Inplace update to inference tensor outside InferenceMode is not allowed. You can make a clone to get a "
              "normal tensor before doing inplace update.");
  at::AutoDispatchBelowADInplaceOrView below_version_counter;
  if constexpr (std::is_void_v<std::invoke_result_t<InPlace>>) {
    in_place();
    torch::autograd::impl::bump_version(self);
  } else {
    auto out = in_place();
    torch::autograd::impl::bump_version(self);
    return out;
  }
}

/// Overwrites `self` with the value of `functional()`, a new tensor, in two operators that functionalization knows how
/// to undo. For the key Functionalize, under which torch.compile, AOTInductor, decompositions of exported programs and
/// torch.func.functionalize turn mutations into new values.
///
/// Without such a kernel, PyTorch wraps a mutating operator in `auto_functionalized`, and Inductor then decides by
/// itself whether it may work in place. It gets that wrong: it moves reads of a graph input behind the operator, drops
/// clones of what the operator overwrites, and loses storage offsets under dynamic shapes (pytorch issues 130487,
/// 136662, 156786, 197829, 198031 and 198068). torchops/inductor/reinplace.py gives the functional operator its
/// argument's memory again, where that is provably right.
template <class Functional>
void overwrite_with_new(Tensor& self, const Functional& functional) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  self.copy_(functional());
}

/// The kernels that a mutating operator `self <- f(self, args...)` registers above its backends: those that
/// TORCHOPS_MUTATING registers, and `batched`.
///
/// `Op` derives from this and provides
///   static constexpr const char* name                      without its namespace
///   static void check(const Tensor& self, Args...)         the argument checks
///   static Tensor decomposed(const Tensor& self, Args...)  f in ATen operators
///   static Tensor functional(const Tensor& self, Args...)  the functional twin, an operator of this library
///   static Tensor traced(const Tensor& self, Args...)      the functional twin, differentiable; of saved_copy(self) if
///                                                          its gradient needs the old self
///   static void in_place(Tensor& self, Args...)            the mutating operator itself
///   static Tensor train(const Tensor& self, const Tensor& target, Args...)
///       applies an autograd Function that overwrites `target`, an alias of self without history, and returns an alias
///       of that. If the gradient needs the old self, its input is a copy of self that is made here, above autograd, so
///       that double backward sees it.
template <class Op, class... Args>
struct MutatingOp {
  /// For the key Autograd. Takes the first of these that applies:
  ///   1. torch.func or a tangent: f in ATen operators, which those transforms know, then copy_.
  ///   2. No gradient needed: the in-place kernel, below autograd.
  ///   3. Traced: the functional twin, then copy_. An autograd Function that marks self dirty would silently lose the
  ///      history of a graph input here.
  ///   4. Eager training: the in-place kernel inside a Function, whose history then becomes self's.
  static void autograd(Tensor& self, Args... args) {
    Op::check(self, args...);
    if (needs_decomposition(self, args...)) {
      check_not_captured(Op::name, self);
      decomposed_(self, args...);
    } else if (needs_grad(self, args...)) {
      record(self, without_alias(self, args)...);
    } else {
      at::AutoDispatchBelowAutograd below_autograd;
      Op::in_place(self, args...);
    }
  }

  /// For the key ADInplaceOrView.
  static void version(Tensor& self, Args... args) {
    bump_version_after(self, [&] { Op::in_place(self, args...); });
  }

  /// For the key Functionalize.
  static void functionalized(Tensor& self, Args... args) {
    Op::check(self, args...);
    overwrite_with_new(self, [&] { return Op::functional(self, args...); });
  }

  /// For the key FuncTorchBatched (vmap).
  static void batched(Tensor& self, Args... args) {
    Op::check(self, args...);
    decomposed_(self, args...);
  }

 private:
  // ATen saves tensors that it is given for backward, so none of them may be the one that is overwritten.
  static void decomposed_(Tensor& self, Args... args) {
    self.copy_(Op::decomposed(self.clone(), without_alias(self, args)...));
  }

  static void record(Tensor& self,
                     std::add_lvalue_reference_t<std::add_const_t<std::remove_reference_t<Args>>>... args) {
    if (is_traced(self) || (is_traced(args) || ...)) {
      self.copy_(Op::traced(self, args...));
      return;
    }
    torch::autograd::check_inplace(self, /*requires_grad=*/true);
    const Tensor out = Op::train(self, self.detach(), args...);
    torch::autograd::impl::rebase_history(self, torch::autograd::impl::gradient_edge(out));
  }
};

}  // namespace torchops::autograd

/// Registers the kernels of `Op`, a MutatingOp, for the keys Autograd, ADInplaceOrView and Functionalize and those of
/// lazy.h.
#define TORCHOPS_MUTATING(Op)                                                           \
  TORCH_LIBRARY_IMPL(myops, Autograd, m) { m.impl(Op::name, Op::autograd); }            \
  TORCH_LIBRARY_IMPL(myops, ADInplaceOrView, m) { m.impl(Op::name, Op::version); }      \
  TORCH_LIBRARY_IMPL(myops, Functionalize, m) { m.impl(Op::name, Op::functionalized); } \
  TORCHOPS_LAZY(Op::name, Op::in_place)
