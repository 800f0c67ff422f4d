#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include "cuda/pass.cuh"
#include "cuda/vector.cuh"

// Moves rows of channels, the layout of linear layers, to channels of positions, the layout of a triangle update's
// products, and back: a transposition by tiles in shared memory, each row times a factor.
namespace torchops::cuda {

/// Where row r is within a channel: rows of n positions that begin `padded` apart.
struct Positions {
  int64_t n, padded;

  __device__ int64_t of(int64_t row) const { return row / n * padded + row % n; }
};

template <class T>
struct RowFactors {
  const T* of_row;  // null: none
  Accumulate<T> of_all;

  __device__ Accumulate<T> of(int64_t row) const {
    return of_row == nullptr ? of_all : of_all * static_cast<Accumulate<T>>(of_row[row]);
  }
};

constexpr int kTileThreads = 8;

/// The side of a tile whose rows a warp moves V elements at a time. Its rows in shared memory are padded by V, so that
/// the columns that a warp reads are in different banks.
template <int V>
constexpr int kTile = 32 * V;

/// channels[c][positions.of(r)] = rows[r][c] * factors.of(r).
template <class T, int V>
__global__ void __launch_bounds__(32 * kTileThreads)
    to_channels_kernel(MatrixRows<const T> rows, MatrixRows<T> channels, Positions positions, RowFactors<T> factors,
                       int64_t row_count, int64_t channel_count) {
  __shared__ T tile[kTile<V>][kTile<V> + V];
  const int64_t first_row = int64_t{blockIdx.x} * kTile<V>, first_channel = int64_t{blockIdx.y} * kTile<V>;
  const int lane = static_cast<int>(threadIdx.x) * V;
  for (int i = static_cast<int>(threadIdx.y); i < kTile<V>; i += kTileThreads) {
    const int64_t row = first_row + i, channel = first_channel + lane;
    if (row >= row_count || channel >= channel_count) continue;
    Accumulate<T> values[V];
    unpack(rows.template load<V>(row, channel), values);
    const Accumulate<T> factor = factors.of(row);
#pragma unroll
    for (int j = 0; j < V; ++j) tile[i][lane + j] = static_cast<T>(values[j] * factor);
  }
  __syncthreads();
  const int64_t row = first_row + lane;
  if (row >= row_count) return;
  const int64_t position = positions.of(row);
  for (int i = static_cast<int>(threadIdx.y); i < kTile<V>; i += kTileThreads) {
    const int64_t channel = first_channel + i;
    if (channel >= channel_count) break;
    Packed<T, V> packed;
#pragma unroll
    for (int j = 0; j < V; ++j) packed.at[j] = tile[lane + j][i];
    channels.template store<V>(channel, position, packed);
  }
}

/// rows[r][c] = channels[c][positions.of(r)] * factors.of(r).
template <class T, int V>
__global__ void __launch_bounds__(32 * kTileThreads)
    to_rows_kernel(MatrixRows<const T> channels, MatrixRows<T> rows, Positions positions, RowFactors<T> factors,
                   int64_t row_count, int64_t channel_count) {
  __shared__ T tile[kTile<V>][kTile<V> + V];
  const int64_t first_row = int64_t{blockIdx.x} * kTile<V>, first_channel = int64_t{blockIdx.y} * kTile<V>;
  const int lane = static_cast<int>(threadIdx.x) * V;
  if (first_row + lane < row_count) {
    const int64_t position = positions.of(first_row + lane);
    for (int i = static_cast<int>(threadIdx.y); i < kTile<V>; i += kTileThreads) {
      const int64_t channel = first_channel + i;
      if (channel >= channel_count) break;
      const Packed<T, V> packed = channels.template load<V>(channel, position);
#pragma unroll
      for (int j = 0; j < V; ++j) tile[lane + j][i] = packed.at[j];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.y); i < kTile<V>; i += kTileThreads) {
    const int64_t row = first_row + i, channel = first_channel + lane;
    if (row >= row_count || channel >= channel_count) continue;
    const Accumulate<T> factor = factors.of(row);
    Accumulate<T> values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] = static_cast<Accumulate<T>>(tile[i][lane + j]) * factor;
    rows.template store<V>(row, channel, pack<T, V>(values));
  }
}

template <class T>
struct Transposition {
  at::Tensor rows, channels;  // (rows, channel count) and (channel count, ...), both with unit column stride
  Positions positions;
  RowFactors<T> factors;

  // With V = 2, pairs of rows are neighbours in a channel too.
  bool in_pairs() const {
    return rows.size(1) % 2 == 0 && positions.n % 2 == 0 && positions.padded % 2 == 0 && read_rows<T>(rows).fits(2) &&
           read_rows<T>(channels).fits(2);
  }
  template <class Launch>
  void launch(const Launch& kernel) const {
    if (rows.numel() == 0) return;
    const auto with = [&](auto width) {
      constexpr int tile = kTile<width()>;
      const dim3 grid(static_cast<unsigned>(ceil_div(rows.size(0), int64_t{tile})),
                      static_cast<unsigned>(ceil_div(rows.size(1), int64_t{tile})));
      kernel(width, grid, dim3(32, kTileThreads), at::cuda::getCurrentCUDAStream());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    in_pairs() ? with(std::integral_constant<int, 2>{}) : with(std::integral_constant<int, 1>{});
  }
  void to_channels() const {
    launch([&](auto width, dim3 grid, dim3 block, cudaStream_t stream) {
      to_channels_kernel<T, width()><<<grid, block, 0, stream>>>(read_rows<T>(rows), write_rows<T>(channels), positions,
                                                                 factors, rows.size(0), rows.size(1));
    });
  }
  void to_rows() const {
    launch([&](auto width, dim3 grid, dim3 block, cudaStream_t stream) {
      to_rows_kernel<T, width()><<<grid, block, 0, stream>>>(read_rows<T>(channels), write_rows<T>(rows), positions,
                                                             factors, rows.size(0), rows.size(1));
    });
  }
};

}  // namespace torchops::cuda
