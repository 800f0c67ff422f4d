#pragma once

// Layer norms of tiles in place, for the gradients of a triangle update.

#include "cuda/gemm/sm90/triangle/steps.cuh"

namespace torchops::cuda::gemm {

/// threadIdx.x, opaque to the compiler so that nothing that depends on it is hoisted out of the loop over tiles: it
/// would be spilled there, and local memory has only the little of the first-level cache that shared memory leaves.
CUTLASS_DEVICE int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Sums of squares need no origin here: if a mean is so large that they lose digits, x has lost more when it was rounded
// to 16 bits. Where moments are measured, tiles are read twice, because registers are few. To normalise them, so many
// pieces of 16 bytes are read at once that the first is not the only one to wait for.
constexpr int kAtOnce = 2;

/// Normalises the rows of a tile of 128 columns in place. `thread` is one of `kOfRow` (2 or 4) for each row. The
/// moments are passed, or else measured and returned.
template <bool measures, int kOfRow, class Element>
CUTLASS_DEVICE void normalize_row(Element* tile, int thread, int features, float eps, Moments& moments) {
  using Piece = cutlass::Array<Element, 8>;
  constexpr int count = 16 / kOfRow, of_block = count / 2;
  const cutlass::NumericArrayConverter<float, Element, 8> widen;
  const cutlass::NumericArrayConverter<Element, float, 8> round;
  const int row = thread / kOfRow;
  // Pieces of eight threads are in different banks.
  const int first = kOfRow == 4 ? row % 2 * 4 + thread % 4 : thread % 2 * 4;
  const auto piece = [&](int i) { return first ^ (kOfRow == 4 ? i % 2 * 4 : i % 4); };
  const auto at = [&](int i) -> Piece& {
    return *reinterpret_cast<Piece*>(tile + i / of_block * (kPairRows * 64) + row * 64 + (piece(i) ^ row % 8) * 8);
  };
  if constexpr (measures) {
    float sums[2] = {}, squares[2] = {};  // TMA writes zeros past the features
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < count; ++i) {
      const auto values = widen(at(i));
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 8; ++v) {
        sums[v % 2] += values[v];
        squares[v % 2] = fmaf(values[v], values[v], squares[v % 2]);
      }
    }
    asm volatile("" ::: "memory");
    float sum = sums[0] + sums[1], square = squares[0] + squares[1];
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < kOfRow; distance *= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
      square += __shfl_xor_sync(~0u, square, distance);
    }
    moments.set(0, 0.f, sum, square, features, eps);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int begin = 0; begin < count; begin += kAtOnce) {
    Piece pieces[kAtOnce];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) pieces[i] = at(begin + i);
    CUTLASS_PRAGMA_UNROLL
    for (int i = begin; i < begin + kAtOnce; ++i) {
      auto values = widen(pieces[i - begin]);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 8; ++v) values[v] = fmaf(moments.scale[0], values[v], moments.shift[0]);
      if (i / of_block * 64 + piece(i) * 8 < features) at(i) = round(values);
    }
  }
}

/// Normalises the positions of a tile of channels in place, 16 per warp of a warpgroup: a lane has four of them in
/// every eighth channel. Returns rstd of each position.
template <int kFeatures, class Element>
CUTLASS_DEVICE void normalize_channels(Element* tile, float (&rstd)[kPairRows], int channels, float eps) {
  using Quad = cutlass::AlignedArray<Element, 4>;
  constexpr int count = kFeatures / 8;
  const cutlass::NumericArrayConverter<float, Element, 4> widen;
  const cutlass::NumericArrayConverter<Element, float, 4> round;
  const int thread = threadIdx.x % 128, lane = thread % 32, position = thread / 32 * 16 + lane % 4 * 4;
  // 16 lanes have channels of which no two keep these positions in the same banks.
  const int channel = lane / 4 % 4 * 2 + lane / 16;
  Element* const first = tile + swizzled_piece<kFeatures>(channel, position) + position % 8;
  const auto at = [&](int i) -> Quad& { return *reinterpret_cast<Quad*>(first + i * (8 * kPairRows)); };
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
  asm volatile("" ::: "memory");
  Moments moments[2];
  CUTLASS_PRAGMA_UNROLL
  for (int distance = 4; distance < 32; distance *= 2) {
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 4; ++v) {
      sums[v] += __shfl_xor_sync(~0u, sums[v], distance);
      squares[v] += __shfl_xor_sync(~0u, squares[v], distance);
    }
  }
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < 4; ++v) {
    moments[v / 2].set(v % 2, 0.f, sums[v], squares[v], channels, eps);
    if (lane < 4) rstd[position + v] = moments[v / 2].scale[v % 2];
  }
  CUTLASS_PRAGMA_UNROLL
  for (int begin = 0; begin < count; begin += 2 * kAtOnce) {
    Quad quads[2 * kAtOnce];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kAtOnce; ++i) quads[i] = at(begin + i);
    CUTLASS_PRAGMA_UNROLL
    for (int i = begin; i < begin + 2 * kAtOnce; ++i) {
      auto values = widen(quads[i - begin]);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 4; ++v) values[v] = fmaf(moments[v / 2].scale[v % 2], values[v], moments[v / 2].shift[v % 2]);
      Quad rounded;
      static_cast<cutlass::Array<Element, 4>&>(rounded) = round(values);
      if (8 * i < channels) at(i) = rounded;  // channels are a multiple of 8
    }
  }
}

}  // namespace torchops::cuda::gemm
