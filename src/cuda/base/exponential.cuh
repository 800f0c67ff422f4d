#pragma once

// The exponential, reciprocal and hyperbolic tangent of the special-function unit, and the exponential for the sigmoid
// in float64. No torch headers: the GEMM kernels use these too.
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

/// 1 / x by one instruction, which reads and writes only the upper half of a number: 20 bits of the fraction.
__device__ inline double reciprocal_approximate(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
}

/// exp(-|x|) without branches, so that a thread can compute several at once: with a relative error below 1.6e-16 if the
/// result is at least 2^-1022, and 0 from |x| = 709 on. It is 2^f * 2^k with an integer k and |f| <= 1/2, and 2^f is
/// the polynomial of degree 11 with the least relative error, 6e-18.
__device__ inline double exp_of_minus_magnitude(double x) {
  constexpr double log2e = 0x1.71547652b82fep+0, rest_of_log2e = 0x1.777d0ffda0d24p-56, most = 709;
  constexpr double coefficients[] = {0x1.e9368fa354e48p-32, 0x1.e61ce20d16d4dp-28, 0x1.b5254b14510fbp-24,
                                     0x1.62bfc6b8db8e0p-20, 0x1.ffcbfc538f8fdp-17, 0x1.4309130f3288ap-13,
                                     0x1.5d87fe78a23cep-10, 0x1.3b2ab6fb9ff57p-7,  0x1.c6b08d704a11dp-5,
                                     0x1.ebfbdff82c5a5p-3,  0x1.62e42fefa39efp-1,  1};
  // Rounds what is added to an integer, and has it plus 1023, the exponent's bits of 2^k, in its lowest bits. For
  // `most`, k is -1023, and these bits are 0.
  constexpr double rounder = 0x1.8p52 + 1023;
  const double magnitude = fabs(x) > most ? most : fabs(x);  // NaN remains
  const double rounded = fma(magnitude, -log2e, rounder), k = rounded - rounder;
  const double f = fma(magnitude, -rest_of_log2e, fma(magnitude, -log2e, -k));
  double power = coefficients[0];
#pragma unroll
  for (int i = 1; i < 12; ++i) power = fma(power, f, coefficients[i]);
  return power * __hiloint2double(__double2loint(rounded) << 20, 0);
}

}  // namespace torchops::cuda
