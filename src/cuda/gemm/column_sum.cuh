#pragma once

#include <cstdint>

// The last step of sums over rows that many blocks share. No torch headers.
namespace torchops::cuda {

/// The sums over `rows` rows of partial, `pitch` apart, of `columns` floats or doubles each, rounded to T: the first
/// `split` columns go to `first`, the others to `second`; where one of these is null, nowhere. A block of kColumns x
/// kRows threads makes kColumns * kVector of them, always in the same order. Columns, split and pitch are multiples of
/// kVector.
template <class T, class Wide, int kVector, int kColumns, int kRows>
__global__ void __launch_bounds__(kColumns* kRows)
    column_sum_kernel(const Wide* __restrict__ partial, T* __restrict__ first, T* __restrict__ second, int64_t rows,
                      int64_t split, int64_t columns, int64_t pitch) {
  struct alignas(sizeof(Wide) * kVector) Vector {
    Wide at[kVector];
    __device__ void add(const Vector& other) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) at[v] += other.at[v];
    }
  };
  __shared__ Vector shared[kRows][kColumns];
  const int64_t column = (int64_t{blockIdx.x} * kColumns + threadIdx.x) * kVector;
  Vector sum{};
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < rows; row += kRows) {
      sum.add(*reinterpret_cast<const Vector*>(partial + row * pitch + column));
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int row = 1; row < kRows; ++row) sum.add(shared[row][threadIdx.x]);
  T* const to = column < split ? first : second;
  if (to == nullptr) return;
#pragma unroll
  for (int v = 0; v < kVector; ++v) to[(column < split ? column : column - split) + v] = static_cast<T>(sum.at[v]);
}

/// Launches it; the caller looks for the error.
template <class T, class Wide, int kVector, int kColumns, int kRows>
void launch_column_sum(const Wide* partial, T* first, T* second, int64_t rows, int64_t split, int64_t columns,
                       int64_t pitch, cudaStream_t stream) {
  constexpr int64_t width = int64_t{kColumns} * kVector;
  column_sum_kernel<T, Wide, kVector, kColumns, kRows>
      <<<static_cast<unsigned>((columns + width - 1) / width), dim3(kColumns, kRows), 0, stream>>>(
          partial, first, second, rows, split, columns, pitch);
}

}  // namespace torchops::cuda
