#pragma once

// The exponential and the logistic function by the special-function unit, for results of 16 bits. No torch headers: the
// GEMM kernels use it too.
namespace torchops::cuda {

constexpr float kLog2E = 1.4426950408889634f;

/// 2^x by one instruction: at most 2 ulp off. Results below 2^-126 become 0 (.ftz): they are lost beside the 1 that the
/// logistic function adds and beside the largest term of a softmax, and to keep them the compiler would surround every
/// call with a test and two multiplications.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x by one instruction, at most 1 ulp off; 0 for |x| > 2^126.
__device__ inline float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / (1 + 2^t), the logistic function of x where t = -x * log2(e), also for the small results that a tanh instruction
/// would lose to cancellation: as a function of x its relative error is below 2e-6 for |x| < 16 (the rounding of t
/// grows with it), and it has the right limits where 2^t overflows or vanishes.
__device__ inline float fast_logistic(float t) { return reciprocal_approximate(1.f + exp2_approximate(t)); }

__device__ inline float fast_sigmoid(float x) { return fast_logistic(-kLog2E * x); }

/// fast_logistic with relative error 3e-4, for results that are rounded to bfloat16 (which errs by up to 2e-3). The
/// epilogue of a product waits for the special-function unit, so it asks it once: with e = 2^-|t|, 1 / (1 + e) is the
/// polynomial of degree 4 that is best in relative error on [0, 1]. 0.5 + 0.5 * tanh.approx(x / 2) would do with fewer
/// instructions, but of a gate that is nearly closed, sigmoid(-12) = 6e-6, little would be left: close to -1,
/// tanh.approx errs by up to 1.1e-5. Replacing its results below 2^-7 by 2^-t, where a warp has one, gained at most 5 %
/// for x of standard deviation 1.4, and cost 11 to 28 % for 4 (measured on an H100).
__device__ inline float coarse_logistic(float t) {
  const float e = exp2_approximate(-fabsf(t));
  float r = fmaf(512.f / 3363.f, e, -1792.f / 3363.f);
  r = fmaf(r, e, 2912.f / 3363.f);
  r = fmaf(r, e, -3312.f / 3363.f);
  r = fmaf(r, e, 3362.f / 3363.f);
  return t > 0.f ? e * r : r;
}

}  // namespace torchops::cuda
