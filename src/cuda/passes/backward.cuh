#pragma once

// The first step of the gradient of a linear layer with an activation, on any architecture.

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <tuple>

#include "cuda/base/column_sum.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/linear/operand.h"

namespace torchops::cuda::gemm {

constexpr int kBackwardThreads = 256;

/// dz = F::backward(grad, y), and in partial[blockIdx.y] the column sums of this block's rows; either may be null. The
/// threads of a block are `width` columns (of `count` elements each) by kBackwardThreads / width rows. The order of the
/// additions depends only on the shape.
template <class F, class T, int count>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_pass_kernel(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ dz,
                         Accumulate<T>* __restrict__ partial, int64_t rows, int64_t columns, int64_t rows_per_block,
                         int width) {
  using Access = Packed<T, count>;
  using Sum = Accumulate<T>;
  static_assert(F::kFromOutput);
  const int height = kBackwardThreads / width, tx = threadIdx.x % width, ty = threadIdx.x / width;
  const int64_t column = (int64_t{blockIdx.x} * width + tx) * count;
  const bool active = ty < height && column < columns;
  Sum sums[count] = {};
  if (active) {
    const int64_t begin = int64_t{blockIdx.y} * rows_per_block;
    const int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;
    // Several independent loads in flight hide the latency of memory.
    constexpr int batch = 4;
    for (int64_t row = begin + ty; row < end; row += int64_t{batch} * height) {
      Access g[batch], s[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int64_t at = (row + int64_t{i} * height) * columns + column;
        if (row + int64_t{i} * height < end) {
          g[i] = *reinterpret_cast<const Access*>(grad + at);
          s[i] = *reinterpret_cast<const Access*>(y + at);
        }
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (row + int64_t{i} * height >= end) break;
        Access out;
#pragma unroll
        for (int v = 0; v < count; ++v) {
          const Sum value = F::backward(static_cast<Sum>(g[i].at[v]), Sum{0}, static_cast<Sum>(s[i].at[v]));
          sums[v] += value;
          out.at[v] = static_cast<T>(value);
        }
        if (dz != nullptr) *reinterpret_cast<Access*>(dz + (row + int64_t{i} * height) * columns + column) = out;
      }
    }
  }
  if (partial == nullptr) return;
  __shared__ Sum shared[kBackwardThreads * count];
#pragma unroll
  for (int v = 0; v < count; ++v) shared[threadIdx.x * count + v] = sums[v];
  __syncthreads();
  if (!active || ty != 0) return;
  for (int other = 1; other < height; ++other) {
#pragma unroll
    for (int v = 0; v < count; ++v) sums[v] += shared[(other * width + tx) * count + v];
  }
#pragma unroll
  for (int v = 0; v < count; ++v) partial[int64_t{blockIdx.y} * columns + column + v] = sums[v];
}

/// How backward_pass_kernel divides a matrix. Depends only on the shape, and so does the order of the additions.
struct BackwardGrid {
  int width;
  int64_t column_blocks, row_blocks, rows_per_block;

  BackwardGrid(int64_t rows, int64_t columns, int vector) {
    const int64_t vectors = ceil_div(columns, vector);
    column_blocks = ceil_div(vectors, kBackwardThreads);
    width = static_cast<int>(ceil_div(vectors, column_blocks));
    // About eight blocks for each multiprocessor of a large chip, unless that leaves a thread fewer than 16 rows.
    constexpr int64_t most_blocks = 1056;
    const int64_t height = kBackwardThreads / width;
    rows_per_block = std::max(ceil_div(rows, ceil_div(most_blocks, column_blocks)), 16 * height);
    row_blocks = ceil_div(rows, rows_per_block);
  }
};

/// (dz, dz summed over the rows before it is rounded) for the cotangent grad of the output y of F; empty what is not
/// wanted. dz is contiguous.
template <class F>
std::tuple<at::Tensor, at::Tensor> backward_pass(const at::Tensor& grad, const at::Tensor& y, bool dz_wanted,
                                                 bool sum_wanted) {
  const int64_t columns = y.size(-1);
  const at::Tensor dz = at::detail::empty_cuda(dz_wanted ? y.sizes() : at::IntArrayRef({0}), y.options());
  if (y.numel() == 0) return {dz, at::zeros({sum_wanted ? columns : 0}, y.options())};
  const at::Tensor db = at::detail::empty_cuda({sum_wanted ? columns : 0}, y.options());
  const int64_t rows = y.numel() / columns;
  const at::Tensor g = grad.contiguous(), s = y.contiguous();
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "backward_pass", [&] {
    using Sum = Accumulate<scalar_t>;
    const bool in_vectors =
        columns % kVectorSize<scalar_t> == 0 && is_aligned(g.const_data_ptr()) && is_aligned(s.const_data_ptr());
    const BackwardGrid grid(rows, columns, in_vectors ? kVectorSize<scalar_t> : 1);
    const at::Tensor partial = at::detail::empty_cuda({sum_wanted ? grid.row_blocks : 0, columns},
                                                      y.options().dtype(c10::CppTypeToScalarType<Sum>::value));
    Sum* const sums = sum_wanted ? partial.mutable_data_ptr<Sum>() : nullptr;
    const auto kernel =
        in_vectors ? backward_pass_kernel<F, scalar_t, kVectorSize<scalar_t>> : backward_pass_kernel<F, scalar_t, 1>;
    const dim3 blocks(static_cast<unsigned>(grid.column_blocks), static_cast<unsigned>(grid.row_blocks));
    kernel<<<blocks, kBackwardThreads, 0, stream>>>(g.const_data_ptr<scalar_t>(), s.const_data_ptr<scalar_t>(),
                                                    dz_wanted ? dz.mutable_data_ptr<scalar_t>() : nullptr, sums, rows,
                                                    columns, grid.rows_per_block, grid.width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (!sum_wanted) return;
    launch_column_sum<scalar_t, Sum, 1, 32, 32>(sums, db.mutable_data_ptr<scalar_t>(), nullptr, grid.row_blocks,
                                                columns, columns, columns, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {dz, db};
}

}  // namespace torchops::cuda::gemm
