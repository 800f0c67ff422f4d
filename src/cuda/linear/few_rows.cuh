#pragma once

// y = F(x @ w.T + bias) for a few rows of x. Nearly all of the time goes into reading w once, so the kernel is built
// for that: no tiles, no pipeline; each lane loads 16 bytes of w directly into the registers of the matrix instruction.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include <cstdint>

#include "cuda/base/activation.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/gemm/mma.cuh"
#include "cuda/gemm/problem.h"

namespace torchops::cuda::gemm {

/// A block computes kFewRowsColumns columns of y; its warps split k.
constexpr int kFewRowsColumns = 16, kFewRowsWarps = 8;

/// y = F(x @ w.T + bias) for at most 8 * row_groups rows of 16-bit elements; bias may be null. x, w and their rows are
/// 16-byte aligned; k is a multiple of 8. A warp takes every kFewRowsWarps-th chunk of 32 along k, of which a lane has
/// 8, in one load. The sums of the warps are added in order, so the bits don't depend on timing.
template <class F, class T, int row_groups>
__global__ void __launch_bounds__(32 * kFewRowsWarps)
    few_rows_kernel(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias, T* __restrict__ y,
                    int rows, int columns, int k, int64_t x_stride, int64_t w_stride) {
  static_assert(sizeof(T) == 2);
  constexpr int chunk = 32, batch = row_groups > 2 ? 2 : 4;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, part = lane % 4 * 8;
  const int first_column = static_cast<int>(blockIdx.x) * kFewRowsColumns;
  // Past the last row or column, the last one is computed again and dropped.
  const T* const w_rows[2] = {w + min(first_column + group, columns - 1) * w_stride + part,
                              w + min(first_column + group + 8, columns - 1) * w_stride + part};
  const T* x_rows[row_groups];
#pragma unroll
  for (int r = 0; r < row_groups; ++r) x_rows[r] = x + min(r * 8 + group, rows - 1) * x_stride + part;
  float sums[row_groups][4] = {};
  for (int begin = warp * chunk; begin < k; begin += kFewRowsWarps * chunk * batch) {
    uint4 from_w[batch][2], from_x[batch][row_groups];
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      const int at = begin + b * kFewRowsWarps * chunk;
      const bool inside = at + part < k;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        from_w[b][i] = inside ? __ldcs(reinterpret_cast<const uint4*>(w_rows[i] + at)) : uint4{};
      }
#pragma unroll
      for (int r = 0; r < row_groups; ++r) {
        from_x[b][r] = inside ? *reinterpret_cast<const uint4*>(x_rows[r] + at) : uint4{};
      }
    }
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      const uint4 &low = from_w[b][0], &high = from_w[b][1];
#pragma unroll
      for (int r = 0; r < row_groups; ++r) {
        const uint4& row = from_x[b][r];
        // Which columns these are doesn't matter as long as both operands agree: here, two neighbouring pairs.
        multiply_16x8<T>(sums[r], {low.x, high.x, low.y, high.y}, {row.x, row.y});
        multiply_16x8<T>(sums[r], {low.z, high.z, low.w, high.w}, {row.z, row.w});
      }
    }
  }
  // Of the 16 x 8 sums, the lane has (g, 2q), (g, 2q + 1), (g + 8, 2q) and (g + 8, 2q + 1).
  __shared__ float shared[kFewRowsWarps][row_groups * 8][kFewRowsColumns];
#pragma unroll
  for (int r = 0; r < row_groups; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[warp][r * 8 + lane % 4 * 2 + i % 2][group + i / 2 * 8] = sums[r][i];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < row_groups * 8 * kFewRowsColumns; i += 32 * kFewRowsWarps) {
    const int row = i / kFewRowsColumns, column = i % kFewRowsColumns;
    if (row >= rows || first_column + column >= columns) continue;
    float sum = bias != nullptr ? static_cast<float>(bias[first_column + column]) : 0.f;
#pragma unroll
    for (int other = 0; other < kFewRowsWarps; ++other) sum += shared[other][row][column];
    y[int64_t{row} * columns + first_column + column] = static_cast<T>(activate<F, T>(sum));
  }
}

template <class F, class T>
void launch_few_rows(const Problem& p) {
  const auto kernel = p.m > 8 ? few_rows_kernel<F, T, 2> : few_rows_kernel<F, T, 1>;
  kernel<<<static_cast<unsigned>(ceil_div(p.n, kFewRowsColumns)), 32 * kFewRowsWarps, 0,
           at::cuda::getCurrentCUDAStream()>>>(
      static_cast<const T*>(p.a.data), static_cast<const T*>(p.b.data), static_cast<const T*>(p.bias),
      static_cast<T*>(const_cast<void*>(p.d.data)), p.m, p.n, p.k, p.a.row_stride, p.b.row_stride);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// d = F(a @ b.T + bias), with contiguous d of any alignment. Up to 16 rows, it takes hardly longer than reading b.
/// With more, cuBLAS is faster, because here every block reads all of a. Returns false, with nothing done, if it cannot
/// run.
template <class F>
bool run_few_rows(const Problem& p, at::ScalarType dtype) {
  if (p.m > 16 || p.k % 8 != 0 || p.batch > 1) return false;
  if (dtype == at::kBFloat16) {
    launch_few_rows<F, c10::BFloat16>(p);
  } else if (dtype == at::kHalf) {
    launch_few_rows<F, c10::Half>(p);
  } else {
    return false;
  }
  return true;
}

}  // namespace torchops::cuda::gemm
