#pragma once

#include "cuda/base/exponential.cuh"

// The activations of all kernels, and the only sigmoid of src/cuda. No torch headers.
//
// An activation is a stateless functor:
//   kScale, of_scaled<exactness>(t)   its value at z = t / kScale. For an epilogue, t is cheaper than z:
//                                     it scales the bias once for all rows, and the sum in the
//                                     instruction that adds the bias. With kExact, t is z itself.
//   with_slope<exactness>(t, slope)   the same value, and its derivative in z, relatively as exact
//   value(z)                          its value to the last digits of float or double
//   backward(g, z, y)                 the cotangent of z, given the value y at z and the cotangent g of y. If it does
//                                     not read z, the output alone is enough for backward.
// To add one, write such a functor here and, to make it a GEMM epilogue, a line in gemm/table.def.
namespace torchops::cuda {

/// How exact a result is. kCoarse: for results that are rounded to bfloat16, in kernels limited by the special-function
/// unit. kFast: for results that are rounded to 16 bits, or come from TF32 products. kExact: for float32.
enum class Exactness { kCoarse, kFast, kExact };

struct Sigmoid {
  static constexpr float kScale = -kLog2E;
  static constexpr bool kFromOutput = true;

  /// 1 / (1 + 2^t).
  ///
  /// kFast also keeps the small results that a tanh instruction would lose to cancellation: as a function of z, its
  /// relative error is below 2e-6 for |z| < 16 (the rounding of t grows with it), and the limits are right where 2^t
  /// overflows or vanishes.
  ///
  /// kCoarse has a relative error of 3e-4 (that of bfloat16 is up to 2e-3), and uses the special-function unit once:
  /// with e = 2^-|t|, 1 / (1 + e) is the polynomial of degree 4 that is best in relative error on [0, 1]. 0.5 + 0.5 *
  /// tanh.approx(z / 2) would take fewer instructions, but ruin a gate that is nearly closed, sigmoid(-12) = 6e-6:
  /// close to -1, tanh.approx errs by up to 1.1e-5. Replacing its results below 2^-7 by 2^-t does not pay: one of them
  /// in a warp makes all of its lanes compute both.
  ///
  /// kExact takes half the instructions of value(), whose division has branches.
  template <Exactness exactness>
  __device__ static float of_scaled(float t) {
    if constexpr (exactness == Exactness::kExact) {
      float slope;
      return with_slope<exactness>(t, slope);
    } else if constexpr (exactness == Exactness::kFast) {
      return reciprocal_approximate(1.f + exp2_approximate(t));
    } else {
      const float e = exp2_approximate(-fabsf(t));
      const float r = reciprocal_of_sum(e);
      return t > 0.f ? e * r : r;
    }
  }

  /// 2 * half times the value at z, given `tanh` of kTanhScale * z: a third of the instructions of kCoarse, but an
  /// absolute error of up to 2.5e-4. For gates that only contribute to sums.
  static constexpr float kTanhScale = 0.5f;
  __device__ static float from_tanh(float half, float tanh) { return fmaf(half, tanh, half); }
  /// The value, and its slope y * (1 - y).
  __device__ static float from_tanh_with_slope(float tanh, float& slope) {
    const float y = from_tanh(0.5f, tanh);
    slope = fmaf(-y, y, y);
    return y;
  }

  /// The value y, and 1 - y: with e = 2^-|t|, they are 1 / (1 + e) and e / (1 + e), without cancellation.
  template <Exactness exactness>
  __device__ static float with_complement(float t, float& complement) {
    constexpr bool exact = exactness == Exactness::kExact;
    const float e = exact ? expf(-fabsf(t)) : exp2_approximate(-fabsf(t));
    float r = exactness == Exactness::kCoarse ? reciprocal_of_sum(e) : reciprocal_approximate(1.f + e);
    if constexpr (exact) r = fmaf(fmaf(-(1.f + e), r, 1.f), r, r);
    const bool below_half = exact ? t < 0.f : t > 0.f;
    complement = below_half ? r : e * r;
    return below_half ? e * r : r;
  }

  template <Exactness exactness>
  __device__ static float with_slope(float t, float& slope) {
    float complement;
    const float y = with_complement<exactness>(t, complement);
    slope = y * complement;
    return y;
  }

  /// ATen's formula, so that float64 results are bitwise those of torch.sigmoid.
  template <class A>
  __device__ static A value(A z) {
    return 1 / (1 + exp(-z));
  }

  /// The same without the branches of exp() and of the division, with which a thread computes one value after the
  /// other. With e = exp(-|z|), r = 1 / (1 + e) or e * r. What an approximate r lacks, in parts of it, is 1 - r - e *
  /// r, which does not depend on how 1 + e was rounded. The relative error is at most 2.8e-16 for z < 0, where the
  /// result is at least 2^-1022, and 1.6e-16 for others; that of ATen's formula, with an exp() that is an ulp off,
  /// 4.9e-16 and 2.7e-16.
  __device__ static double without_branches(double z) {
    const double e = exp_of_minus_magnitude(z), near = reciprocal_approximate(1 + e);
    const double error = fma(-e, near, 1 - near);
    const double r = fma(near, fma(error, error, error), near);
    return signbit(z) ? e * r : r;
  }

  template <class A>
  __device__ static A backward(A g, A, A y) {
    return g * y * (A{1} - y);
  }

 private:
  // The polynomial for 1 / (1 + e).
  __device__ static float reciprocal_of_sum(float e) {
    float r = fmaf(512.f / 3363.f, e, -1792.f / 3363.f);
    r = fmaf(r, e, 2912.f / 3363.f);
    r = fmaf(r, e, -3312.f / 3363.f);
    return fmaf(r, e, 3362.f / 3363.f);
  }
};

/// z * sigmoid(z).
struct Silu {
  static constexpr float kScale = Sigmoid::kScale;
  static constexpr bool kFromOutput = false;

  template <Exactness exactness>
  __device__ static float of_scaled(float t) {
    return unscaled<exactness>(t) * Sigmoid::of_scaled<exactness>(t);
  }

  template <Exactness exactness>
  __device__ static float with_slope(float t, float& slope) {
    const float z = unscaled<exactness>(t);
    const float y = Sigmoid::with_slope<exactness>(t, slope);
    slope = fmaf(z, slope, y);
    return z * y;
  }

  template <class A>
  __device__ static A value(A z) {
    return z / (1 + exp(-z));
  }

  template <class A>
  __device__ static A backward(A g, A z, A y) {
    const A s = Sigmoid::value(z);
    return g * (s + y * (1 - s));
  }

 private:
  template <Exactness exactness>
  __device__ static float unscaled(float t) {
    return exactness == Exactness::kExact ? t : -kLn2 * t;
  }
};

/// z itself: no activation.
struct Identity {
  static constexpr float kScale = 1.f;
  static constexpr bool kFromOutput = true;

  template <Exactness>
  __device__ static float of_scaled(float t) {
    return t;
  }

  template <Exactness>
  __device__ static float with_slope(float t, float& slope) {
    slope = 1.f;
    return t;
  }

  template <class A>
  __device__ static A value(A z) {
    return z;
  }

  template <class A>
  __device__ static A backward(A g, A, A) {
    return g;
  }
};

/// F(z) in the type in which elements of type T are computed, as exactly as T needs.
template <class F, class T, class A>
__device__ inline A activate(A z) {
  if constexpr (sizeof(T) == 2) {
    return F::template of_scaled<Exactness::kFast>(F::kScale * z);
  } else if constexpr (sizeof(T) == 4) {
    return F::template of_scaled<Exactness::kExact>(z);
  } else {
    return F::value(z);
  }
}

/// A gate: sigmoid(z) as exactly as elements of type T need.
template <class T, class A>
__device__ inline A gate_of(A z) {
  if constexpr (sizeof(T) == 8) {
    return Sigmoid::without_branches(z);
  } else {
    return activate<Sigmoid, T>(z);
  }
}

}  // namespace torchops::cuda
