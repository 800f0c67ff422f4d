#pragma once

// The sums of a tile of products of float32 matrices, whose operands aren't rounded to TF32, on every GPU from compute
// capability 8.0 on: cp.async copies a step of the operands while sm80/float32_sums.cuh multiplies the one before.

#include <cstdint>
#include <cstring>

#include "cuda/base/device.h"
#include "cuda/base/vector.cuh"
#include "cuda/gemm/sm80/float32_sums.cuh"
#include "cuda/gemm/sm80/kernel.cuh"

namespace torchops::cuda::gemm {

/// A CTA computes kRows x kColumns of the output, with two products of half as many columns each. Operands come in
/// steps of 32 columns of their rows. On compute capability 8.0 and 9.0, two CTAs fit a multiprocessor: one computes
/// during the first copies and the epilogue of the other. Where shared memory has 100 KiB, one does.
template <int products, int warps_m>
struct Float32Tile {
  static constexpr int kWarpsM = warps_m, kWarpsN = kSm80Warps / warps_m, kStages = 2, kStep = kFloat32Step;
  static constexpr int kWarpColumns = 64 / products;
  static constexpr int kRows = 32 * kWarpsM, kWeightRows = 64 * kWarpsN, kColumns = kWeightRows / products;
  static constexpr uint32_t kRowBytes = kStep * sizeof(float), kWeightBytes = kColumns * kRowBytes;
  static constexpr uint32_t kInputBytes = kRows * kRowBytes, kStageBytes = (kRows + kWeightRows) * kRowBytes;
  static constexpr int kSharedBytes = kStages * static_cast<int>(kStageBytes);
  static_assert(kSharedBytes <= kLeastSharedBytes);
};

/// A matrix of rows that are summed over. `stride` is from one line to the next: rows, or columns if rows are
/// neighbours in memory. Lines are aligned to 16 bytes.
struct Float32Operand {
  const float* data;
  int64_t stride;

  template <Major major>
  __device__ float at(int64_t row, int64_t column) const {
    return major == Major::kColumns ? data[row * stride + column] : data[column * stride + row];
  }
};

/// Starts to copy the columns from `begin` on of a tile of `rows` rows, of which rows_left exist: kFloat32Step, of
/// which those from `end` on become 0.
template <Major major, Side side, int rows>
__device__ inline void copy_float32(uint32_t to, const Float32Operand& from, int first_row, int rows_left, int begin,
                                    int end) {
  constexpr bool by_rows = major == Major::kColumns;
  constexpr int pieces = by_rows ? kFloat32Step / 4 : rows / 4, lines = by_rows ? rows : kFloat32Step;
  constexpr int step = kSm80Threads / pieces;
  static_assert(step % (by_rows ? 32 : 4) == 0);  // what Float32Layout::place() repeats after
  const int line = static_cast<int>(threadIdx.x) / pieces, piece = static_cast<int>(threadIdx.x) % pieces;
  const int in_line = by_rows ? end - begin : rows_left, lines_left = by_rows ? rows_left : end - begin;
  const int valid = min(max(in_line - piece * 4, 0), 4) * static_cast<int>(sizeof(float));
  const float* const own =
      from.data + (by_rows ? (first_row + line) * from.stride + begin : (begin + line) * from.stride + first_row) +
      piece * 4;
  const uint32_t own_to = to + Float32Layout<major, side, rows>::place(line, piece);
  constexpr uint32_t line_bytes = pieces * 16;
#pragma unroll
  for (int i = 0; i < lines / step; ++i) {
    copy_or_clear<16>(own_to + i * step * line_bytes, own + i * step * from.stride,
                      line + i * step < lines_left ? valid : 0);
  }
}

/// The operands of a tile's products, of m x k and n x k.
template <int products>
struct Float32Operands {
  Float32Operand a, b[products];
  int m, n;
};

/// Computes those sums again that are not finite, by FFMAs, from memory. `row` and `column` are the warp's. This is
/// slow for infinities, but not for matrices of NaN.
template <class Sums, int products>
__device__ __noinline__ void sum_again(float (&sums)[Sums::kRows][4 * Sums::kVectors],
                                       const Float32Operands<products>& of, int row, int column, int k_end) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int i = 0; i < Sums::kRows; ++i) {
    const int of_row = row + Sums::row(lane, i);
    if (of_row >= of.m) continue;
#pragma unroll 1
    for (int at = 0; at < 4 * Sums::kVectors; ++at) {
      const int product = at / (4 * Sums::kVectors / products);
      const int of_column = column + Sums::column(lane, at / 4) + at % 4;
      if (isfinite(sums[i][at]) || of_column >= of.n) continue;
      float sum = 0.f;
      for (int k = 0; k < k_end && !isnan(sum); ++k) {
        sum = fmaf(of.a.template at<Sums::kMajorA>(of_row, k), of.b[product].template at<Sums::kMajorB>(of_column, k),
                   sum);
      }
      sums[i][at] = sum;
    }
  }
}

/// A lane's sums over `columns` columns. first_row and first_column are those of the tile, and the others what its warp
/// adds to them.
template <class Sums, int products, int warps_m>
__device__ inline void sum_tile(float (&sums)[Sums::kRows][4 * Sums::kVectors], unsigned char* shared,
                                const Float32Operands<products>& of, int first_row, int first_column, int warp_row,
                                int warp_column, int columns) {
  using Tile = Float32Tile<products, warps_m>;
  const uint32_t buffers = shared_address(shared);
  const auto start = [&](int slot, int step) {
    const uint32_t to = buffers + static_cast<uint32_t>(slot) * Tile::kStageBytes;
    const int from = step * Tile::kStep;
    copy_float32<Sums::kMajorA, Side::kA, Tile::kRows>(to, of.a, first_row, of.m - first_row, from, columns);
#pragma unroll
    for (int i = 0; i < products; ++i) {
      copy_float32<Sums::kMajorB, Side::kB, Tile::kColumns>(to + Tile::kInputBytes + i * Tile::kWeightBytes, of.b[i],
                                                            first_column, of.n - first_column, from, columns);
    }
  };
  const int steps = (columns + Tile::kStep - 1) / Tile::kStep;
#pragma unroll
  for (int slot = 0; slot < Tile::kStages; ++slot) {
    if (slot < steps) start(slot, slot);
    end_copies();
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Sums of_lane(warp_row, warp_column, lane);
  for (int step = 0; step < steps; ++step) {
    wait_for_copies_before<Tile::kStages - 1>();
    __syncthreads();
    const int slot = step % Tile::kStages;
    const unsigned char* const stage = shared + static_cast<uint32_t>(slot) * Tile::kStageBytes;
    of_lane.multiply(sums, stage, stage + Tile::kInputBytes, Tile::kWeightBytes);
    if (step + Tile::kStages < steps) {
      __syncthreads();  // everyone has read the buffer
      start(slot, step + Tile::kStages);
    }
    end_copies();
  }
  if constexpr (!Sums::kInfinitiesAreRight) {
    float zero = 0.f;
#pragma unroll
    for (const auto& of_row : sums) {
#pragma unroll
      for (const float sum : of_row) zero = fmaf(sum, 0.f, zero);
    }
    if (zero != 0.f) {
      float again[Sums::kRows][4 * Sums::kVectors];
      memcpy(again, sums, sizeof(sums));
      sum_again<Sums>(again, of, first_row + warp_row, first_column + warp_column, columns);
      memcpy(sums, again, sizeof(sums));
    }
    // A gate may overwrite the rows of a that it is computed from, which another lane of this warp has just read again.
    __syncwarp();
  }
}

}  // namespace torchops::cuda::gemm
