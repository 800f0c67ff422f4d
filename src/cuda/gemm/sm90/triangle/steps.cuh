#pragma once

// Shared by both steps of a triangle update: TMA tiles of a matrix of positions, and layer norms of tiles in shared
// memory.

#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>

#include "cuda/gemm/norm_vector.cuh"
#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm90/pointwise.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"

namespace torchops::cuda::gemm {

/// Tiles of rows x columns from planes of a tensor: like TileMap, with a third dimension.
template <class Copy, class Element, int rows, int columns>
struct PlaneMap {
  using Value = Element;
  using Planes = cute::Layout<cute::Shape<int, int, int>, cute::Stride<int64_t, cute::_1, int64_t>>;
  using Global = decltype(cute::make_tensor(cute::make_gmem_ptr(static_cast<Element*>(nullptr)), Planes{}));
  using Tile = SwizzledRows<Element, rows, columns>;
  using Map = decltype(cute::make_tma_copy(Copy{}, std::declval<Global>(), Tile{}));
  Map map;
  int height, width, planes;

  static PlaneMap of(const Operand& from, int height, int width, int planes) {
    using namespace cute;
    auto* const elements = static_cast<Element*>(const_cast<void*>(from.data));  // one type for both directions
    const auto strides = make_stride(from.row_stride, _1{}, from.batch_stride);
    const auto tensor = make_tensor(make_gmem_ptr(elements), make_layout(make_shape(height, width, planes), strides));
    return {make_tma_copy(Copy{}, tensor, Tile{}), height, width, planes};
  }

  CUTLASS_DEVICE auto tile(int row, int column, int plane) const {
    using namespace cute;
    const Tensor all = map.get_tma_tensor(make_shape(height, width, planes));
    return local_tile(all(_, _, plane), Shape<Int<rows>, Int<columns>>{}, make_coord(row, column));
  }
  CUTLASS_DEVICE void load(Element* shared, int row, int column, int plane,
                           cutlass::arch::ClusterTransactionBarrier& barrier) const {
    using namespace cute;
    const auto slice = map.get_slice(0);
    copy(map.with(reinterpret_cast<uint64_t&>(barrier)), slice.partition_S(tile(row, column, plane)),
         slice.partition_D(make_tensor(make_smem_ptr(shared), Tile{})));
  }
  /// From memory to the second-level cache.
  CUTLASS_DEVICE void prefetch(int row, int column, int plane) const {
    cute::prefetch(map, map.get_slice(0).partition_S(tile(row, column, plane)));
  }
  CUTLASS_DEVICE void store(Element* shared, int row, int column, int plane) const {
    using namespace cute;
    const auto slice = map.get_slice(0);
    copy(map, slice.partition_S(make_tensor(make_smem_ptr(shared), Tile{})),
         slice.partition_D(tile(row, column, plane)));
    tma_store_arrive();
  }
};

constexpr int kPairRows = 64;  // positions of a tile: one row of matrix instructions, and 128 bytes of a channel

// A layer norm whose rows only go into a product needs no pass of its own: with its weight folded into the matrix, w' =
// w times the norm's weight, and s = the sums of w' over its rows,
//   norm(x) @ w.T + b = rstd * (x @ w'.T - mean * s) + (w @ norm's bias + b).
// So the products use x as it is, while the same threads compute its moments. Rounding w' takes the place of rounding
// norm(x), as eager mode does.

/// Mean and rstd of rows, in the form that products use: value = scale * product + shift * s + bias.
struct Moments {
  float scale[2], shift[2];  // for the two rows of a thread's accumulators

  CUTLASS_DEVICE void set(int i, float origin, float sum, float squares, int count, float eps) {
    const float by = 1.f / static_cast<float>(count), mean = sum * by;
    const float variance = fmaxf(fmaf(squares, by, -mean * mean), 0.f);
    scale[i] = rsqrtf(variance + eps);
    shift[i] = -(origin + mean) * scale[i];
  }
};

/// Where 8 elements are in rows of 128 bytes as TMA writes them: boxes of 64 columns, pieces permuted by the row.
template <int rows>
CUTLASS_DEVICE int swizzled_piece(int row, int column) {
  return column / 64 * (rows * 64) + row * 64 + ((column % 64 / 8) ^ (row % 8)) * 8;
}

/// The moments of rows with `features` of kK columns. The four threads that share a row in the accumulators share it
/// here; the two rows of a load phase begin with different pieces, so that eight threads have no bank conflicts. Sums
/// are of differences to the first element, so that little cancels.
template <class Element, int kK>
CUTLASS_DEVICE Moments row_moments(const Element* tile, int features, float eps) {
  const int thread = threadIdx.x % 128, lane = thread % 32, quarter = lane % 4;
  const cutlass::NumericArrayConverter<float, Element, 8> widen;
  Moments moments;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * i;
    const float origin = static_cast<float>(tile[swizzled_piece<kPairRows>(row, 0)]);
    float sums[4] = {}, squares[4] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kK / 32; ++j) {
      const int column = j / 2 * 64 + ((j + row) % 2 * 4 + quarter) * 8;
      if (column >= features) continue;
      const auto values =
          widen(*reinterpret_cast<const cutlass::Array<Element, 8>*>(tile + swizzled_piece<kPairRows>(row, column)));
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 8; ++v) {
        const float difference = values[v] - origin;
        sums[v % 4] += difference;
        squares[v % 4] = fmaf(difference, difference, squares[v % 4]);
      }
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float square = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 1; step < 4; step *= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      square += __shfl_xor_sync(~0u, square, step);
    }
    moments.set(i, origin, sum, square, features, eps);
  }
  return moments;
}

/// The moments over channels of 64 positions, for a tile with kChannels rows of positions. A warp reads the 128 bytes
/// of a channel at once, two positions per thread; the warps divide the channels and combine sums in `partial`.
template <class Element, int kChannels, class Sync>
CUTLASS_DEVICE Moments channel_moments(const Element* tile, float2 (&partial)[4][kPairRows], int channels, float eps,
                                       const Sync& sync) {
  constexpr int of_warp = kChannels / 4;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  using Pair = cutlass::Array<Element, 2>;
  const cutlass::NumericArrayConverter<float, Element, 2> widen;
  const auto pair_of = [&](int channel) {
    return widen(
        *reinterpret_cast<const Pair*>(tile + swizzled_piece<kChannels>(channel, lane / 4 * 8) + lane % 4 * 2));
  };
  const auto origin = pair_of(0);
  float sums[2][2] = {}, squares[2][2] = {};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < of_warp; ++i) {
    const int channel = warp * of_warp + i;
    if (channel >= channels) break;
    const auto values = pair_of(channel);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 2; ++v) {
      const float difference = values[v] - origin[v];
      sums[i % 2][v] += difference;
      squares[i % 2][v] = fmaf(difference, difference, squares[i % 2][v]);
    }
  }
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < 2; ++v) {
    partial[warp][2 * lane + v] = make_float2(sums[0][v] + sums[1][v], squares[0][v] + squares[1][v]);
  }
  sync();
  Moments moments;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int position = warp * 16 + lane / 4 + 8 * i;
    float2 sum = make_float2(0.f, 0.f);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      sum.x += partial[j][position].x;
      sum.y += partial[j][position].y;
    }
    const float first = static_cast<float>(tile[swizzled_piece<kChannels>(0, position) + position % 8]);
    moments.set(i, first, sum.x, sum.y, channels, eps);
  }
  return moments;
}

/// What is added to the product of a column: `sum`, the sum of w', times shift; and `bias`.
struct ColumnTerms {
  float sum, bias;
};

// Of a product at a time: the fewer registers its sums take, the more tiles a multiprocessor has in flight.
constexpr int kPairColumns = 64;

/// A layer norm's weight and bias, in shared memory.
template <int kK>
struct alignas(16) NormVectors {
  float weight[kK], bias[kK];

  /// Called by `threads` threads. Null means ones for the weight, zeros for the bias.
  template <class Element>
  CUTLASS_DEVICE void load(const NormValues<Element>& weights, const NormValues<Element>& biases, int count,
                           int threads) {
    for (int i = static_cast<int>(threadIdx.x); i < kK; i += threads) {
      weight[i] = i >= count ? 0.f : weights.at(i, 1.f);
      bias[i] = i >= count ? 0.f : biases.at(i, 0.f);
    }
  }
};

/// Folds a layer norm into a row of a weight in shared memory, a tile of `rows` x kK; returns the terms, times `scale`,
/// of the column that this row makes. `bias` is null or that of the column.
template <int rows, class Element, int kK>
CUTLASS_DEVICE ColumnTerms fold_norm(Element* w, int row, const NormVectors<kK>& norm, const Element* bias,
                                     float scale) {
  using Piece = cutlass::Array<Element, 8>;
  const cutlass::NumericArrayConverter<float, Element, 8> widen;
  const cutlass::NumericArrayConverter<Element, float, 8> round;
  float sums[2] = {}, shifts[2] = {};
  CUTLASS_PRAGMA_UNROLL
  for (int column = 0; column < kK; column += 8) {
    auto& piece = *reinterpret_cast<Piece*>(w + swizzled_piece<rows>(row, column));
    auto values = widen(piece);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 8; ++v) {
      shifts[v % 2] = fmaf(values[v], norm.bias[column + v], shifts[v % 2]);
      values[v] *= norm.weight[column + v];
    }
    piece = round(values);
    values = widen(piece);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 8; ++v) sums[v % 2] += values[v];
  }
  const float shift = shifts[0] + shifts[1] + (bias == nullptr ? 0.f : static_cast<float>(*bias));
  return {scale * (sums[0] + sums[1]), scale * shift};
}

/// Barriers among the threads of one warpgroup, and among all that compute.
CUTLASS_DEVICE void sync_warpgroup(int warpgroup) { cutlass::arch::NamedBarrier::sync(128, warpgroup); }
template <int computing>
CUTLASS_DEVICE void sync_computing() {
  cutlass::arch::NamedBarrier::sync(128 * computing, computing);
}

/// Tiles of kPairRows of the n positions of each of `rows` rows.
struct PairTiles {
  int n, rows;

  CUTLASS_HOST_DEVICE int in_row() const { return (n + kPairRows - 1) / kPairRows; }
  CUTLASS_HOST_DEVICE int64_t count() const { return int64_t{rows} * in_row(); }
  CUTLASS_DEVICE int row(int64_t tile) const { return static_cast<int>(tile / in_row()); }
  CUTLASS_DEVICE int place_in_row(int64_t tile) const { return static_cast<int>(tile % in_row()); }
};

}  // namespace torchops::cuda::gemm
