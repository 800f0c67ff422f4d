#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <type_traits>

// What the sources have in common that are compiled once for each instruction set. CPU_CAPABILITY names it, both for
// ATen's vectors and for this namespace.
namespace torchops::cpu::CPU_CAPABILITY {

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

}  // namespace torchops::cpu::CPU_CAPABILITY
