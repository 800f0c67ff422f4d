#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <optional>
#include <type_traits>
#include <utility>

// The behaviour of this library's operators under torch.autocast. An operator without an autocast kernel (sigmoid) runs
// in the dtype of its input, as do ATen's operators that are in none of autocast's lists.
namespace torchops::autograd {

using at::Tensor;

/// The dtype to which autocast casts the floating-point arguments of an operator. As in ATen, float64 is never cast.
enum class CastTo {
  kLowerPrecision,  ///< the dtype that autocast was entered with: matrix products
  kFloat32,         ///< float32; on the CPU, where ATen's list lacks softmax and layer_norm, as kFirst
  kFirst,           ///< the dtype of the first argument, which is not cast: operators that overwrite it
};

/// Where autocast casts the parameters of an operator: to its lower precision, but to the dtype of a 16-bit tensor that
/// is overwritten, since that one cannot be cast.
inline CastTo of_parameters(const Tensor&) { return CastTo::kLowerPrecision; }
inline CastTo of_parameters(Tensor& self) {
  return self.defined() && self.element_size() == 2 ? CastTo::kFirst : CastTo::kLowerPrecision;
}

/// Casts arguments while it lives, and turns autocast off so that nothing further down undoes the casts (except inside
/// torch.func, whose levels start from the state outside of it). Cast weights come from autocast's cache. Casts nothing
/// if autocast is off for the device of `first`, or `first` is undefined, which the operator itself refuses.
class Casting {
 public:
  Casting(CastTo to, const Tensor& first);

  Tensor operator()(const Tensor& argument) const;
  std::optional<Tensor> operator()(const std::optional<Tensor>& argument) const {
    return argument ? std::optional<Tensor>((*this)(*argument)) : argument;
  }
  /// For what operators with 16-bit weights read as float32, inputs and parameters of layer norms: casts it only if it
  /// has another dtype.
  Tensor unless_float32(const Tensor& input) const {
    return input.scalar_type() == at::kFloat ? input : (*this)(input);
  }
  std::optional<Tensor> unless_float32(const std::optional<Tensor>& input) const {
    return input ? std::optional<Tensor>(unless_float32(*input)) : input;
  }
  /// The tensor that is overwritten.
  Tensor& unless_float32(Tensor& self) const { return self; }
  Tensor& operator()(Tensor& self) const { return self; }
  template <class Other>
  const Other& operator()(const Other& argument) const {
    return argument;
  }

 private:
  c10::DeviceType device_;
  std::optional<at::ScalarType> dtype_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;
};

template <CastTo to, auto function>
struct Autocast;

template <CastTo to, class Return, class First, class... Args, Return (*function)(First, Args...)>
struct Autocast<to, function> {
  static Return call(First first, Args... args) {
    const Casting cast(to, first);
    return function(cast(first), cast(args)...);
  }
};

/// `function` with its arguments cast: a kernel for the keys AutocastCPU and AutocastCUDA, with the operator itself as
/// `function`, or for FuncTorchBatched, which comes before those keys, with the decomposition as `function`.
template <CastTo to, auto function>
constexpr auto autocast = &Autocast<to, function>::call;

template <auto function, auto norms, class Places>
struct CastParameters;

template <class Return, class X, class... Args, Return (*function)(X&, Args...), auto norms, size_t... places>
struct CastParameters<function, norms, std::index_sequence<places...>> {
  using List = c10::List<std::optional<Tensor>>;
  static constexpr bool kHasList = (std::is_same_v<std::decay_t<Args>, List> || ...);

  static constexpr bool is_norm(size_t place) { return std::find(norms.begin(), norms.end(), place) != norms.end(); }

  template <size_t place, class Argument>
  static decltype(auto) cast_at(const Casting& cast, Argument& argument) {
    if constexpr (std::is_same_v<std::decay_t<Argument>, List>) {
      List list;
      for (size_t i = 0; i < argument.size(); ++i) {
        const std::optional<Tensor> parameter = argument.get(i);
        list.push_back(is_norm(i) ? cast.unless_float32(parameter) : cast(parameter));
      }
      return list;
    } else if constexpr (!kHasList && is_norm(place)) {
      return cast.unless_float32(argument);
    } else {
      return cast(argument);
    }
  }

  static Return call(X& x, Args... args) {
    const Casting cast(of_parameters(x), x);
    return function(cast.unless_float32(x), cast_at<1 + places>(cast, args)...);
  }
};

template <auto function>
struct ArgumentPlaces;
template <class Return, class X, class... Args, Return (*function)(X&, Args...)>
struct ArgumentPlaces<function> {
  using Others = std::make_index_sequence<sizeof...(Args)>;
};

/// `function` with its parameters cast, but neither a float32 x nor float32 parameters of layer norms: operators read
/// these as they are. F.layer_norm of a module under autocast doesn't round its parameters either, and rounded ones
/// would move every element of a channel in the same direction. `norms` are the places of the latter among the
/// arguments, or in the list of parameters if there is one.
template <auto function, auto norms = std::array<size_t, 0>{}>
constexpr auto cast_parameters = &CastParameters<function, norms, typename ArgumentPlaces<function>::Others>::call;

}  // namespace torchops::autograd

/// Registers the same kernels for autocast on every device: TORCHOPS_AUTOCAST(m) { m.impl("foo", autocast<...>); }
#define TORCHOPS_AUTOCAST(m)                                                      \
  void autocast_kernels(torch::Library& m);                                       \
  TORCH_LIBRARY_IMPL(myops, AutocastCPU, library) { autocast_kernels(library); }  \
  TORCH_LIBRARY_IMPL(myops, AutocastCUDA, library) { autocast_kernels(library); } \
  void autocast_kernels(torch::Library& m)
