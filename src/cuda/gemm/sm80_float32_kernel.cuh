#pragma once

// y = f(x @ w.T) in float32, without tensor cores, which would round the operands. Every multiplication and addition is
// an FFMA of its own, so the arithmetic is that of cuBLAS; the order of a sum is that of its columns.

#include <cstdint>

#include "cuda/channels.cuh"
#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm80_kernel.cuh"
#include "cuda/vector.cuh"

namespace torchops::cuda::gemm {

/// A CTA computes kRows x kColumns of the output, with two products of half as many columns each. A warp has 32 rows
/// and 64 rows of the weights, a lane 8 x 8 of them: 16 vectors of shared memory for 256 FFMAs. Operands come in steps
/// of 32 columns, so that a row has 128 bytes; while a step is multiplied, the next one is copied. On compute
/// capability 8.0 and 9.0, two CTAs fit a multiprocessor: one computes during the first copies and the epilogue of the
/// other. Where shared memory has 100 KiB, one does.
template <int products, int warps_m>
struct Float32Tile {
  static constexpr int kWarpsM = warps_m, kWarpsN = kSm80Warps / warps_m, kStages = 2, kStep = 32;
  static constexpr int kRows = 32 * kWarpsM, kWeightRows = 64 * kWarpsN, kColumns = kWeightRows / products;
  static constexpr uint32_t kRowBytes = kStep * sizeof(float), kWeightBytes = kColumns * kRowBytes;
  static constexpr uint32_t kInputBytes = kRows * kRowBytes, kStageBytes = (kRows + kWeightRows) * kRowBytes;
  static constexpr int kSharedBytes = kStages * static_cast<int>(kStageBytes);
};

/// Where outputs go that have channels first: those of a row to its position in the matrix of their channel, times the
/// factor of the row. Rows of positions begin at multiples of 16 bytes.
struct Float32Channels {
  float* data;
  int64_t channel_stride;
  Positions positions;
  RowFactors<float> factors;
};

/// Starts to copy 32 columns of `rows` rows, of which rows_left exist and `columns` are left. The eight pieces of a row
/// are permuted by row / 4, because lanes that read side by side have rows that are 4 apart.
template <int rows>
__device__ inline void copy_float32(uint32_t to, const float* from, int64_t stride, int rows_left, int columns) {
  const int thread = static_cast<int>(threadIdx.x), row = thread / 8, piece = thread % 8, swizzle = thread / 32;
  const int valid = min(max(columns - piece * 4, 0), 4) * static_cast<int>(sizeof(float));
  const float* const own = from + row * stride + piece * 4;
  const uint32_t own_to = to + static_cast<uint32_t>(row * 128 + (piece ^ swizzle) * 16);
#pragma unroll
  for (int i = 0; i < rows / 32; ++i) {
    copy_or_clear<16>(own_to + i * 32 * 128, own + i * 32 * stride, row + i * 32 < rows_left ? valid : 0);
  }
}

/// Adds the products of a step to the sums. `a` and `b` are the first rows of this lane: of eight, four follow each
/// other, and the other four begin 16 (a) or `second` (b) rows later.
__device__ inline void multiply_step(float (&sums)[8][8], const unsigned char* a, const unsigned char* b,
                                     uint32_t a_lane, uint32_t b_lane, uint32_t second) {
#pragma unroll 1
  for (uint32_t piece = 0; piece < 8; ++piece) {
    float4 weights[8];
    const unsigned char* const of_b = b + (piece ^ b_lane) * 16;
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
      weights[j] = *reinterpret_cast<const float4*>(of_b + (j % 4) * 128 + j / 4 * second);
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t place = (piece ^ a_lane ^ (i / 4 * 4)) * 16;
      const float4 x = *reinterpret_cast<const float4*>(a + place + (i % 4 + i / 4 * 16) * 128);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x.x, weights[j].x, sums[i][j]);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x.y, weights[j].y, sums[i][j]);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x.z, weights[j].z, sums[i][j]);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(x.w, weights[j].w, sums[i][j]);
    }
  }
}

/// Rows of operands and output are aligned to 16 bytes, and n is a multiple of 4. With `to_channels`, p.d is not
/// written.
template <class Rule, int warps_m, bool to_channels>
__global__ void __launch_bounds__(kSm80Threads, 2)
    sm80_float32_kernel(const Sm80Arguments<float, Rule::kProducts> p, const Float32Channels channels) {
  constexpr int products = Rule::kProducts;
  using Tile = Float32Tile<products, warps_m>;
  extern __shared__ __align__(128) unsigned char shared[];
  const auto buffers = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int first_row = static_cast<int>(blockIdx.x) / p.tiles_n * Tile::kRows;
  const int first_column = static_cast<int>(blockIdx.x) % p.tiles_n * Tile::kColumns;

  const float* const a = p.a + first_row * p.a_stride;
  const auto start = [&](int slot, int step) {
    const uint32_t to = buffers + static_cast<uint32_t>(slot) * Tile::kStageBytes;
    const int begin = step * Tile::kStep;
    copy_float32<Tile::kRows>(to, a + begin, p.a_stride, p.m - first_row, p.k - begin);
#pragma unroll
    for (int of = 0; of < products; ++of) {
      copy_float32<Tile::kColumns>(to + Tile::kInputBytes + of * Tile::kWeightBytes,
                                   p.b[of] + first_column * p.b_stride[of] + begin, p.b_stride[of], p.n - first_column,
                                   p.k - begin);
    }
  };
  const int steps = (p.k + Tile::kStep - 1) / Tile::kStep;
#pragma unroll
  for (int slot = 0; slot < Tile::kStages; ++slot) {
    if (slot < steps) start(slot, slot);
    end_copies();
  }

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int lane_m = lane / 8, lane_n = lane % 8, warp_m = warp % warps_m, warp_n = warp / warps_m;
  const int row = warp_m * 32 + lane_m * 4;
  // The second four columns of a lane are those of the other product, or 32 further on.
  constexpr int warp_columns = 64 / products;
  constexpr uint32_t second = products == 2 ? Tile::kWeightBytes : 32 * Tile::kRowBytes;
  const int column = warp_n * warp_columns + lane_n * 4;
  float sums[8][8] = {};
  for (int step = 0; step < steps; ++step) {
    wait_for_copies_before<Tile::kStages - 1>();
    __syncthreads();
    const int slot = step % Tile::kStages;
    const unsigned char* const stage = shared + static_cast<uint32_t>(slot) * Tile::kStageBytes;
    multiply_step(sums, stage + row * 128, stage + Tile::kInputBytes + column * 128, static_cast<uint32_t>(lane_m),
                  static_cast<uint32_t>(lane_n), second);
    if (step + Tile::kStages < steps) {
      __syncthreads();  // everyone has read the buffer
      start(slot, step + Tile::kStages);
    }
    end_copies();
  }

  constexpr Exactness exact = Exactness::kExact;
  float bias[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float* const of = p.bias[products == 2 ? j / 4 : 0];
    const int at = first_column + column + j % 4 + (products == 1 ? j / 4 * 32 : 0);
    bias[j] = of != nullptr && at < p.n ? of[at] : 0.f;
  }
#pragma unroll
  for (int part = 0; part < 2 / products; ++part) {
    const int to = first_column + column + part * 32;
    if (to >= p.n) continue;
    if constexpr (to_channels) {
      static_assert(products == 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = first_row + row + half * 16, left = p.m - first;
        if (left <= 0) continue;
        float factors[4];
        int64_t places[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          factors[i] = i < left ? channels.factors.of(first + i) : 0.f;
          places[i] = channels.positions.of(first + i);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Packed<float, 4> values;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const auto& sum = sums[half * 4 + i];
            values.at[i] = Rule::template value<exact>(sum[j] + bias[j], sum[4 + j] + bias[4 + j], 0.f) * factors[i];
          }
          float* const of_channel = channels.data + (to + j) * channels.channel_stride;
          if (channels.positions.n % 4 == 0) {
            store<float, 4>(of_channel + places[0], values);
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (i < left) of_channel[places[i]] = values.at[i];
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int64_t at = first_row + row + i % 4 + i / 4 * 16;
        if (at >= p.m) continue;
        float c[4] = {}, result[4];
        [[maybe_unused]] float g[4] = {}, other[4];
        if constexpr (Rule::kReadsC) unpack(load<float, 4>(p.c + at * p.c_stride + to), c);
        if constexpr (kMakesCotangents<Rule>) unpack(load<float, 4>(p.g + at * p.g_stride + to), g);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int of = part * 4 + j, of_second = products == 2 ? 4 + j : of;
          const float z = sums[i][of] + bias[of], z2 = sums[i][of_second] + bias[of_second];
          if constexpr (kMakesCotangents<Rule>) {
            Rule::template backward<exact>(g[j], z, z2, c[j], result[j], other[j]);
          } else {
            result[j] = Rule::template value<exact>(z, z2, c[j]);
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
