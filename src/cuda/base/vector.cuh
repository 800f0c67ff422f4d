#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/base/exponential.cuh"
#include "cuda/base/shared_address.cuh"

// 16-byte accesses and the exponential, for the row and elementwise kernels.
namespace torchops::cuda {

/// The type that sums and functions are computed in.
template <class T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Elements in one 16-byte access, the widest one.
constexpr int kVectorBytes = 16;
template <class T>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(T));

/// How many elements, of up to 16 bytes, may be accessed at once at any multiple of that number in a row.
template <class T>
int row_vector(const T* data, int64_t stride) {
  const auto steps = reinterpret_cast<uintptr_t>(data) / sizeof(T) | static_cast<uintptr_t>(stride) | kVectorSize<T>;
  return static_cast<int>(steps & ~(steps - 1));
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// N elements as they lie in memory: sizeof(T) * N bytes, aligned to their size.
template <class T, int N>
struct alignas(sizeof(T) * N) Packed {
  T at[N];
};

// Every element is read once, so it should not displace from L1 what is read again (weights). Plain loads, not loads of
// read-only memory, because in-place kernels write there.
template <class T, int N>
__device__ inline Packed<T, N> load(const T* from) {
  Packed<T, N> out;
  if constexpr (sizeof(out) == kVectorBytes) {
    uint4 bits;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from));
    out = *reinterpret_cast<const Packed<T, N>*>(&bits);
  } else {
    out = *reinterpret_cast<const Packed<T, N>*>(from);
  }
  return out;
}

template <class T, int N>
__device__ inline void store(T* to, const Packed<T, N>& packed) {
  if constexpr (sizeof(packed) == kVectorBytes) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&packed);
  } else {
    *reinterpret_cast<Packed<T, N>*>(to) = packed;
  }
}

/// Starts to copy a vector from global to shared memory. This thread can read it after wait_for_copies().
template <class T, int N>
__device__ inline void copy_vector(Packed<T, N>* shared, const T* from) {
  static_assert(sizeof(*shared) == kVectorBytes);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(from) : "memory");
}
/// The same for what other blocks of the multiprocessor read, too: L1 keeps it.
template <class T, int N>
__device__ inline void copy_vector_through_l1(Packed<T, N>* shared, const T* from) {
  static_assert(sizeof(*shared) == kVectorBytes);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(from) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// end_copies() makes the copies since the last call a group; wait_for_copies_before() waits for all but kLater groups.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLater>
__device__ inline void wait_for_copies_before() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

template <class T, int N>
__device__ inline void unpack(const Packed<T, N>& packed, Accumulate<T> (&out)[N]) {
  if constexpr (std::is_same_v<T, c10::BFloat16> && N % 2 == 0) {
    // A bfloat16 is the upper half of a float.
    const auto* const words = reinterpret_cast<const uint32_t*>(&packed);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<T, c10::Half> && N % 2 == 0) {
    const auto* const pairs = reinterpret_cast<const __half2*>(&packed);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 both = __half22float2(pairs[i]);
      out[2 * i] = both.x;
      out[2 * i + 1] = both.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = static_cast<Accumulate<T>>(packed.at[i]);
  }
}

template <class T, int N>
__device__ inline Packed<T, N> pack(const Accumulate<T> (&values)[N]) {
  Packed<T, N> out;
  if constexpr (std::is_same_v<T, c10::BFloat16> && N % 2 == 0) {
    auto* const pairs = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  } else if constexpr (std::is_same_v<T, c10::Half> && N % 2 == 0) {
    auto* const pairs = reinterpret_cast<__half2*>(&out);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.at[i] = static_cast<T>(values[i]);
  }
  return out;
}

/// exp(x) for x <= 0, to be rounded to T. For 16-bit T, rounding x * log2(e) gives a relative error of |x| * 2^-23, at
/// most 2^-16 if the result is not 0; T's own rounding is 2^-11 (float16) or 2^-8 (bfloat16). In float32 the error
/// would be visible, so CUDA's expf() is used, as in ATen.
template <class T>
__device__ inline Accumulate<T> exp_nonpositive(Accumulate<T> x) {
  if constexpr (sizeof(T) == 2) {
    return exp2_approximate(x * kLog2E);
  } else {
    return exp(x);
  }
}

/// a / b for 1 <= b < 2^126, to be rounded to T: for float32 within 1 ulp, for 16-bit T within 2 ulp of float32.
template <class T>
__device__ inline Accumulate<T> divide(Accumulate<T> a, Accumulate<T> b) {
  if constexpr (std::is_same_v<T, double>) {
    return a / b;
  } else {
    const float inverse = reciprocal_approximate(b);
    const float quotient = a * inverse;
    if constexpr (!std::is_same_v<T, float>) return quotient;
    return fmaf(fmaf(-quotient, b, a), inverse, quotient);
  }
}

}  // namespace torchops::cuda
