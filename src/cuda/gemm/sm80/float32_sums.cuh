#pragma once

// Two ways to the sums of products of float32 numbers: FFMAs, and tensor cores that multiply TF32.

#include <cstdint>

#include "cuda/base/shared_address.cuh"
#include "cuda/gemm/mma.cuh"

namespace torchops::cuda::gemm {

constexpr int kFloat32Step = 32;

/// How the tile of an operand lies in shared memory, for kFloat32Step columns of its rows, in pieces of 16 bytes. As in
/// memory: either the columns of a row, or the rows of a column are neighbours. Of lanes that read at once, the former
/// have pieces of the same columns of rows that are 4 apart, and the latter two pieces in each of four columns:
/// neighbours in a, and 4 apart in b.
enum class Major { kColumns, kRows };
enum class Side { kA, kB };

template <Major major, Side side, int rows>
struct Float32Layout {
  /// Of a piece of a row, or of a column.
  __device__ static uint32_t place(int line, int piece) {
    constexpr int spread = side == Side::kA ? 2 : 1;
    return major == Major::kColumns ? static_cast<uint32_t>(line * 128 + (piece ^ line / 4 % 8) * 16)
                                    : static_cast<uint32_t>(line * rows * 4 + (piece ^ line % 4 * spread) * 16);
  }
};

// A warp multiplies 32 rows of a with 64 rows of b: 64 of one product, or 32 of each of two. A lane has kRows rows and
// kVectors vectors of four of the sums' columns, of which the second half belong to the second product.
//   kRows, kVectors
//   kInfinitiesAreRight             if not, sums that are not finite may be NaN instead of infinity or a number
//   row(lane, i), column(lane, v)   where they are, the latter within its product
//   multiply(sums, a, b, second)    adds the products of a step, whose tiles are at a and b, the latter's second
//                                   product `second` bytes further on

/// Every multiplication and addition is an FFMA of its own, so the arithmetic is that of cuBLAS; the order of a sum is
/// that of its columns. A lane has 8 x 8 sums: 16 vectors of shared memory for 256 FFMAs.
template <int products>
class FmaSums {
 public:
  static constexpr int kRows = 8, kVectors = 2;
  static constexpr bool kInfinitiesAreRight = true;
  static constexpr Major kMajorA = Major::kColumns, kMajorB = Major::kColumns;

  __device__ static int row(int lane, int i) { return lane / 8 * 4 + i % 4 + i / 4 * 16; }
  __device__ static int column(int lane, int v) { return lane % 8 * 4 + (products == 1 ? v * 32 : 0); }

  __device__ FmaSums(int warp_row, int warp_column, int lane)
      : a_(static_cast<uint32_t>(warp_row + row(lane, 0)) * 128),
        b_(static_cast<uint32_t>(warp_column + column(lane, 0)) * 128),
        a_lane_(static_cast<uint32_t>(lane) / 8),
        b_lane_(static_cast<uint32_t>(lane) % 8) {}

  __device__ void multiply(float (&sums)[kRows][4 * kVectors], const unsigned char* a, const unsigned char* b,
                           uint32_t second) const {
    constexpr uint32_t second_columns = 32 * 128;
    const uint32_t further = products == 1 ? second_columns : second;
#pragma unroll 1
    for (uint32_t piece = 0; piece < 8; ++piece) {
      float4 weights[8];
      const unsigned char* const of_b = b + b_ + (piece ^ b_lane_) * 16;
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) {
        weights[j] = *reinterpret_cast<const float4*>(of_b + (j % 4) * 128 + j / 4 * further);
      }
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t place = (piece ^ a_lane_ ^ (i / 4 * 4)) * 16;
        const float4 x = *reinterpret_cast<const float4*>(a + a_ + place + (i % 4 + i / 4 * 16) * 128);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x.x, weights[j].x, sums[i][j]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x.y, weights[j].y, sums[i][j]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x.z, weights[j].z, sums[i][j]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x.w, weights[j].w, sums[i][j]);
      }
    }
  }

 private:
  uint32_t a_, b_, a_lane_, b_lane_;
};

/// The sums of split products (see SplitTF32). Rows are distributed so that a lane has neighbours: instruction i of a
/// has the rows 4g + 2i and 4g + 2i + 1 of the warp at g and g + 8, for g < 8, and instruction t of b the rows 4q + t
/// and 4q + t + 16, of 32, at 2q and 2q + 1. So lane 4g + q has the rows 4g, ..., 4g + 3, and the columns 4q, ...,
/// 4q + 3 of each 16. And where rows are neighbours in memory, it reads a piece for all instructions at once.
template <int products, Major major_a, Major major_b, int rows_a, int rows_b>
class SplitSums {
 public:
  static constexpr int kRows = 4, kVectors = 4;
  static constexpr bool kInfinitiesAreRight = false;
  static constexpr Major kMajorA = major_a, kMajorB = major_b;

  __device__ static int row(int lane, int i) { return lane / 4 * 4 + i; }
  __device__ static int column(int lane, int v) { return lane % 4 * 4 + v % (kVectors / products) * 16; }

  __device__ SplitSums(int warp_row, int warp_column, int lane) {
    using LayoutA = Float32Layout<major_a, Side::kA, rows_a>;
    using LayoutB = Float32Layout<major_b, Side::kB, rows_b>;
    // Which of eight rows a lane passes to ldmatrix, and which of a piece's rows it reads.
    const int passes = lane % 8, reads = lane / 4, of_b = passes % 2 * 16 + passes / 2 * 4;
    a_ = major_a == Major::kColumns ? LayoutA::place(warp_row + passes * 4 + lane / 8 % 2, lane / 16)
                                    : LayoutA::place(lane % 4, warp_row / 4 + reads);
    b_ = major_b == Major::kColumns ? LayoutB::place(warp_column + of_b + lane / 16, lane / 8 % 2)
                                    : LayoutB::place(lane % 4, warp_column / 4 + reads % 2 * 4 + reads / 2);
  }

  __device__ void multiply(float (&sums)[kRows][4 * kVectors], const unsigned char* a, const unsigned char* b,
                           uint32_t second) const {
#pragma unroll
    for (uint32_t k16 = 0; k16 < kFloat32Step / 16; ++k16) {
      SplitTF32<4> x[2][2];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        uint32_t words[2][4];
        load_a(words, a, k16 * 2 + h);
        x[0][h].set(words[0]);
        x[1][h].set(words[1]);
      }
#pragma unroll
      for (uint32_t part = 0; part < 2; ++part) {
        constexpr uint32_t columns_on = (major_b == Major::kColumns ? 128 : 4) * 32;
        const unsigned char* const of_part = b + part * (products == 1 ? columns_on : second);
        uint32_t words[2][4][2];
        load_b(words[0], of_part, k16 * 2);
        load_b(words[1], of_part, k16 * 2 + 1);
#pragma unroll
        for (uint32_t t = 0; t < 4; ++t) {
          SplitTF32<2> w[2];
          w[0].set(words[0][t]);
          w[1].set(words[1][t]);
#pragma unroll
          for (uint32_t i = 0; i < 2; ++i) {
            float some[4];
            multiply_split(some, x[i], w);
#pragma unroll
            for (uint32_t at = 0; at < 4; ++at) sums[2 * i + at / 2][(2 * part + at % 2) * 4 + t] += some[at];
          }
        }
      }
    }
  }

 private:
  struct alignas(16) Piece {
    uint32_t at[4];
  };
  __device__ static Piece piece(const unsigned char* at) { return *reinterpret_cast<const Piece*>(at); }
  /// The columns [8 k8, 8 k8 + 8) for both instructions of a.
  __device__ void load_a(uint32_t (&words)[2][4], const unsigned char* a, uint32_t k8) const {
    if constexpr (major_a == Major::kColumns) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) load_matrices(words[i], ((shared_address(a) + a_) ^ (k8 * 32)) + i * 2 * 128);
    } else {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const Piece four = piece(a + a_ + (k8 * 8 + half * 4) * rows_a * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i / 2][i % 2 + 2 * half] = four.at[i];
      }
    }
  }
  /// The same for the four instructions of 32 rows of b.
  __device__ void load_b(uint32_t (&words)[4][2], const unsigned char* b, uint32_t k8) const {
    if constexpr (major_b == Major::kColumns) {
#pragma unroll
      for (uint32_t t = 0; t < 4; t += 2) {
        uint32_t of_two[4];
        load_matrices(of_two, ((shared_address(b) + b_) ^ (k8 * 32)) + t * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[t + i / 2][i % 2] = of_two[i];
      }
    } else {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const Piece four = piece(b + b_ + (k8 * 8 + half * 4) * rows_b * 4);
#pragma unroll
        for (int t = 0; t < 4; ++t) words[t][half] = four.at[t];
      }
    }
  }

  uint32_t a_, b_;
};

}  // namespace torchops::cuda::gemm
