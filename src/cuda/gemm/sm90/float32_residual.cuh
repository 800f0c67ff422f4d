#pragma once

// Adds a float32 residual to products of 16 bits: a thread adds to its part of an accumulator's rows in registers. Of
// each 8 columns, four neighbouring threads have a pair each, together 32 bytes, which memory moves at once.

#include <cutlass/array.h>
#include <cutlass/cutlass.h>

#include "cuda/gemm/problem.h"

namespace torchops::cuda::gemm {

/// Rows of float32, or a batch of them, in memory: what is added to, and where the sum goes, which may be the same.
struct Float32Residual {
  const float* from = nullptr;
  float* to = nullptr;
  int64_t from_row_stride = 0, from_stride = 0, to_row_stride = 0, to_stride = 0;

  Float32Residual() = default;
  Float32Residual(const Operand& from, const Operand& to)
      : from(static_cast<const float*>(from.data)),
        to(static_cast<float*>(const_cast<void*>(to.data))),
        from_row_stride(from.row_stride),
        from_stride(from.batch_stride),
        to_row_stride(to.row_stride),
        to_stride(to.batch_stride) {}

  /// Prefetches the first `columns` of a row to the second-level cache; called by `threads` threads.
  CUTLASS_DEVICE void prefetch(int64_t row, int columns, int thread, int threads) const {
    constexpr int line = 128 / sizeof(float);
    for (int column = thread * line; column < columns; column += threads * line) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + row * from_row_stride + column));
    }
  }
};

/// A thread's pairs of one row, 8 columns apart.
template <int pairs>
struct Float32ResidualRow {
  float2 old[pairs];
  float* to;
  int left;  // columns of the row, from the first pair on

  /// Loads the pairs from `column` on, in a row of `columns` columns.
  CUTLASS_DEVICE void load(const Float32Residual& rows, int64_t of_batch, int64_t row, int column, int columns) {
    const float* const from = rows.from + of_batch * rows.from_stride + row * rows.from_row_stride + column;
    to = rows.to + of_batch * rows.to_stride + row * rows.to_row_stride + column;
    left = columns - column;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < pairs; ++i) {
      if (8 * i < left) old[i] = *reinterpret_cast<const float2*>(from + 8 * i);
    }
  }
  CUTLASS_DEVICE void add(int i, const cutlass::Array<float, 2>& values) const {
    if (8 * i < left) *reinterpret_cast<float2*>(to + 8 * i) = {old[i].x + values[0], old[i].y + values[1]};
  }
};

}  // namespace torchops::cuda::gemm
