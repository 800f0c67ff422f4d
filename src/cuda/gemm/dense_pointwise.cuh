#pragma once

// The two passes over memory around dense's products: the epilogue of products that cuBLAS made, and the start of the
// gradient. Neither depends on the architecture.

#include "cuda/vector.cuh"

namespace torchops::cuda {

/// float32 and float64 with ATen's formula, so that a float64 result has the bits of sigmoid(linear).
template <class T>
__device__ Accumulate<T> sigmoid_of(Accumulate<T> x) {
  if constexpr (sizeof(T) == 2) {
    return fast_sigmoid(x);
  } else {
    return 1 / (1 + exp(-x));
  }
}

constexpr int kPassThreads = 128;

/// y = sigmoid(y + bias) in place, for `elements` elements in rows of `columns`; bias may be null. y is 16-byte
/// aligned. With `bias_in_vectors`, so is bias, and columns is a multiple of kVectorSize. Each thread has `batch`
/// vectors, as many loads in flight; `column_step` is the distance between them, kPassThreads vectors, modulo columns.
template <class T, bool bias_in_vectors, int batch>
__global__ void __launch_bounds__(kPassThreads)
    bias_sigmoid_kernel(T* __restrict__ y, const T* __restrict__ bias, int64_t elements, int64_t columns,
                        int64_t column_step) {
  using Access = Packed<T, kVectorSize<T>>;
  using Wide = Accumulate<T>;
  constexpr int64_t step = kPassThreads * kVectorSize<T>;
  const int64_t first = int64_t{blockIdx.x} * batch * step + int64_t{threadIdx.x} * kVectorSize<T>;
  // All indices of `access` are constants after unrolling: a variable one would move it to local memory.
  Access access[batch];
#pragma unroll
  for (int b = 0; b < batch; ++b) {
    const int64_t i = first + b * step;
    if (i + kVectorSize<T> <= elements) {
      access[b] = *reinterpret_cast<const Access*>(y + i);
    } else {
#pragma unroll
      for (int v = 0; v < kVectorSize<T>; ++v) access[b].at[v] = i + v < elements ? y[i + v] : T(0);
    }
  }
  int64_t column = bias != nullptr ? first % columns : 0;
#pragma unroll
  for (int b = 0; b < batch; ++b) {
    const int64_t i = first + b * step;
    Access offsets{};
    if (bias != nullptr) {
      if constexpr (bias_in_vectors) {
        offsets = *reinterpret_cast<const Access*>(bias + column);
      } else {
        int64_t c = column;
#pragma unroll
        for (int v = 0; v < kVectorSize<T>; ++v) {
          offsets.at[v] = bias[c];
          if (++c == columns) c = 0;
        }
      }
      column += column_step;
      if (column >= columns) column -= columns;
    }
#pragma unroll
    for (int v = 0; v < kVectorSize<T>; ++v) {
      access[b].at[v] =
          static_cast<T>(sigmoid_of<T>(static_cast<Wide>(access[b].at[v]) + static_cast<Wide>(offsets.at[v])));
    }
    if (i + kVectorSize<T> <= elements) {
      *reinterpret_cast<Access*>(y + i) = access[b];
    } else {
#pragma unroll
      for (int v = 0; v < kVectorSize<T>; ++v) {
        if (i + v < elements) y[i + v] = access[b].at[v];
      }
    }
  }
}

constexpr int kBackwardThreads = 256;

/// dz = grad * y * (1 - y), and in partial[blockIdx.y] the column sums of this block's rows. A block's threads are
/// `width` columns (of `count` elements each) by kBackwardThreads / width rows. Adds in an order that only the shape
/// determines.
template <class T, int count>
__global__ void __launch_bounds__(kBackwardThreads)
    gate_backward_kernel(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ dz,
                         Accumulate<T>* __restrict__ partial, int64_t rows, int64_t columns, int64_t rows_per_block,
                         int width) {
  using Access = Packed<T, count>;
  using Wide = Accumulate<T>;
  const int height = kBackwardThreads / width, tx = threadIdx.x % width, ty = threadIdx.x / width;
  const int64_t column = (int64_t{blockIdx.x} * width + tx) * count;
  const bool active = ty < height && column < columns;
  Wide sums[count] = {};
  if (active) {
    const int64_t begin = int64_t{blockIdx.y} * rows_per_block;
    const int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;
    // Several independent loads in flight cover the latency of memory.
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
          const Wide sigmoid = static_cast<Wide>(s[i].at[v]);
          const Wide product = static_cast<Wide>(g[i].at[v]) * sigmoid * (Wide{1} - sigmoid);
          sums[v] += product;
          out.at[v] = static_cast<T>(product);
        }
        *reinterpret_cast<Access*>(dz + (row + int64_t{i} * height) * columns + column) = out;
      }
    }
  }
  __shared__ Wide shared[kBackwardThreads * count];
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

constexpr int kSumColumns = 32, kSumRows = 32;

/// db = the sum of partial (rows x columns) over its rows, by blocks of kSumColumns x kSumRows threads.
template <class T>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_rows_kernel(const Accumulate<T>* __restrict__ partial, T* __restrict__ db, int64_t rows, int64_t columns) {
  using Wide = Accumulate<T>;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  Wide sum{};
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < rows; row += kSumRows) sum += partial[row * columns + column];
  }
  __shared__ Wide shared[kSumRows][kSumColumns];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int other = 1; other < kSumRows; ++other) sum += shared[other][threadIdx.x];
  db[column] = static_cast<T>(sum);
}

}  // namespace torchops::cuda
