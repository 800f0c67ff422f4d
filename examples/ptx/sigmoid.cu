// The sigmoid of src/cuda/sigmoid_kernel.cu without torch's headers, small enough to read as PTX.
//
// The same: the arithmetic, float32 and 16-bit, and 16-byte accesses. Left out: unaligned tensors, float64 and float16,
// two vectors per thread, and overwriting x. As y is never x here, both are __restrict__, and loads become ld.global.nc.
#include <cuda_bf16.h>

namespace {

constexpr float kLog2E = 1.4426950408889634f;

__device__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp(-|x|) cannot overflow, so that small results keep all their digits. One Newton step corrects the quotient.
__device__ float logistic(float x) {
  const float power = expf(x < 0 ? x : -x);
  const float numerator = x < 0 ? power : 1.0f;
  const float denominator = 1.0f + power;
  const float inverse = reciprocal_approximate(denominator);
  const float quotient = numerator * inverse;
  return fmaf(fmaf(-quotient, denominator, numerator), inverse, quotient);
}

// For results that are rounded to 16 bits, two instructions of 2^-22 are enough.
__device__ __nv_bfloat16 logistic(__nv_bfloat16 x) {
  return __float2bfloat16_rn(reciprocal_approximate(1.0f + exp2_approximate(-__bfloat162float(x) * kLog2E)));
}
__device__ __nv_bfloat162 logistic(__nv_bfloat162 x) {
  const float2 in = __bfloat1622float2(x);
  return __floats2bfloat162_rn(reciprocal_approximate(1.0f + exp2_approximate(-in.x * kLog2E)),
                               reciprocal_approximate(1.0f + exp2_approximate(-in.y * kLog2E)));
}

}  // namespace

// y[i] = sigmoid(x[i]) for i < n, with one thread for every four elements and both pointers on 16 bytes.
extern "C" __global__ void sigmoid_f32(const float* __restrict__ x, float* __restrict__ y, long long n) {
  const long long i = 4 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (i + 4 <= n) {
    const float4 in = *reinterpret_cast<const float4*>(x + i);
    *reinterpret_cast<float4*>(y + i) = {logistic(in.x), logistic(in.y), logistic(in.z), logistic(in.w)};
  } else {
#pragma unroll 1  // at most a few elements at the end
    for (long long k = i; k < n; ++k) y[k] = logistic(x[k]);
  }
}

// The same with one thread for every eight elements.
extern "C" __global__ void sigmoid_bf16(const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ y,
                                        long long n) {
  const long long i = 8 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (i + 8 <= n) {
    uint4 words = *reinterpret_cast<const uint4*>(x + i);
    auto* const pairs = reinterpret_cast<__nv_bfloat162*>(&words);
#pragma unroll
    for (int k = 0; k < 4; ++k) pairs[k] = logistic(pairs[k]);
    *reinterpret_cast<uint4*>(y + i) = words;
  } else {
#pragma unroll 1  // at most a few elements at the end
    for (long long k = i; k < n; ++k) y[k] = logistic(x[k]);
  }
}

// The same with one thread for every element: what 2-byte accesses cost.
extern "C" __global__ void sigmoid_bf16_scalar(const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ y,
                                               long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = logistic(x[i]);
}
