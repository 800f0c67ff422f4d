#pragma once

#include <cstdint>

// The last step of sums over rows that many blocks have shared. No torch headers.
namespace torchops::cuda {

/// Sums over the `rows` rows of partial, which are `pitch` apart and have `columns` floats or doubles, rounded to T:
/// the first `split` columns go to `first`, the others to `second`; if one of these is null, those sums are dropped. A
/// block of kColumns x kRows threads makes kColumns * kVector sums, always in the same order. columns, split and pitch
/// are multiples of kVector. Blocks with blockIdx.y > 0 do the same for the next rows, and write the next results.
template <class T, class Sum, int kVector, int kColumns, int kRows>
__global__ void __launch_bounds__(kColumns* kRows)
    column_sum_kernel(const Sum* __restrict__ partial, T* __restrict__ first, T* __restrict__ second, int64_t rows,
                      int64_t split, int64_t columns, int64_t pitch, int64_t rows_of_block) {
  struct alignas(sizeof(Sum) * kVector) Vector {
    Sum at[kVector];
    __device__ void add(const Vector& other) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) at[v] += other.at[v];
    }
  };
  __shared__ Vector shared[kRows][kColumns];
  const int64_t column = (int64_t{blockIdx.x} * kColumns + threadIdx.x) * kVector;
  const int64_t begin = blockIdx.y * rows_of_block, end = begin + rows_of_block < rows ? begin + rows_of_block : rows;
  Vector sum{};
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.y; row < end; row += kRows) {
      sum.add(*reinterpret_cast<const Vector*>(partial + row * pitch + column));
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int row = 1; row < kRows; ++row) sum.add(shared[row][threadIdx.x]);
  T* to = column < split ? first : second;
  if (to == nullptr) return;
  to += blockIdx.y * split;
#pragma unroll
  for (int v = 0; v < kVector; ++v) to[(column < split ? column : column - split) + v] = static_cast<T>(sum.at[v]);
}

/// Launches the kernel; the caller checks for errors.
template <class T, class Sum, int kVector, int kColumns, int kRows>
void launch_column_sum(const Sum* partial, T* first, T* second, int64_t rows, int64_t split, int64_t columns,
                       int64_t pitch, cudaStream_t stream) {
  constexpr int64_t width = int64_t{kColumns} * kVector;
  column_sum_kernel<T, Sum, kVector, kColumns, kRows>
      <<<static_cast<unsigned>((columns + width - 1) / width), dim3(kColumns, kRows), 0, stream>>>(
          partial, first, second, rows, split, columns, pitch, rows);
}

/// The same for so many rows that one block per group of columns would take long: first computes the sums of at most
/// `most_pieces` pieces, for which partial, whose rows have no gaps, has room after its rows. The pieces depend only on
/// the number of rows.
template <class T>
void launch_column_sum_in_pieces(float* partial, T* first, T* second, int64_t rows, int64_t split, int64_t columns,
                                 int64_t most_pieces, cudaStream_t stream) {
  constexpr int kVector = 4, kColumns = 32, kRows = 16;
  constexpr int64_t width = kColumns * kVector;
  const int64_t rows_of_piece = (rows + most_pieces - 1) / most_pieces;
  const int64_t pieces = (rows + rows_of_piece - 1) / rows_of_piece;
  float* const sums = partial + rows * columns;
  const dim3 blocks(static_cast<unsigned>((columns + width - 1) / width), static_cast<unsigned>(pieces));
  column_sum_kernel<float, float, kVector, kColumns, kRows><<<blocks, dim3(kColumns, kRows), 0, stream>>>(
      partial, sums, nullptr, rows, columns, columns, columns, rows_of_piece);
  launch_column_sum<T, float, kVector, kColumns, kRows>(sums, first, second, pieces, split, columns, columns, stream);
}

}  // namespace torchops::cuda
