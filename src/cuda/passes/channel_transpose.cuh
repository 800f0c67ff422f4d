#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include <optional>

#include "cuda/base/channel_layout.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/passes/pass.cuh"
#include "cuda/rows/rows.cuh"

// Moves rows of channels, the layout of linear layers, to channels of positions, the layout of a triangle update's
// products, and back: a transposition by tiles in shared memory, which also does the step before or after it.
namespace torchops::cuda {

constexpr int kTileThreads = 8;
// Rows, or channels, that a thread has in flight.
constexpr int kTileBatch = 4;

/// The side of a tile whose rows a warp moves V elements at a time.
template <int V>
constexpr int kTile = 32 * V;

/// Rows as they are.
template <class T, int V>
struct PlainRows {
  MatrixRows<const T> rows;

  using Loaded = Packed<T, V>;

  __device__ Loaded load(int64_t row, int64_t column) const { return rows.template load<V>(row, column); }
  __device__ void values(const Loaded& loaded, Accumulate<T> (&values)[V]) const { unpack(loaded, values); }
};

/// channels[c][positions.of(r)] = rows[r][c] * factors.of(r), where Rows is PlainRows or GluRows (passes/pass.cuh).
template <class T, int V, class Rows>
__global__ void __launch_bounds__(32 * kTileThreads)
    to_channels_kernel(Rows rows, MatrixRows<T> channels, Positions positions, RowFactors<T> factors, int64_t row_count,
                       int64_t channel_count) {
  __shared__ T tile[kTile<V>][kTile<V> + V];  // padded, so that the columns that a warp reads are in different banks
  const int64_t first_row = int64_t{blockIdx.x} * kTile<V>, first_channel = int64_t{blockIdx.y} * kTile<V>;
  const int lane = static_cast<int>(threadIdx.x) * V;
  if (first_channel + lane < channel_count) {
    for (int begin = static_cast<int>(threadIdx.y); begin < kTile<V>; begin += kTileBatch * kTileThreads) {
      typename Rows::Loaded loaded[kTileBatch];
#pragma unroll
      for (int b = 0; b < kTileBatch; ++b) {
        const int64_t row = first_row + begin + b * kTileThreads;
        if (row < row_count) loaded[b] = rows.load(row, first_channel + lane);
      }
#pragma unroll
      for (int b = 0; b < kTileBatch; ++b) {
        const int i = begin + b * kTileThreads;
        if (first_row + i >= row_count) break;
        Accumulate<T> values[V];
        rows.values(loaded[b], values);
        const Accumulate<T> factor = factors.of(first_row + i);
#pragma unroll
        for (int j = 0; j < V; ++j) tile[i][lane + j] = static_cast<T>(values[j] * factor);
      }
    }
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

/// Where a row begins in a tile of kTile<V> * (columns + 1) elements, for a warp that writes V columns of V rows per
/// lane. A gap of V elements after V rows puts these in different banks if V rows are a multiple of 128 bytes.
template <int V>
__device__ inline int tile_row(int row, int columns) {
  return row * columns + row / V * V;
}

/// tile[r][c] = channels[first_channel + c][positions.of(first_row + r)] for the rows of a tile and `count` channels, a
/// multiple of V; `columns` are those of the tile. A thread has V rows. It calls each(values, n) with n <= kBatch
/// groups of V of its channels: values[i][k].at[j] is channel k of group i in row j. Ends without a barrier.
template <int kBatch, class T, int V, class Each>
__device__ inline void load_tile(T* tile, int columns, const MatrixRows<const T>& channels, const Positions& positions,
                                 int64_t first_row, int64_t row_count, int64_t first_channel, int count,
                                 const Each& each) {
  constexpr int step = kTileThreads * V;
  const int lane = static_cast<int>(threadIdx.x) * V;
  if (first_row + lane >= row_count) return;
  int channel = static_cast<int>(threadIdx.y) * V;
  const T* from = channels.data + (first_channel + channel) * channels.stride + positions.of(first_row + lane);
  const auto load_batch = [&](int n) {
    Packed<T, V> values[kBatch][V];
#pragma unroll
    for (int i = 0; i < kBatch; ++i, from += step * channels.stride) {
      if (i >= n) continue;
#pragma unroll
      for (int k = 0; k < V; ++k) values[i][k] = load<T, V>(from + k * channels.stride);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        Packed<T, V> of_row;
#pragma unroll
        for (int k = 0; k < V; ++k) of_row.at[k] = values[i][k].at[j];
        *reinterpret_cast<Packed<T, V>*>(tile + tile_row<V>(lane + j, columns) + channel + i * step) = of_row;
      }
    }
    each(values, n);
  };
  for (; channel + (kBatch - 1) * step < count; channel += kBatch * step) {
    load_batch(kBatch);
  }
  if (channel < count) load_batch((count - channel + step - 1) / step);
}

/// rows[r][c] = channels[c][positions.of(r)] * factors.of(r).
template <class T, int V>
__global__ void __launch_bounds__(32 * kTileThreads)
    to_rows_kernel(MatrixRows<const T> channels, MatrixRows<T> rows, Positions positions, RowFactors<T> factors,
                   int64_t row_count, int64_t channel_count) {
  __shared__ __align__(kVectorBytes) T tile[kTile<V> * (kTile<V> + 1)];
  const int64_t first_row = int64_t{blockIdx.x} * kTile<V>, first_channel = int64_t{blockIdx.y} * kTile<V>;
  const int lane = static_cast<int>(threadIdx.x) * V;
  load_tile<kTileBatch, T, V>(tile, kTile<V>, channels, positions, first_row, row_count, first_channel,
                              static_cast<int>(min(int64_t{kTile<V>}, channel_count - first_channel)),
                              [](const auto&, int) {});
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.y); i < kTile<V>; i += kTileThreads) {
    const int64_t row = first_row + i, channel = first_channel + lane;
    if (row >= row_count || channel >= channel_count) continue;
    const Accumulate<T> factor = factors.of(row);
    Accumulate<T> values[V];
    unpack(*reinterpret_cast<const Packed<T, V>*>(tile + tile_row<V>(i, kTile<V>) + lane), values);
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] *= factor;
    rows.template store<V>(row, channel, pack<T, V>(values));
  }
}

/// The shared memory of a tile that has all channels of its positions.
template <class T, int V>
constexpr int64_t tile_bytes(int64_t channel_count) {
  return kTile<V> * (channel_count + 1) * static_cast<int64_t>(sizeof(T));
}
/// The shared memory of the moments of a tile's rows, which each warp has of its own channels.
template <class T, int V>
constexpr int64_t moment_bytes = 2 * kTileThreads * kTile<V> * static_cast<int64_t>(sizeof(Accumulate<T>));

/// The number of elements, their mean, and the sum of their squared distances from it.
template <class A>
struct Spread {
  A count, mean, squares;
};

/// Chan, Golub and LeVeque 1983.
template <class A>
__device__ inline Spread<A> pooled(const Spread<A>& a, const Spread<A>& b) {
  const A count = a.count + b.count, part = b.count / count, difference = b.mean - a.mean;
  return {count, a.mean + difference * part, a.squares + b.squares + difference * difference * a.count * part};
}

/// rows[r] = the layer norm of channels[:][positions.of(r)]. A tile has all channels of its positions. Each thread
/// measures its channels of V positions while it holds them, around their own mean. Then a warp puts together what all
/// warps found for its rows, and writes these. weight and bias may be null.
template <class T, class P, int V>
__global__ void __launch_bounds__(32 * kTileThreads, sizeof(T) == 8 ? 2 : 4)
    to_normalized_rows_kernel(MatrixRows<const T> channels, MatrixRows<T> rows, Positions positions, const P* weight,
                              const P* bias, Accumulate<T> eps, int64_t row_count, int channel_count) {
  using Sum = Accumulate<T>;
  constexpr int kBatch = 16 / V, kRows = kTile<V> / kTileThreads;
  extern __shared__ __align__(kVectorBytes) unsigned char whole_tile[];
  __shared__ Sum means[kTileThreads][kTile<V>], squares[kTileThreads][kTile<V>];
  T* const tile = reinterpret_cast<T*>(whole_tile);
  const int64_t first_row = int64_t{blockIdx.x} * kTile<V>;
  const int lane = static_cast<int>(threadIdx.x) * V, warp = static_cast<int>(threadIdx.y);
  Spread<Sum> own[V] = {};
  load_tile<kBatch, T, V>(
      tile, channel_count, channels, positions, first_row, row_count, 0, channel_count,
      [&](const Packed<T, V>(&values)[kBatch][V], int n) {
        const auto for_each = [&](const auto& f) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (i >= n) continue;
#pragma unroll
            for (int k = 0; k < V; ++k) {
              Sum of_rows[V];
              unpack(values[i][k], of_rows);
#pragma unroll
              for (int j = 0; j < V; ++j) f(j, of_rows[j]);
            }
          }
        };
        Spread<Sum> batch[V] = {};
        for_each([&](int j, Sum value) { batch[j].mean += value; });
#pragma unroll
        for (auto& of_row : batch) {
          of_row.count = static_cast<Sum>(n * V);
          of_row.mean /= of_row.count;
        }
        Sum rest[V] = {};  // what rounding has left in the differences, so that a constant row becomes 0
        for_each([&](int j, Sum value) {
          const Sum difference = value - batch[j].mean;
          rest[j] += difference;
          batch[j].squares += difference * difference;
        });
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const Sum by = rest[j] / batch[j].count;
          batch[j].mean += by;
          batch[j].squares -= rest[j] * by;
          own[j] = own[j].count == 0 ? batch[j] : pooled(own[j], batch[j]);
        }
      });
#pragma unroll
  for (int j = 0; j < V; ++j) {
    means[warp][lane + j] = own[j].mean;
    squares[warp][lane + j] = own[j].squares;
  }
  __syncthreads();

  // Lane r, and others, have the moments of the warp's row r.
  const int first = warp * kRows, of_lane = first + static_cast<int>(threadIdx.x) % kRows;
  const auto for_each_warp = [&](const auto& f) {
#pragma unroll
    for (int other = 0; other < kTileThreads; ++other) {
      const int left = channel_count - other * V;
      if (left > 0) f(other, static_cast<Sum>((left + kTileThreads * V - 1) / (kTileThreads * V) * V));
    }
  };
  // Around the mean of one warp, so that the sum rounds less.
  const Sum near = means[0][of_lane];
  Sum rest = 0, sum = 0;
  for_each_warp([&](int other, Sum count) { rest += count * (means[other][of_lane] - near); });
  const Sum mean = near + rest / static_cast<Sum>(channel_count);
  for_each_warp([&](int other, Sum count) {
    const Sum distance = means[other][of_lane] - mean;
    sum += squares[other][of_lane] + count * distance * distance;
  });
  const Sum rstd = rsqrt((sum > 0 ? sum : 0) / static_cast<Sum>(channel_count) + eps);
  Sum mean_of[kRows], rstd_of[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mean_of[r] = __shfl_sync(0xffffffffu, mean, r);
    rstd_of[r] = __shfl_sync(0xffffffffu, rstd, r);
  }
  const int64_t left = row_count - first_row - first;
  for (int channel = lane; channel < channel_count; channel += kTile<V>) {
    Sum w[V], b[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      w[j] = weight == nullptr ? Sum{1} : static_cast<Sum>(weight[channel + j]);
      b[j] = bias == nullptr ? Sum{0} : static_cast<Sum>(bias[channel + j]);
    }
    T* to = rows.data + (first_row + first) * rows.stride + channel;
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += rows.stride) {
      Sum values[V];
      unpack(*reinterpret_cast<const Packed<T, V>*>(tile + tile_row<V>(first + r, channel_count) + channel), values);
#pragma unroll
      for (int j = 0; j < V; ++j) values[j] = (values[j] - mean_of[r]) * rstd_of[r] * w[j] + b[j];
      if (r < left) store(to, pack<T, V>(values));
    }
  }
}

/// Some positions of channels: (channel count, positions), with unit column stride, and the factors of the positions.
template <class T>
struct ChannelPanel {
  at::Tensor channels;
  Positions positions;
  RowFactors<T> factors;

  void from_rows(const at::Tensor& rows) const {
    launch(rows, rows, [&](auto width, dim3 grid, dim3 block, cudaStream_t stream) {
      const PlainRows<T, width()> source{read_rows<T>(rows)};
      to_channels_kernel<T, width()>
          <<<grid, block, 0, stream>>>(source, write_rows<T>(channels), positions, factors, rows.size(0), rows.size(1));
    });
  }
  /// The rows value * sigmoid(gate), without storing them.
  void from_gated_rows(const at::Tensor& value, const at::Tensor& gate) const {
    launch(value, gate, [&](auto width, dim3 grid, dim3 block, cudaStream_t stream) {
      const GluRows<Sigmoid, T, width()> source{read_rows<T>(value), read_rows<T>(gate)};
      to_channels_kernel<T, width()><<<grid, block, 0, stream>>>(source, write_rows<T>(channels), positions, factors,
                                                                 value.size(0), value.size(1));
    });
  }
  void to_rows(const at::Tensor& rows) const {
    launch(rows, rows, [&](auto width, dim3 grid, dim3 block, cudaStream_t stream) {
      to_rows_kernel<T, width()><<<grid, block, 0, stream>>>(read_rows<T>(channels), write_rows<T>(rows), positions,
                                                             factors, rows.size(0), rows.size(1));
    });
  }
  /// The layer norm of the rows. Its parameters are contiguous, and both of T or, if T has 16 bits, both float32.
  /// Returns false, with nothing done, if a tile of the rows does not fit in shared memory.
  bool to_normalized_rows(const at::Tensor& rows, const std::optional<at::Tensor>& weight,
                          const std::optional<at::Tensor>& bias, double eps) const {
    const auto& either = weight ? weight : bias;
    if constexpr (sizeof(T) == 2) {
      if (either && either->scalar_type() == at::kFloat) return to_normalized_rows_by<float>(rows, weight, bias, eps);
    }
    return to_normalized_rows_by<T>(rows, weight, bias, eps);
  }

 private:
  template <class P>
  bool to_normalized_rows_by(const at::Tensor& rows, const std::optional<at::Tensor>& weight,
                             const std::optional<at::Tensor>& bias, double eps) const {
    constexpr int64_t most_bytes = 48 << 10;
    const int64_t channel_count = rows.size(1);
    const auto run = [&](auto width, cudaStream_t stream) {
      const auto pointer = [](const std::optional<at::Tensor>& t) { return t ? t->const_data_ptr<P>() : nullptr; };
      const auto grid = static_cast<unsigned>(ceil_div(rows.size(0), int64_t{kTile<width()>}));
      to_normalized_rows_kernel<T, P, width()>
          <<<grid, dim3(32, kTileThreads), static_cast<size_t>(tile_bytes<T, width()>(channel_count)), stream>>>(
              read_rows<T>(channels), write_rows<T>(rows), positions, pointer(weight), pointer(bias),
              static_cast<Accumulate<T>>(eps), rows.size(0), static_cast<int>(channel_count));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    if (tile_bytes<T, 1>(channel_count) + moment_bytes<T, 1> > most_bytes) return false;
    if (rows.numel() == 0) return true;
    const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    if (in_pairs(rows, rows) && tile_bytes<T, 2>(channel_count) + moment_bytes<T, 2> <= most_bytes) {
      run(std::integral_constant<int, 2>{}, stream);
    } else {
      run(std::integral_constant<int, 1>{}, stream);
    }
    return true;
  }

  // With V = 2, pairs of rows are neighbours in a channel too.
  bool in_pairs(const at::Tensor& rows, const at::Tensor& others) const {
    return rows.size(1) % 2 == 0 && positions.n % 2 == 0 && positions.padded % 2 == 0 && read_rows<T>(rows).fits(2) &&
           read_rows<T>(others).fits(2) && read_rows<T>(channels).fits(2);
  }
  template <class Launch>
  void launch(const at::Tensor& rows, const at::Tensor& others, const Launch& kernel) const {
    if (rows.numel() == 0) return;
    const auto with = [&](auto width) {
      constexpr int tile = kTile<width()>;
      const dim3 grid(static_cast<unsigned>(ceil_div(rows.size(0), int64_t{tile})),
                      static_cast<unsigned>(ceil_div(rows.size(1), int64_t{tile})));
      kernel(width, grid, dim3(32, kTileThreads), at::cuda::getCurrentCUDAStream());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    in_pairs(rows, others) ? with(std::integral_constant<int, 2>{}) : with(std::integral_constant<int, 1>{});
  }
};

}  // namespace torchops::cuda
