#pragma once

#include <cstdint>

// No torch, no CUTLASS.
namespace torchops::cuda::gemm {

/// float32 numbers, each as the sum of two of TF32: the nearest, and most of what it leaves. The latter has 12 bits,
/// and the instruction reads 11 of them, so the sum is the number or, for a quarter of them, a last digit off. The high
/// part of an infinity, or of a number that rounds to it, is infinite; the low part of a NaN is NaN.
template <int count>
struct SplitTF32 {
  uint32_t high[count], low[count];

  __device__ void set(const uint32_t (&words)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      // to_tf32() but for NaN, in a third of its instructions.
      high[i] = (words[i] + 0x1000u) & ~0x1fffu;
      low[i] = __float_as_uint(__uint_as_float(words[i]) - __uint_as_float(high[i]));
    }
  }
};

}  // namespace torchops::cuda::gemm
