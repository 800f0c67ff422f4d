#pragma once

// The exponential, reciprocal and hyperbolic tangent of the special-function unit. No torch headers:
// the GEMM kernels use these too.
namespace torchops::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// 2^x by one instruction, at most 2 ulp off. Results below 2^-126 become 0 (.ftz): they are negligible beside the 1
/// that the logistic function adds and beside the largest term of a softmax, and to keep them the compiler would add a
/// test and two multiplications to every call.
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

/// tanh(x) by one instruction, with a relative error of up to 2^-11 (PTX).
__device__ inline float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace torchops::cuda
