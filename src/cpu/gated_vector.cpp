#include "cpu/gated_vector.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <type_traits>

// CPU_CAPABILITY names the instruction set, both for ATen's vectors and for this namespace.
namespace torchops::cpu::CPU_CAPABILITY {
namespace {

using at::vec::Vectorized;

template <class T>
using Computed = std::conditional_t<std::is_same_v<T, double>, double, float>;

// As many elements as a vector of 16-bit values has, in the dtype of the computation.
template <class C>
struct Lanes {
  static constexpr int64_t count = 2 * Vectorized<C>::size();
  Vectorized<C> low, high;
};

template <class T>
Lanes<Computed<T>> load(const void* base, int64_t offset, int64_t count) {
  using C = Computed<T>;
  const T* from = static_cast<const T*>(base) + offset;
  constexpr int64_t half = Vectorized<C>::size();
  if constexpr (c10::is_reduced_floating_point_v<T>) {
    const bool full = count == Lanes<C>::count;
    const auto [low, high] =
        at::vec::convert_to_float<T>(full ? Vectorized<T>::loadu(from) : Vectorized<T>::loadu(from, count));
    return {low, high};
  } else if (count == Lanes<C>::count) {
    return {Vectorized<C>::loadu(from), Vectorized<C>::loadu(from + half)};
  } else {
    return {Vectorized<C>::loadu(from, std::min(count, half)),
            count > half ? Vectorized<C>::loadu(from + half, count - half) : Vectorized<C>(C(0))};
  }
}

template <class T>
void store(void* base, int64_t offset, int64_t count, const Lanes<Computed<T>>& lanes) {
  using C = Computed<T>;
  T* to = static_cast<T*>(base) + offset;
  constexpr int64_t half = Vectorized<C>::size();
  if constexpr (c10::is_reduced_floating_point_v<T>) {
    const Vectorized<T> rounded = at::vec::convert_from_float<T>(lanes.low, lanes.high);
    count == Lanes<C>::count ? rounded.store(to) : rounded.store(to, static_cast<int>(count));
  } else if (count == Lanes<C>::count) {
    lanes.low.store(to);
    lanes.high.store(to + half);
  } else {
    lanes.low.store(to, static_cast<int>(std::min(count, half)));
    if (count > half) lanes.high.store(to + half, static_cast<int>(count - half));
  }
}

// Applies f to each half of the operands.
template <class C, class F, class... Operands>
Lanes<C> map(const F& f, const Lanes<C>& first, const Operands&... others) {
  return {f(first.low, others.low...), f(first.high, others.high...)};
}

// exp(-u). 16-bit results use ATen's shorter polynomial, which doesn't propagate NaN, so NaN is blended in.
template <class T>
Vectorized<Computed<T>> exp_of_negative(const Vectorized<Computed<T>>& u) {
  if constexpr (c10::is_reduced_floating_point_v<T>) {
    return Vectorized<float>::blendv(u.neg().exp_u20(), u, u != u);
  } else {
    return u.neg().exp();
  }
}

template <class T>
Vectorized<Computed<T>> sigmoid(const Vectorized<Computed<T>>& u) {
  const Vectorized<Computed<T>> one(1);
  return one / (one + exp_of_negative<T>(u));
}

// T is the type of the value, U that of u.
template <class T, class U, bool silu>
void forward(const GatedSpan& span) {
  using C = Computed<T>;
  static_assert(std::is_same_v<C, Computed<U>>);
  const auto gated = [](const Vectorized<C>& value, const Vectorized<C>& u) {
    // Divides as ATen does, which is correct for infinite gates.
    if constexpr (silu) return value * (u / (Vectorized<C>(1) + exp_of_negative<T>(u)));
    return value * sigmoid<T>(u);
  };
  for (int64_t i = 0; i < span.count; i += Lanes<C>::count) {
    const int64_t count = std::min(Lanes<C>::count, span.count - i);
    store<T>(span.out, i, count, map<C>(gated, load<T>(span.value, i, count), load<U>(span.u, i, count)));
  }
}

// sigmoid' = s (1 - s) and silu' = s (1 + u (1 - s)).
template <class T, class U, bool silu>
void backward(const GatedSpan& span) {
  using C = Computed<T>;
  const Vectorized<C> one(C(1));
  for (int64_t i = 0; i < span.count; i += Lanes<C>::count) {
    const int64_t count = std::min(Lanes<C>::count, span.count - i);
    const Lanes<C> grad = load<T>(span.grad, i, count), u = load<U>(span.u, i, count);
    const Lanes<C> s = map<C>([](const auto& u) { return sigmoid<T>(u); }, u);
    // Read before dvalue is written, which may share its memory.
    const Lanes<C> value = span.du ? load<T>(span.value, i, count) : s;
    if (span.dvalue) {
      const auto dvalue = [](const auto& grad, const auto& s, const auto& u) {
        if constexpr (silu) return grad * (u * s);
        return grad * s;
      };
      store<T>(span.dvalue, i, count, map<C>(dvalue, grad, s, u));
    }
    if (span.du) {
      const auto du = [&](const auto& grad, const auto& value, const auto& s, const auto& u) {
        if constexpr (silu) return grad * value * (s * (one + u * (one - s)));
        return grad * value * (s * (one - s));
      };
      store<U>(span.du, i, count, map<C>(du, grad, value, s, u));
    }
  }
}

template <class T, class U>
GatedRoutine routine(bool silu, bool is_backward) {
  if (is_backward) return silu ? &backward<T, U, true> : &backward<T, U, false>;
  return silu ? &forward<T, U, true> : &forward<T, U, false>;
}

}  // namespace

GatedRoutine find_gated_routine(c10::ScalarType value_type, c10::ScalarType u_type, bool silu, bool backward) {
  using enum c10::ScalarType;
  const auto is = [&](c10::ScalarType value, c10::ScalarType u) { return value_type == value && u_type == u; };
  if (is(Float, Float)) return routine<float, float>(silu, backward);
  if (is(Double, Double)) return routine<double, double>(silu, backward);
  if (is(Half, Half)) return routine<c10::Half, c10::Half>(silu, backward);
  if (is(BFloat16, BFloat16)) return routine<c10::BFloat16, c10::BFloat16>(silu, backward);
  if (is(Float, Half)) return routine<float, c10::Half>(silu, backward);
  if (is(Float, BFloat16)) return routine<float, c10::BFloat16>(silu, backward);
  return nullptr;
}

}  // namespace torchops::cpu::CPU_CAPABILITY
