#pragma once

// Layer norms of tiles in place, by two warpgroups, for the gradients of a triangle update.

#include "cuda/gemm/sm90/pair.cuh"

namespace torchops::cuda::gemm {

/// threadIdx.x, opaque to the compiler so that nothing that depends on it is hoisted out of the loop over tiles: it
/// would be spilled there, and local memory has only the little of the first-level cache that shared memory leaves.
CUTLASS_DEVICE int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Sums of squares need no origin here: if a mean is so large that they lose digits, x has lost more
// when it was rounded to 16 bits.

/// Normalises the rows of a tile in place, four threads per row, which read the pieces as in row_moments(). The moments
/// are passed, or else measured and returned.
template <bool measures, int kFeatures, class Element>
CUTLASS_DEVICE void normalize_row(Element* tile, int thread, int features, float eps, Moments& moments) {
  using Piece = cutlass::Array<Element, 8>;
  constexpr int count = kFeatures / 32;
  const cutlass::NumericArrayConverter<float, Element, 8> widen;
  const cutlass::NumericArrayConverter<Element, float, 8> round;
  const int row = thread / 4, first = (row % 2 * 4 + thread % 4) * 8;
  const auto column = [&](int i) { return i / 2 * 64 + (first ^ i % 2 * 32); };
  const int places[2] = {swizzled_piece<kPairRows>(row, first), swizzled_piece<kPairRows>(row, first ^ 32)};
  const auto at = [&](int i) -> Piece& {
    return *reinterpret_cast<Piece*>(tile + places[i % 2] + i / 2 * (kPairRows * 64));
  };
  Piece pieces[count];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < count; ++i) pieces[i] = at(i);
  if constexpr (measures) {
    float sums[2] = {}, squares[2] = {};  // TMA writes zeros past the features
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < count; ++i) {
      const auto values = widen(pieces[i]);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 8; ++v) {
        sums[v % 2] += values[v];
        squares[v % 2] = fmaf(values[v], values[v], squares[v % 2]);
      }
    }
    float sum = sums[0] + sums[1], square = squares[0] + squares[1];
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < 4; distance *= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
      square += __shfl_xor_sync(~0u, square, distance);
    }
    moments.set(0, 0.f, sum, square, features, eps);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < count; ++i) {
    auto values = widen(pieces[i]);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 8; ++v) values[v] = fmaf(moments.scale[0], values[v], moments.shift[0]);
    if (column(i) < features) at(i) = round(values);
  }
}

/// Normalises the positions of a tile of channels in place, 8 per warp: a lane has four of them in every 16th channel.
/// Returns rstd of each position.
template <int kFeatures, class Element>
CUTLASS_DEVICE void normalize_channels(Element* tile, int thread, float (&rstd)[kPairRows], int channels, float eps) {
  using Quad = cutlass::AlignedArray<Element, 4>;
  constexpr int count = kFeatures / 16;
  const cutlass::NumericArrayConverter<float, Element, 4> widen;
  const cutlass::NumericArrayConverter<Element, float, 4> round;
  const int lane = thread % 32, position = thread / 32 * 8 + lane % 2 * 4;
  Element* const first = tile + swizzled_piece<kFeatures>(lane / 2, position) + position % 8;
  const auto at = [&](int i) -> Quad& { return *reinterpret_cast<Quad*>(first + i * (16 * kPairRows)); };
  float sums[4] = {}, squares[4] = {};  // TMA writes zeros past the channels
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < count; ++i) {
    const auto values = widen(at(i));
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 4; ++v) {
      sums[v] += values[v];
      squares[v] = fmaf(values[v], values[v], squares[v]);
    }
  }
  asm volatile("" ::: "memory");  // read again, because registers are few
  Moments moments[2];
  CUTLASS_PRAGMA_UNROLL
  for (int distance = 2; distance < 32; distance *= 2) {
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 4; ++v) {
      sums[v] += __shfl_xor_sync(~0u, sums[v], distance);
      squares[v] += __shfl_xor_sync(~0u, squares[v], distance);
    }
  }
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < 4; ++v) {
    moments[v / 2].set(v % 2, 0.f, sums[v], squares[v], channels, eps);
    if (lane < 2) rstd[position + v] = moments[v / 2].scale[v % 2];
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < count; ++i) {
    auto values = widen(at(i));
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 4; ++v) values[v] = fmaf(moments[v / 2].scale[v % 2], values[v], moments[v / 2].shift[v % 2]);
    Quad rounded;
    static_cast<cutlass::Array<Element, 4>&>(rounded) = round(values);
    if (16 * i + lane / 2 < channels) at(i) = rounded;
  }
}

}  // namespace torchops::cuda::gemm
