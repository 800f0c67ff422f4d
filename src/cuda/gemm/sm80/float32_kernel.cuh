#pragma once

// y = f(x @ w.T) in float32, whose operands aren't rounded to TF32.

#include <cstdint>

#include "cuda/base/channel_layout.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm80/float32_tile.cuh"

namespace torchops::cuda::gemm {

/// Four neighbouring rows, of which `left` exist.
struct RowsOfChannels {
  float factors[4];
  int64_t places[4];

  __device__ RowsOfChannels(const ChannelRows<float>& channels, int64_t first, int left) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factors[i] = i < left ? channels.factors.of(first + i) : 0.f;
      places[i] = channels.positions.of(first + i);
    }
  }
};

/// What is in channels instead of rows: nothing, the output, or the cotangent.
enum class InChannels { kNothing, kOutput, kCotangent };

/// Sums by FFMAs, or of split products.
template <bool splits, int products, int warps_m>
struct RuleSums {
  using Type = FmaSums<products>;
};
template <int products, int warps_m>
struct RuleSums<true, products, warps_m> {
  using Tile = Float32Tile<products, warps_m>;
  using Type = SplitSums<products, Major::kColumns, Major::kColumns, Tile::kRows, Tile::kColumns>;
};

/// Rows of operands and output, and of positions, are aligned to 16 bytes, and n is a multiple of 4. What is in
/// channels is not in p.
template <class Rule, bool splits, int warps_m, InChannels in_channels>
__global__ void __launch_bounds__(kSm80Threads, 2)
    sm80_float32_kernel(const Sm80Arguments<float, Rule::kProducts> p, const ChannelRows<float> channels) {
  constexpr int products = Rule::kProducts;
  using Tile = Float32Tile<products, warps_m>;
  using Sums = typename RuleSums<splits, products, warps_m>::Type;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first_row = static_cast<int>(blockIdx.x) / p.tiles_n * Tile::kRows;
  const int first_column = static_cast<int>(blockIdx.x) % p.tiles_n * Tile::kColumns;
  const int warp_row = warp % warps_m * 32, warp_column = warp / warps_m * Tile::kWarpColumns;
  Float32Operands<products> of{.a = {p.a, p.a_stride}, .b = {}, .m = p.m, .n = p.n};
#pragma unroll
  for (int i = 0; i < products; ++i) of.b[i] = {p.b[i], p.b_stride[i]};
  float sums[Sums::kRows][4 * Sums::kVectors] = {};
  sum_tile<Sums, products, warps_m>(sums, shared, of, first_row, first_column, warp_row, warp_column, p.k);

  const int row = first_row + warp_row, column = first_column + warp_column;
  constexpr Exactness exact = Exactness::kExact;
  constexpr int parts = Sums::kVectors / products;
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    const int to = column + Sums::column(lane, part);
    if (to >= p.n) continue;
    float bias[products][4];
#pragma unroll
    for (int i = 0; i < products; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) bias[i][j] = p.bias[i] != nullptr ? p.bias[i][to + j] : 0.f;
    }
    const auto z = [&](int product, int i, int j) {
      return sums[i][(product * parts + part) * 4 + j] + bias[product][j];
    };
    if constexpr (in_channels == InChannels::kOutput) {
      static_assert(products == 2);
#pragma unroll
      for (int four = 0; four < Sums::kRows; four += 4) {
        const int first = row + Sums::row(lane, four), left = p.m - first;
        if (left <= 0) continue;
        const RowsOfChannels rows(channels, first, left);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Packed<float, 4> values;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            values.at[i] = Rule::template value<exact>(z(0, four + i, j), z(1, four + i, j), 0.f) * rows.factors[i];
          }
          float* const of_channel = channels.data + (to + j) * channels.channel_stride;
          if (channels.positions.n % 4 == 0) {
            store<float, 4>(of_channel + rows.places[0], values);
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (i < left) of_channel[rows.places[i]] = values.at[i];
            }
          }
        }
      }
    } else {
      [[maybe_unused]] Packed<float, 4> of_channels[4];  // cotangents of four rows
#pragma unroll
      for (int i = 0; i < Sums::kRows; ++i) {
        const int64_t at = row + Sums::row(lane, i);
        if (at >= p.m) continue;
        if constexpr (in_channels == InChannels::kCotangent) {
          if (i % 4 == 0) {
            const int left = static_cast<int>(p.m - at);
            const RowsOfChannels rows(channels, at, left);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float* const of_channel = channels.data + (to + j) * channels.channel_stride;
              Packed<float, 4>& values = of_channels[j];
              if (channels.positions.n % 4 == 0) {
                values = load<float, 4>(of_channel + rows.places[0]);
              } else {
#pragma unroll
                for (int k = 0; k < 4; ++k) values.at[k] = k < left ? of_channel[rows.places[k]] : 0.f;
              }
#pragma unroll
              for (int k = 0; k < 4; ++k) values.at[k] *= rows.factors[k];
            }
          }
        }
        float c[4] = {}, result[4];
        [[maybe_unused]] float g[4] = {}, other[4];
        if constexpr (Rule::kReadsC) unpack(load<float, 4>(p.c + at * p.c_stride + to), c);
        if constexpr (in_channels == InChannels::kCotangent) {
#pragma unroll
          for (int j = 0; j < 4; ++j) g[j] = of_channels[j].at[i % 4];
        } else if constexpr (kMakesCotangents<Rule>) {
          unpack(load<float, 4>(p.g + at * p.g_stride + to), g);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float first = z(0, i, j), second = z(products - 1, i, j);
          if constexpr (kMakesCotangents<Rule>) {
            Rule::template backward<exact>(g[j], first, second, c[j], p.c_is_y, result[j], other[j]);
          } else {
            result[j] = Rule::template value<exact>(first, second, c[j]);
          }
        }
        store<float, 4>(p.d + at * p.d_stride + to, pack<float, 4>(result));
        if constexpr (kMakesCotangents<Rule>) {
          if (p.d2 != nullptr) store<float, 4>(p.d2 + at * p.d2_stride + to, pack<float, 4>(other));
        }
      }
    }
  }
}

}  // namespace torchops::cuda::gemm
