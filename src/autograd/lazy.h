#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <optional>
#include <type_traits>

// Tensors whose memory does not hold their values: a bit says that they are negated (x.conj().imag) or conjugated, or
// they are zero and have no memory at all. The keys Negative, Conjugate and ZeroTensor are between ADInplaceOrView and
// the backends. ATen's fallbacks for these keys work for functional operators, except that they pass on lists of
// optional tensors (Tensor?[]) unchanged. For an operator that overwrites its argument, they expect it back as the
// first return, and write past the end of the stack if the operator returns nothing. So all operators of these two
// kinds register their own kernels for these keys.
namespace torchops::autograd {

using at::Tensor;

/// `argument` with its values in memory; `argument` itself if they are there already.
inline Tensor materialize(const Tensor& argument) {
  return argument._is_zerotensor() ? argument.clone() : argument.resolve_neg().resolve_conj();
}
inline std::optional<Tensor> materialize(const std::optional<Tensor>& argument) {
  return argument ? std::optional<Tensor>(materialize(*argument)) : argument;
}
inline c10::List<std::optional<Tensor>> materialize(const c10::List<std::optional<Tensor>>& arguments) {
  c10::List<std::optional<Tensor>> out;
  for (size_t i = 0; i < arguments.size(); ++i) out.push_back(materialize(arguments.get(i)));
  return out;
}
template <class Other>
const Other& materialize(const Other& argument) {
  return argument;
}

/// For operators that refuse to write what they would have to copy back.
inline bool is_lazy(const Tensor& written) { return written.is_neg() || written.is_conj() || written._is_zerotensor(); }

template <auto in_place>
struct Materialized;

template <class Return, class... Args, Return (*in_place)(Tensor&, Args...)>
struct Materialized<in_place> {
  static Return call(Tensor& self, Args... args) {
    TORCH_CHECK(!self._is_zerotensor(),
                "ZeroTensors are immutable. Please use the materialized zero tensor obtained using .clone() if you "
                "want a mutable tensor.");
    const at::AutoDispatchBelowADInplaceOrView below_version_counter;
    // The profiler has recorded this call already.
    const at::DisableRecordFunctionGuard not_recorded;
    Tensor value = materialize(self);
    if constexpr (std::is_void_v<Return>) {
      in_place(value, materialize(args)...);
      if (!value.is_same(self)) self.copy_(value);
    } else {
      Return out = in_place(value, materialize(args)...);
      if (!value.is_same(self)) self.copy_(value);
      return out;
    }
  }
};

template <class Return, class... Args, Return (*functional)(const Tensor&, Args...)>
struct Materialized<functional> {
  static Return call(const Tensor& self, Args... args) {
    const at::AutoDispatchBelowADInplaceOrView below_version_counter;
    const at::DisableRecordFunctionGuard not_recorded;
    return functional(materialize(self), materialize(args)...);
  }
};

/// Calls the operator `function` with all arguments materialized, and copies back the one that it overwrites: the
/// operator's kernel for the keys Negative, Conjugate and ZeroTensor.
template <auto function>
constexpr auto materialized = &Materialized<function>::call;

}  // namespace torchops::autograd

/// Registers that kernel for the operator `name`.
#define TORCHOPS_LAZY(name, ...)                                                                             \
  TORCH_LIBRARY_IMPL(myops, Negative, m) { m.impl(name, ::torchops::autograd::materialized<__VA_ARGS__>); }  \
  TORCH_LIBRARY_IMPL(myops, Conjugate, m) { m.impl(name, ::torchops::autograd::materialized<__VA_ARGS__>); } \
  TORCH_LIBRARY_IMPL(myops, ZeroTensor, m) { m.impl(name, ::torchops::autograd::materialized<__VA_ARGS__>); }
