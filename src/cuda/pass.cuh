#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/activation.cuh"
#include "cuda/vector.cuh"

// An elementwise pass over matrices of which each column has values of its own (a bias), as the step after a product.
namespace torchops::cuda {

constexpr int kPassBlock = 256;
// Rows that a thread has in flight: as many independent loads cover the latency of memory.
constexpr int kPassRows = 4;

/// Calls `pass` on N columns at a time. A thread keeps to its columns, so what belongs to them is read once:
///   Pass::Columns columns(int64_t column)                 for kPassRows rows
///   Pass::Loaded load(int64_t row, int64_t column)
///   void finish(int64_t row, int64_t column, const Loaded&, const Columns&)
template <int N, class Pass>
__global__ void __launch_bounds__(kPassBlock) pass_kernel(Pass pass, int64_t rows, int64_t columns) {
  const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * N;
  if (column >= columns) return;
  const auto of_column = pass.columns(column);
  const int64_t first = int64_t{blockIdx.x} * blockDim.y * kPassRows + threadIdx.y;
  typename Pass::Loaded loaded[kPassRows];
#pragma unroll
  for (int i = 0; i < kPassRows; ++i) {
    const int64_t row = first + int64_t{i} * blockDim.y;
    if (row < rows) loaded[i] = pass.load(row, column);
  }
#pragma unroll
  for (int i = 0; i < kPassRows; ++i) {
    const int64_t row = first + int64_t{i} * blockDim.y;
    if (row < rows) pass.finish(row, column, loaded[i], of_column);
  }
}

template <int N, class Pass>
void launch_pass(const Pass& pass, int64_t rows, int64_t columns) {
  const int64_t vectors = ceil_div(columns, N);
  unsigned width = 1;
  while (width < kPassBlock && width < vectors) width *= 2;
  const dim3 block(width, kPassBlock / width);
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, int64_t{block.y} * kPassRows)),
                  static_cast<unsigned>(ceil_div(vectors, width)));
  pass_kernel<N><<<grid, block, 0, at::cuda::getCurrentCUDAStream()>>>(pass, rows, columns);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// A matrix whose rows are `stride` elements apart and have their columns side by side.
template <class T>
struct Rows {
  T* data;
  int64_t stride;

  template <int N>
  __device__ Packed<std::remove_const_t<T>, N> load(int64_t row, int64_t column) const {
    return cuda::load<std::remove_const_t<T>, N>(data + row * stride + column);
  }
  template <int N>
  __device__ void store(int64_t row, int64_t column, const Packed<T, N>& values) const {
    cuda::store<T, N>(data + row * stride + column, values);
  }
  /// Whether all rows begin where vectors of N elements may.
  bool fits(int64_t n) const {
    return stride % n == 0 && reinterpret_cast<uintptr_t>(data) % (n * static_cast<int64_t>(sizeof(T))) == 0;
  }
};

template <class T>
Rows<const T> read_rows(const at::Tensor& t) {
  return {t.const_data_ptr<T>(), t.stride(0)};
}
template <class T>
Rows<T> write_rows(const at::Tensor& t) {
  return {t.mutable_data_ptr<T>(), t.stride(0)};
}

/// The sum of a product and the bias of its columns, null for none, in float32 or float64.
template <class T, int N>
struct Biases {
  Accumulate<T> of[N];

  __device__ Biases(const T* bias, int64_t column) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      of[i] = bias == nullptr ? Accumulate<T>{0} : static_cast<Accumulate<T>>(bias[column + i]);
  }
  __device__ void add_to(const Packed<T, N>& product, Accumulate<T> (&sums)[N]) const {
    unpack(product, sums);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += of[i];
  }
};

/// F(z) and its derivative, as exact as elements of type T need.
template <class F, class T, class A>
__device__ inline A activate(A z, A& slope) {
  if constexpr (sizeof(T) == 2) {
    return F::template with_slope<Exactness::kFast>(F::kScale * z, slope);
  } else {
    const A y = F::value(z);
    slope = F::backward(A{1}, z, y);
    return y;
  }
}

}  // namespace torchops::cuda
