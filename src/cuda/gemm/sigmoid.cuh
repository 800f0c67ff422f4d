#pragma once

namespace torchops::cuda {

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.4426950408889634f;

/// 1 / (1 + exp(-x)) by the two special-function instructions for exp2 and the reciprocal: relative error below 2e-6
/// for |x| < 16 (the rounding of x * log2(e) grows with it), and the right limits where exp(-x) overflows or vanishes.
__device__ inline float fast_sigmoid(float x) {
  const float e = exp2_approx(-kLog2E * x);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + e));
  return r;
}

/// The same with relative error 3e-4, for results that are rounded to bfloat16 (which errs by up to 2e-3). The epilogue
/// of a product waits for the special-function unit, so it asks it once: with e = exp(-|x|), 1 / (1 + e) is the
/// polynomial of degree 4 that is best in relative error on [0, 1]. tanh.approx would do with fewer instructions, but
/// its error of 2e-4 is absolute, and a closed gate, sigmoid(-8) = 3e-4, would be all error.
__device__ inline float coarse_sigmoid(float x) {
  const float e = exp2_approx(-kLog2E * fabsf(x));
  float r = fmaf(512.f / 3363.f, e, -1792.f / 3363.f);
  r = fmaf(r, e, 2912.f / 3363.f);
  r = fmaf(r, e, -3312.f / 3363.f);
  r = fmaf(r, e, 3362.f / 3363.f);
  return x < 0.f ? e * r : r;
}

}  // namespace torchops::cuda
