#pragma once

#include "cuda/base/activation.cuh"

// What kernels of sm80/ and sm90/ compute from their products. A rule says how many products there are, whether it
// reads c, and the scale in which a product plus bias is passed to it as z (and as t, if there are two products): with
// Exactness::kExact, 1. No torch, no CUTLASS.
namespace torchops::cuda::gemm {

/// y = F(a @ b.T + bias)
template <class F>
struct LinearRule {
  static constexpr int kProducts = 1;
  static constexpr bool kReadsC = false;
  __device__ __forceinline__ static constexpr float scale(int) { return F::kScale; }

  template <Exactness exactness>
  __device__ __forceinline__ static float value(float t, float, float) {
    return F::template of_scaled<exactness>(t);
  }
};

/// y = (a @ b.T + bias) * F(a @ b2.T + bias2)
template <class F>
struct GluRule {
  static constexpr int kProducts = 2;
  static constexpr bool kReadsC = false;
  __device__ __forceinline__ static constexpr float scale(int product) { return product == 0 ? 1.f : F::kScale; }

  template <Exactness exactness>
  __device__ __forceinline__ static float value(float z, float t, float) {
    return z * F::template of_scaled<exactness>(t);
  }

  /// The cotangents of both products, given the cotangent g of y.
  template <Exactness exactness>
  __device__ __forceinline__ static void backward(float g, float z, float t, float, bool, float& dz, float& dt) {
    float slope;
    dz = g * F::template with_slope<exactness>(t, slope);
    dt = g * z * slope;
  }
};

/// y = c * sigmoid(a @ b.T + bias)
struct GateRule {
  static constexpr int kProducts = 1;
  static constexpr bool kReadsC = true;
  __device__ __forceinline__ static constexpr float scale(int) { return Sigmoid::kScale; }

  template <Exactness exactness>
  __device__ __forceinline__ static float value(float t, float, float c) {
    return c * Sigmoid::of_scaled<exactness>(t);
  }

  /// The cotangents of the product and of c, given the cotangent g of y. If is_y, c is y: a factor of the former
  /// already.
  template <Exactness exactness>
  __device__ __forceinline__ static void backward(float g, float t, float, float c, bool is_y, float& dt, float& dc) {
    float complement;
    dc = g * Sigmoid::with_complement<exactness>(t, complement);
    dt = (is_y ? g : dc) * c * complement;
  }
};

/// Instead of the rule's value, what Rule::backward() makes of the cotangent of that value: two results.
template <class Rule>
struct CotangentsOf : Rule {};
template <class Rule>
inline constexpr bool kMakesCotangents = false;
template <class Rule>
inline constexpr bool kMakesCotangents<CotangentsOf<Rule>> = true;

/// Whether a gate multiplies: a second product, or another matrix.
template <class Rule>
inline constexpr bool kIsGated = Rule::kProducts > 1 || Rule::kReadsC;

}  // namespace torchops::cuda::gemm
