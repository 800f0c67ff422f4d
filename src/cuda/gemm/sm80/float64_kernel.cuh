#pragma once

// A gated linear unit in float64, on compute capability 8.0 and 9.0, whose matrix instructions take float64.

#include <cstdint>

#include "cuda/base/channel_layout.cuh"
#include "cuda/gemm/sm80/float64_tile.cuh"

namespace torchops::cuda::gemm {

constexpr int kFloat64Stages = 4, kFloat64Ctas = 2;
constexpr int kFloat64OperandBytes = kFloat64Rows * kFloat64RowBytes;
constexpr int kFloat64StageBytes = 3 * kFloat64OperandBytes;
constexpr int kFloat64SharedBytes = kFloat64Stages * kFloat64StageBytes;

/// Stores a value if it is `wanted`, without a branch. Behind one, the compiler would compute the value there too, and
/// a thread one value after the other.
__device__ inline void store_if(bool wanted, double* to, double value) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %0, 0;\n@wanted st.global.f64 [%1], %2;\n}" ::"r"(
                   static_cast<int>(wanted)),
               "l"(to), "d"(value)
               : "memory");
}

/// (x @ w.T + b) * F(x @ w2.T + b2) with channels first; p.d is not written. Rows of operands are aligned to 16 bytes,
/// and n is even.
///
/// A warp has 32 x 32 of both products. A CTA takes tiles of 64 rows in turn, always with the same 64 rows of each
/// weight, and copies what it reads next while it computes and writes. The grid has a multiple of p.tiles_n CTAs, and
/// at most one per tile. Two on a multiprocessor fill each other's gaps: while one applies F, the other multiplies.
template <class F>
__global__ void __launch_bounds__(kFloat64Threads, kFloat64Ctas)
    glu_to_channels_float64_kernel(const Sm80Arguments<double, 2> p, const ChannelRows<double> to) {
  constexpr int groups = Float64Sums::kGroups / 2, warp_columns = 8 * groups;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp % 2 * 32, warp_column = warp / 2 * warp_columns;
  const int first_tile = static_cast<int>(blockIdx.x) / p.tiles_n, workers = static_cast<int>(gridDim.x) / p.tiles_n;
  const int first_column = static_cast<int>(blockIdx.x) % p.tiles_n * kFloat64Rows;
  const int tiles = (p.m + kFloat64Rows - 1) / kFloat64Rows, steps = (p.k + kFloat64Step - 1) / kFloat64Step;

  const Float64Copy copy;
  int next_tile = first_tile, next_step = 0, next_slot = 0;
  const auto start_next = [&] {
    if (next_tile < tiles) {
      unsigned char* const stage = shared + next_slot * kFloat64StageBytes;
      const int from = next_step * kFloat64Step, left = p.k - from, first_row = next_tile * kFloat64Rows;
      copy.start(stage, p.a + first_row * p.a_stride + from, p.a_stride, p.m - first_row, left);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        copy.start(stage + (1 + i) * kFloat64OperandBytes, p.b[i] + first_column * p.b_stride[i] + from, p.b_stride[i],
                   p.n - first_column, left);
      }
      if (++next_step == steps) {
        next_step = 0;
        next_tile += workers;
      }
      next_slot = next_slot + 1 == kFloat64Stages ? 0 : next_slot + 1;
    }
    end_copies();
  };
#pragma unroll 1
  for (int i = 0; i < kFloat64Stages - 1; ++i) start_next();

  int slot = 0;
  for (int tile = first_tile; tile < tiles; tile += workers) {
    Float64Sums sums;
    sums.clear();
    for (int step = 0; step < steps; ++step) {
      wait_for_copies_before<kFloat64Stages - 2>();
      __syncthreads();
      start_next();  // where everyone has read what the step before multiplied
      const unsigned char* const stage = shared + slot * kFloat64StageBytes;
      const unsigned char* const weights = stage + kFloat64OperandBytes + warp_column * kFloat64RowBytes;
      sums.add(stage + warp_row * kFloat64RowBytes,
               [&](int j) { return weights + j / groups * kFloat64OperandBytes + j % groups * 8 * kFloat64RowBytes; });
      slot = slot + 1 == kFloat64Stages ? 0 : slot + 1;
    }

    const int row = tile * kFloat64Rows + warp_row + lane / 4;
    const auto exists = [&](int i) { return row + 8 * i < p.m; };
    double factors[Float64Sums::kRows];
    int64_t places[Float64Sums::kRows];
#pragma unroll
    for (int i = 0; i < Float64Sums::kRows; ++i) {
      factors[i] = exists(i) ? to.factors.of(row + 8 * i) : 0;
      places[i] = to.positions.of_int(row + 8 * i);
    }
#pragma unroll
    for (int j = 0; j < groups; ++j) {
      const int column = first_column + warp_column + lane % 4 * 2 + 8 * j;
      if (column >= p.n) continue;
      double results[Float64Sums::kRows][2];
#pragma unroll
      for (int in_pair = 0; in_pair < 2; ++in_pair) {
        double bias[2];
#pragma unroll
        for (int of = 0; of < 2; ++of) bias[of] = p.bias[of] != nullptr ? p.bias[of][column + in_pair] : 0;
#pragma unroll
        for (int i = 0; i < Float64Sums::kRows; ++i) {
          const double value = sums.of(i, j, in_pair) + bias[0];
          const double gate = F::without_branches(sums.of(i, groups + j, in_pair) + bias[1]);
          results[i][in_pair] = value * gate * factors[i];
        }
      }
      double* const channel = to.data + column * to.channel_stride;
#pragma unroll
      for (int i = 0; i < Float64Sums::kRows; ++i) {
#pragma unroll
        for (int in_pair = 0; in_pair < 2; ++in_pair) {
          store_if(exists(i), channel + in_pair * to.channel_stride + places[i], results[i][in_pair]);
        }
      }
    }
  }
}

}  // namespace torchops::cuda::gemm
