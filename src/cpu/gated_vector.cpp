#include "cpu/gated_vector.h"

#include <algorithm>
#include <cstring>

#include "cpu/lanes.h"

namespace torchops::cpu::CPU_CAPABILITY {
namespace {

template <class To, class From>
To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof(To));
  return to;
}

// 1 + exp(-u) for 16-bit results, to 1e-5 of itself, in half of the instructions of ATen's exp_u20().
//
// exp(-u) = 2^n 2^f, where n is the integer nearest to -u log2(e). Adding 1.5 * 2^23 rounds to n and leaves it in the
// low bits, from where it is shifted to the exponent of 2^f, a polynomial of least relative error for |f| <= 1/2. All
// of it is computed for half of exp(-u), which is finite up to where the sum overflows. Beyond the limits of u the sum
// is 1 or infinite. NaN stays NaN: widened from 16 bits, it has no low bits.
Vectorized<float> one_plus_exp_of_negative(const Vectorized<float>& u) {
  using V = Vectorized<float>;
  using Bits = Vectorized<int32_t>;
  const V round(0x1.8p23f);
  const V exponent = at::vec::clamp(u, V(-89.f), V(80.f)) * V(-1.44269504f);
  const V shifted = exponent + round;
  const V f = exponent - (shifted - round);
  V power(0.00478505f);
  for (const float coefficient : {0.02795893f, 0.12012374f, 0.34656091f, 0.49999963f}) {
    power = at::vec::fmadd(power, f, V(coefficient));
  }
  const V half = bits_of<V>(bits_of<Bits>(power) + (bits_of<Bits>(shifted) << Bits(23)));
  return at::vec::fmadd(half, V(2.f), V(1.f));
}

// value / (1 + exp(-u)). Divides as ATen does, which is correct for infinite gates.
template <class T, class C = Computed<T>>
Vectorized<C> times_sigmoid(const Vectorized<C>& value, const Vectorized<C>& u) {
  if constexpr (c10::is_reduced_floating_point_v<T>) {
    return value / one_plus_exp_of_negative(u);
  } else {
    return value / (Vectorized<C>(1) + u.neg().exp());
  }
}

template <class T, class C = Computed<T>>
Vectorized<C> sigmoid(const Vectorized<C>& u) {
  return times_sigmoid<T>(Vectorized<C>(1), u);
}

// T is the type of the value, U that of u.
template <class T, class U, bool silu>
void forward(const GatedSpan& span) {
  using C = Computed<T>;
  static_assert(std::is_same_v<C, Computed<U>>);
  const auto gated = [](const Vectorized<C>& value, const Vectorized<C>& u) {
    if constexpr (silu) return value * times_sigmoid<T>(u, u);
    return times_sigmoid<T>(value, u);
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
        return grad * value * (span.value_is_y ? one - s : s * (one - s));
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
