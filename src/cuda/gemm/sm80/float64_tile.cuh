#pragma once

// The sums of a tile of products of float64 matrices, by matrix instructions. A stage of shared memory has 16 columns
// of 64 rows of each operand. No torch.

#include <cstdint>

#include "cuda/gemm/sm80/kernel.cuh"

namespace torchops::cuda::gemm {

constexpr int kFloat64Threads = 128, kFloat64Rows = 64;
constexpr int kFloat64Step = 16, kFloat64RowBytes = kFloat64Step * static_cast<int>(sizeof(double));

/// sums += a (16 x 16) @ b.T (8 x 16). Lane 4g + q has of a the rows g (even elements) and g + 8 (odd ones) and of b
/// the row g, each at the columns q, q + 4, q + 8 and q + 12. Of the sums, it has (g, 2q), (g, 2q + 1), (g + 8, 2q) and
/// (g + 8, 2q + 1). Permuting the columns of both a and b changes nothing but the order of additions.
__device__ inline void multiply_16x8(double (&sums)[4], const double (&a)[8], const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
        "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(sums[i % 2 * 2]), "+d"(sums[i % 2 * 2 + 1])
        : "d"(a[i]), "d"(b[i / 2]));
  }
#endif
}

/// Where a 16-byte piece of a row lies in a stage. The lanes of a quarter warp read four pieces of two successive rows,
/// or write a whole row; either way they use all banks.
__device__ inline int float64_place(int row, int piece) {
  return row * kFloat64RowBytes + (piece ^ (row % 2 * 4)) * 16;
}

/// A thread's part of the copies of 64 rows.
class Float64Copy {
 public:
  __device__ Float64Copy()
      : row_(static_cast<int>(threadIdx.x) / kPieces), piece_(static_cast<int>(threadIdx.x) % kPieces) {}

  /// Starts to copy a step of columns of the rows from `from` on. What does not exist becomes 0.
  __device__ void start(unsigned char* to, const double* from, int64_t stride, int rows_left, int columns_left) const {
    const int valid = min(max(columns_left - 2 * piece_, 0), 2) * static_cast<int>(sizeof(double));
    const double* own = from + row_ * stride + 2 * piece_;
    const uint32_t own_to = shared_address(to + float64_place(row_, piece_));
#pragma unroll
    for (int i = 0; i < kFloat64Rows / kLines; ++i) {
      copy_or_clear<16>(own_to + i * kLines * kFloat64RowBytes, own + i * kLines * stride,
                        row_ + i * kLines < rows_left ? valid : 0);
    }
  }

 private:
  static constexpr int kPieces = kFloat64Step / 2, kLines = kFloat64Threads / kPieces;
  static_assert(kLines % 2 == 0 && kFloat64Rows % kLines == 0);
  int row_, piece_;
};

/// A lane's sums of 32 rows with 64 rows of weights: row group i, its rows 8i + lane / 4, and column group j.
struct Float64Sums {
  static constexpr int kRows = 4, kGroups = 8;  // groups of eight
  double at[kRows / 2][kGroups][4];

  __device__ double of(int i, int j, int in_pair) const { return at[i / 2][j][i % 2 * 2 + in_pair]; }

  __device__ void clear() {
#pragma unroll
    for (auto& of_rows : at) {
#pragma unroll
      for (auto& sums : of_rows) {
#pragma unroll
        for (double& sum : sums) sum = 0;
      }
    }
  }

  /// Adds the products of a step. `a` has the warp's rows; b(j) is where the rows of column group j begin.
  template <class Weights>
  __device__ void add(const unsigned char* a, const Weights& b) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, q = lane % 4;
    const int first = float64_place(g, q), second = float64_place(g, q + 4);
    const auto load = [&](const unsigned char* rows, int half) {
      return *reinterpret_cast<const double2*>(rows + (half == 0 ? first : second));
    };
    double of_a[kRows / 2][8];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const double2 two = load(a + i * 8 * kFloat64RowBytes, half);
        of_a[i / 2][4 * half + i % 2] = two.x;
        of_a[i / 2][4 * half + 2 + i % 2] = two.y;
      }
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const double2 low = load(b(j), 0), high = load(b(j), 1);
      const double of_b[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) multiply_16x8(at[i][j], of_a[i], of_b);
    }
  }
};

}  // namespace torchops::cuda::gemm
