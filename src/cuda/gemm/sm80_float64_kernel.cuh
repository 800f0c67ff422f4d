#pragma once

// y = f(x @ w.T) in float64, on compute capability 8.0 and 9.0, whose matrix instructions take float64.

#include <cstdint>

#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm80_float64_tile.cuh"
#include "cuda/positions.cuh"
#include "cuda/vector.cuh"

namespace torchops::cuda::gemm {

/// Where outputs go that have channels first: those of a row to its position in the matrix of their channel, times the
/// factor of the row.
struct Float64Channels {
  double* data;
  int64_t channel_stride;
  Positions positions;
  RowFactors<double> factors;
};

/// A CTA has the same 128 rows of weights for all its tiles: 128 columns of the output, or 64 of both products. Each of
/// its units of warps takes tiles of rows in turn, and copies what it reads next while it computes and writes, so units
/// only meet at the weights. With `resident` weights, those stay in shared memory. A unit has two warps along the
/// columns and warps_m along the rows.
template <int units, int warps_m, bool resident, int stages>
struct Float64Tiling {
  static constexpr int kUnits = units, kWarpsM = warps_m, kStages = stages;
  static constexpr bool kResident = resident;
  static constexpr int kUnitThreads = 2 * warps_m * 32, kThreads = units * kUnitThreads, kCtas = 256 / kThreads;
  static constexpr int kRows = 32 * warps_m, kWeightRows = 128, kMostSteps = 8,
                       kMostResident = kMostSteps * kFloat64Step;
  static constexpr int kInputBytes = kRows * kFloat64RowBytes, kWeightBytes = kWeightRows * kFloat64RowBytes;
  static constexpr int kStageBytes = kInputBytes + (resident ? 0 : kWeightBytes);
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = units * kRingBytes + (resident ? kMostSteps * kWeightBytes : 0);
  static_assert(resident || units == 1);
};

/// Rows of operands and output are aligned to 16 bytes, and n is even. The grid has a multiple of p.tiles_n CTAs. With
/// `to_channels`, p.d is not written.
template <class Rule, class Tile, bool to_channels, int depth = 16>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas)
    sm80_float64_kernel(const Sm80Arguments<double, Rule::kProducts> p, const Float64Channels channels) {
  constexpr int products = Rule::kProducts, tile_columns = Tile::kWeightRows / products;
  constexpr int groups = Float64Sums::kGroups / products, warp_columns = 8 * groups;
  extern __shared__ __align__(128) unsigned char shared[];
  const int thread = static_cast<int>(threadIdx.x), unit = thread / Tile::kUnitThreads;
  const int lane = thread % 32, warp = thread / 32 % (2 * Tile::kWarpsM);
  const int warp_row = warp % Tile::kWarpsM * 32, warp_column = warp / Tile::kWarpsM * warp_columns;
  const int workers = static_cast<int>(gridDim.x) / p.tiles_n * Tile::kUnits;
  const int first_tile = static_cast<int>(blockIdx.x) / p.tiles_n * Tile::kUnits + unit;
  const int tiles = (p.m + Tile::kRows - 1) / Tile::kRows, steps = (p.k + kFloat64Step - 1) / kFloat64Step;
  const int first_column = static_cast<int>(blockIdx.x) % p.tiles_n * tile_columns;

  unsigned char* const ring =
      shared + (Tile::kResident ? Tile::kMostSteps * Tile::kWeightBytes : 0) + unit * Tile::kRingBytes;
  const auto address = [](const unsigned char* to) { return static_cast<uint32_t>(__cvta_generic_to_shared(to)); };
  const auto weights_at = [&](int slot, int step) {
    return Tile::kResident ? shared + step * Tile::kWeightBytes : ring + slot * Tile::kStageBytes + Tile::kInputBytes;
  };
  const Float64Copy<Tile::kRows, Tile::kUnitThreads> copy_a(thread % Tile::kUnitThreads);
  const Float64Copy<tile_columns, Tile::kThreads> copy_b(thread);
  // A unit takes part in the first tile's copies of weights even if it has no rows.
  int next_tile = first_tile, next_step = 0, next_slot = 0;
  const auto start_next = [&] {
    if (next_tile < tiles || next_tile == first_tile) {
      const int from = next_step * kFloat64Step, left = p.k - from, first_row = next_tile * Tile::kRows;
      copy_a.start(address(ring + next_slot * Tile::kStageBytes), p.a + first_row * p.a_stride + from, p.a_stride,
                   p.m - first_row, left);
      if (!Tile::kResident || next_tile == first_tile) {
#pragma unroll
        for (int i = 0; i < products; ++i) {
          copy_b.start(address(weights_at(next_slot, next_step) + i * tile_columns * kFloat64RowBytes),
                       p.b[i] + first_column * p.b_stride[i] + from, p.b_stride[i], p.n - first_column, left);
        }
      }
      if (++next_step == steps) {
        next_step = 0;
        next_tile += workers;
      }
      next_slot = next_slot + 1 == Tile::kStages ? 0 : next_slot + 1;
    }
    end_copies();
  };
#pragma unroll 1
  for (int i = 0; i < Tile::kStages - 1; ++i) start_next();

  int tile = first_tile, slot = 0;
  do {
    Float64Sums sums;
    sums.clear();
    for (int step = 0; step < steps; ++step) {
      wait_for_copies_before<Tile::kStages - 2>();
      if (Tile::kUnits == 1 || tile == first_tile) {
        __syncthreads();
      } else {
        asm volatile("bar.sync %0, %1;" ::"r"(unit + 1), "n"(Tile::kUnitThreads) : "memory");
      }
      start_next();  // where everyone has read what the step before multiplied
      const unsigned char* const weights = weights_at(slot, step) + warp_column * kFloat64RowBytes;
      sums.template add<depth>(ring + slot * Tile::kStageBytes + warp_row * kFloat64RowBytes, [&](int j) {
        return weights + (j / groups * tile_columns + j % groups * 8) * kFloat64RowBytes;
      });
      slot = slot + 1 == Tile::kStages ? 0 : slot + 1;
    }

    const int row = tile * Tile::kRows + warp_row + lane / 4;
    const int column = first_column + warp_column + lane % 4 * 2;
    const auto exists = [&](int i) { return row + 8 * i < p.m; };
    [[maybe_unused]] double factors[Float64Sums::kRows];
    [[maybe_unused]] int64_t places[Float64Sums::kRows];
    if constexpr (to_channels) {
#pragma unroll
      for (int i = 0; i < Float64Sums::kRows; ++i) {
        factors[i] = exists(i) ? channels.factors.of(row + 8 * i) : 0;
        places[i] = channels.positions.of_int(row + 8 * i);
      }
    }
    // What c has for one group of columns is on its way while the group before is computed.
    [[maybe_unused]] double c[2][Float64Sums::kRows][2] = {};
    const auto load_c = [&](int j) {
      if constexpr (Rule::kReadsC) {
        if (column + 8 * j >= p.n) return;
#pragma unroll
        for (int i = 0; i < Float64Sums::kRows; ++i) {
          if (exists(i)) unpack(load<double, 2>(p.c + (row + 8 * i) * p.c_stride + column + 8 * j), c[j % 2][i]);
        }
      }
    };
    load_c(0);
#pragma unroll
    for (int j = 0; j < groups; ++j) {
      if (j + 1 < groups) load_c(j + 1);
      const int to = column + 8 * j;
      if (to >= p.n) continue;
      double bias[products][2];
#pragma unroll
      for (int of = 0; of < products; ++of) {
#pragma unroll
        for (int in_pair = 0; in_pair < 2; ++in_pair) {
          bias[of][in_pair] = p.bias[of] != nullptr ? p.bias[of][to + in_pair] : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < Float64Sums::kRows; ++i) {
        Packed<double, 2> result;
#pragma unroll
        for (int in_pair = 0; in_pair < 2; ++in_pair) {
          const double z = sums.of(i, j, in_pair) + bias[0][in_pair];
          const double t = sums.of(i, (products - 1) * groups + j, in_pair) + bias[products - 1][in_pair];
          result.at[in_pair] = Rule::last_digits(z, t, c[j % 2][i][in_pair]);
        }
        if (!exists(i)) continue;
        if constexpr (to_channels) {
          double* const of_channel = channels.data + to * channels.channel_stride + places[i];
          of_channel[0] = result.at[0] * factors[i];
          of_channel[channels.channel_stride] = result.at[1] * factors[i];
        } else {
          store<double, 2>(p.d + (row + 8 * i) * p.d_stride + to, result);
        }
      }
    }
    tile += workers;
  } while (tile < tiles);
}

}  // namespace torchops::cuda::gemm
