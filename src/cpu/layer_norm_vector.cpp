#include "cpu/layer_norm_vector.h"

#include <algorithm>
#include <cmath>

#include "cpu/lanes.h"

namespace torchops::cpu::CPU_CAPABILITY {
namespace {

// The sum of term(i, count), lanes of which the first `count` belong to the elements from i on and the others are
// undefined. Vectors are added for a block at a time, and the sums of blocks in float64, so that the error does not
// grow with the row.
template <class C, class Term>
double sum(int64_t elements, const Term& term) {
  constexpr int64_t whole = Lanes<C>::count, half = Vectorized<C>::size(), block = 64 * whole;
  const Vectorized<C> zero(C(0));
  double total = 0;
  for (int64_t first = 0; first < elements; first += block) {
    const int64_t end = std::min(elements, first + block);
    Lanes<C> sums{zero, zero};
    int64_t i = first;
    for (; i + whole <= end; i += whole) {
      const Lanes<C> terms = term(i, whole);
      sums = {sums.low + terms.low, sums.high + terms.high};
    }
    if (i < end) {
      const Lanes<C> terms = term(i, end - i);
      const int64_t low = std::min(end - i, half), high = end - i - low;
      sums = {sums.low + Vectorized<C>::set(zero, terms.low, low),
              sums.high + Vectorized<C>::set(zero, terms.high, high)};
    }
    C lanes[half];
    (sums.low + sums.high).store(lanes);
    for (const C lane : lanes) total += static_cast<double>(lane);
  }
  return total;
}

// The mean is summed around the first element, and the variance around the mean: a row is in the cache when it is read
// again. Nothing cancels then, and the norm of equal elements is 0. If the first element is four standard deviations
// off, differences from it have rounded what distinguishes the others, so they are summed once more, around the mean
// found.
template <class T>
void normalize(const LayerNormRows& rows, int64_t begin, int64_t end) {
  using C = Computed<T>;
  using V = Vectorized<C>;
  const auto size = static_cast<double>(rows.columns);
  const auto affine = [&](const void* vector, int64_t i, int64_t count) {
    return rows.narrow_affine ? load<T>(vector, i, count) : load<C>(vector, i, count);
  };
  for (int64_t row = begin; row < end; ++row) {
    const T* const x = static_cast<const T*>(rows.x) + row * rows.x_stride;
    T* const y = static_cast<T*>(rows.y) + row * rows.y_stride;
    const auto around = [&](C center) {
      return [x, center](int64_t i, int64_t count) {
        return map<C>([&](const V& x) { return x - V(center); }, load<T>(x, i, count));
      };
    };
    C center = static_cast<C>(x[0]), mean;
    double squares;
    for (int pass = 0; pass < 2; ++pass) {
      mean = static_cast<C>(static_cast<double>(center) + sum<C>(rows.columns, around(center)) / size);
      if (!std::isfinite(mean)) {
        // The sum has overflowed, unless a value is infinite or NaN. The variance will too, and the norm is 0.
        mean = static_cast<C>(sum<C>(rows.columns, [&](int64_t i, int64_t count) {
          return map<C>([&](const V& x) { return x / V(static_cast<C>(size)); }, load<T>(x, i, count));
        }));
      }
      squares = sum<C>(rows.columns, [centered = around(mean)](int64_t i, int64_t count) {
        return map<C>([](const V& x) { return x * x; }, centered(i, count));
      });
      const double distance = static_cast<double>(center) - static_cast<double>(mean);
      if (!(distance * distance * size > 16 * squares)) break;
      center = mean;
    }
    const auto centered = around(mean);
    const C rstd = C(1) / std::sqrt(static_cast<C>(squares / size) + static_cast<C>(rows.eps));
    // If the variance has overflowed, so may differences from the mean, and infinity times 0 is NaN.
    const auto scaled = rstd == C(0) ? around(C(0)) : centered;
    for (int64_t i = 0; i < rows.columns; i += Lanes<C>::count) {
      const int64_t count = std::min(Lanes<C>::count, rows.columns - i);
      Lanes<C> out = map<C>([&](const V& x) { return x * V(rstd); }, scaled(i, count));
      if (rows.weight) out = map<C>([](const V& x, const V& w) { return x * w; }, out, affine(rows.weight, i, count));
      if (rows.bias) out = map<C>([](const V& x, const V& b) { return x + b; }, out, affine(rows.bias, i, count));
      store<T>(y, i, count, out);
    }
    static_cast<C*>(rows.mean)[row * rows.mean_stride] = mean;
    static_cast<C*>(rows.rstd)[row * rows.rstd_stride] = rstd;
  }
}

// With xhat = (x - mean) * rstd and h = g * weight, in sums over the N elements of a row:
//   dx = rstd * (h - sum(h) / N - xhat * sum(h * xhat) / N),
// and to be summed over rows: dweight = g * xhat, dbias = g.
template <class T>
void differentiate(const LayerNormGradientRows& rows, int64_t begin, int64_t end) {
  using C = Computed<T>;
  using V = Vectorized<C>;
  const auto times = [](const V& a, const V& b) { return a * b; };
  const auto size = static_cast<double>(rows.columns);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * rows.columns;
    const V rstd(static_cast<const C*>(rows.rstd)[row]);
    // If the variance has overflowed, so may differences from the mean, and infinity times 0 is NaN.
    const bool is_flat = static_cast<const C*>(rows.rstd)[row] == C(0);
    const V mean(is_flat ? C(0) : static_cast<const C*>(rows.mean)[row]);
    const auto grad = [&](int64_t i, int64_t count) { return load<T>(rows.grad, first + i, count); };
    const auto xhat = [&](int64_t i, int64_t count) {
      return map<C>([&](const V& x) { return (x - mean) * rstd; }, load<T>(rows.x, first + i, count));
    };
    const auto weighted = [&](int64_t i, int64_t count) {
      return rows.weight ? map<C>(times, grad(i, count), load<C>(rows.weight, i, count)) : grad(i, count);
    };
    if (rows.dx) {
      const V mean_h(static_cast<C>(sum<C>(rows.columns, weighted) / size));
      const V mean_h_xhat(static_cast<C>(
          sum<C>(rows.columns,
                 [&](int64_t i, int64_t count) { return map<C>(times, weighted(i, count), xhat(i, count)); }) /
          size));
      for (int64_t i = 0; i < rows.columns; i += Lanes<C>::count) {
        const int64_t count = std::min(Lanes<C>::count, rows.columns - i);
        store<T>(rows.dx, first + i, count,
                 map<C>([&](const V& h, const V& x) { return (h - mean_h - x * mean_h_xhat) * rstd; },
                        weighted(i, count), xhat(i, count)));
      }
    }
    const auto add = [&](void* to, const auto& part) {
      for (int64_t i = 0; to && i < rows.columns; i += Lanes<C>::count) {
        const int64_t count = std::min(Lanes<C>::count, rows.columns - i);
        store<C>(to, i, count,
                 map<C>([](const V& a, const V& b) { return a + b; }, load<C>(to, i, count), part(i, count)));
      }
    };
    add(rows.dweight, [&](int64_t i, int64_t count) { return map<C>(times, grad(i, count), xhat(i, count)); });
    add(rows.dbias, grad);
  }
}

}  // namespace

LayerNormGradientRoutine find_layer_norm_gradient_routine(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half ? &differentiate<c10::Half> : &differentiate<c10::BFloat16>;
}

LayerNormRoutine find_layer_norm_routine(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return &normalize<double>;
    case c10::ScalarType::Half:
      return &normalize<c10::Half>;
    case c10::ScalarType::BFloat16:
      return &normalize<c10::BFloat16>;
    default:
      return &normalize<float>;
  }
}

}  // namespace torchops::cpu::CPU_CAPABILITY
