#pragma once

// Shared by the one-pass gradients of weights and biases: sums that stay in registers for all tiles of a CTA and are
// written once, for launch_column_sum() to add.

#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "cuda/base/column_sum.cuh"
#include "cuda/gemm/problem.h"
#include "cuda/gemm/sm90/skeleton/cutlass.cuh"

namespace torchops::cuda::gemm {

/// Sums `columns` over the eight lanes of a warp that have the same columns of other rows; returns the sum of column
/// lane / 4. Lanes exchange halves of what they have, so that nothing is added twice.
CUTLASS_DEVICE float sum_of_warp(float (&columns)[8]) {
  const int lane = threadIdx.x % 32;
  int count = 8;
  CUTLASS_PRAGMA_UNROLL
  for (int distance = 16; distance >= 4; distance /= 2) {
    count /= 2;
    const bool upper = (lane & distance) != 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      const float sent = upper ? columns[i] : columns[i + count];
      const float kept = upper ? columns[i + count] : columns[i];
      columns[i] = kept + __shfl_xor_sync(~0u, sent, distance);
    }
  }
  return columns[0];
}

/// Writes the accumulators of a product, as far as they are within rows x columns, to a matrix without gaps.
template <class Product, class Sums>
CUTLASS_DEVICE void write_weight_sums(const Product& product, const Sums& sums, int thread, float* to, int rows,
                                      int columns) {
  const cute::Tensor places = product.get_slice(thread).partition_C(cute::make_identity_tensor(
      cute::Shape<decltype(cute::tile_size<0>(product)), decltype(cute::tile_size<1>(product))>{}));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(sums); i += 2) {
    const auto [row, column] = places(i);
    if (row < rows && column < columns) {
      *reinterpret_cast<float2*>(to + int64_t{row} * columns + column) = make_float2(sums(i), sums(i + 1));
    }
  }
}

/// Writes the sums of the first `count` of kN columns, which kDivision warpgroups divide. A thread has the results of
/// sum_of_warp() for groups of 8 of its columns: pairs 8 columns apart, in the accumulators. The four warps of a
/// warpgroup have the same columns of other rows, and combine them in `scratch`, 4 x kN. sync() is a barrier of all.
template <int kN, int kDivision, int kSums, class Sync>
CUTLASS_DEVICE void write_column_sums(const float (&sums)[kSums], int thread, float* scratch, float* to, int count,
                                      const Sync& sync) {
  const int warp = thread % 128 / 32, lane = thread % 32;
  sync();
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSums; ++i) {
    const int column = 8 * i + lane / 4;
    const int in_tile = thread / 128 * (kN / kDivision) + column / 2 * 8 + lane % 4 * 2 + column % 2;
    scratch[warp * kN + in_tile] = sums[i];
  }
  sync();
  for (int i = thread; i < count; i += 128 * kDivision) {
    float sum = 0.f;
    for (int other = 0; other < 4; ++other) sum += scratch[other * kN + i];
    to[i] = sum;
  }
}

/// How many sums a product has, those of its weight and then of its bias.
inline int64_t columns_of_sums(const GradientProblem& p) { return int64_t{p.n} * p.k + p.n; }

/// Adds rows of the sums of all products, which the workspace has, to gradients of type To.
template <class To, int products>
Status add_up(const GradientProblem& p, int64_t rows, cudaStream_t stream) {
  for (int i = 0; i < products; ++i) {
    launch_column_sum<To, float, 4, 32, 16>(static_cast<const float*>(p.workspace) + i * columns_of_sums(p),
                                            static_cast<To*>(i == 0 ? p.dw : p.dw2),
                                            static_cast<To*>(i == 0 ? p.dbias : p.dbias2), rows, int64_t{p.n} * p.k,
                                            columns_of_sums(p), products * columns_of_sums(p), stream);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
  }
  return {};
}

}  // namespace torchops::cuda::gemm
