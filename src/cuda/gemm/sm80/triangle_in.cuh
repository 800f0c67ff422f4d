#pragma once

// The input step of a triangle update (see sm80/triangle.cuh): layer norm, two gated linear units and the mask, from
// rows of features to channels of positions, in one pass over x.
//
// The positions of x are the second operand of the products, and the weights the first, so sums are channels of
// positions already. A warp has the positions of a whole piece in each lane, and 16 outputs of a chunk.

#include "cuda/gemm/padded_positions.cuh"
#include "cuda/gemm/sm80/triangle.cuh"

namespace torchops::cuda::gemm {

/// x takes the place of all chunks but the first, until it is in registers. In 16 bits, two CTAs fit in 100 KiB.
template <class T>
struct PairIn80 {
  static constexpr int kPositions = 128, kWarpsOfRow = kPositions / Pieces<T>::kColumns;
  static constexpr int kOutputs = kSm80Warps / kWarpsOfRow * 16;
  using Positions = TileCopies<T, kPositions, kMostFeatures, InBlocks>;
  /// A chunk has as many rows of a value's weight, and then of its gate's.
  using Weights = TileCopies<T, kOutputs, kMostFeatures, InOrder>;
  static constexpr uint32_t kChunkBytes = 2 * Weights::kBytes;
  static constexpr int kChunks = 1 + static_cast<int>(Positions::kBytes / kChunkBytes);
  static constexpr size_t kSharedBytes = kChunks * kChunkBytes + kPositions * sizeof(float);
  static_assert(kSharedBytes <= kLeastSharedBytes);
  static_assert(Positions::kBytes % kChunkBytes == 0);
  using Tile = PairTile<kPositions>;
};

/// channels[s][h][i][k] = (z @ value[s].T + bias) * sigmoid(z @ gate[s].T + bias) * mask[i][k] * scale[s] for the h-th
/// column, where z is the layer norm of x[i][k]; 0 from the n-th k up to padded_positions().
template <class T>
__global__ void __launch_bounds__(kSm80Threads, 2) sm80_pair_in_kernel(const PairProblem p) {
  using In = PairIn80<T>;
  using P = Pieces<T>;
  constexpr int vector = P::kElements;
  extern __shared__ __align__(kTileAlignment) unsigned char tiles[];
  float* const factors = reinterpret_cast<float*>(tiles + In::kChunks * In::kChunkBytes);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int first_position = warp % In::kWarpsOfRow * P::kColumns, first_output = warp / In::kWarpsOfRow * 16;
  const typename In::Tile tile(p.n);
  const int parts = (p.d + In::kOutputs - 1) / In::kOutputs;
  const auto chunk_of = [&](const Chunk& chunk) { return tiles + chunk.slot * In::kChunkBytes; };
  Chunk ahead;
  const auto start = [&] {
    if (ahead.layer < Chunk::kLayers) {
      const int first = ahead.part * In::kOutputs;
      const auto start_half = [&](unsigned char* to, const Operand& weight) {
        const T* const from = static_cast<const T*>(weight.data) + first * weight.row_stride;
        In::Weights::start(to, from, weight.row_stride, p.d - first, p.c);
      };
      start_half(chunk_of(ahead), p.value[ahead.layer].weight);
      start_half(chunk_of(ahead) + In::Weights::kBytes, p.gate[ahead.layer].weight);
      ahead.advance(parts, In::kChunks);
    }
    end_copies();
  };

  const T* const x = static_cast<const T*>(p.x.data) + tile.row * p.x.batch_stride + tile.first * p.x.row_stride;
  unsigned char* const x_tile = tiles + In::kChunkBytes;
  In::Positions::start(x_tile, x, p.x.row_stride, p.n - tile.first, p.c);
  start();
  if (thread < In::kPositions) {
    const int position = tile.first + thread;
    const auto* const mask = static_cast<const T*>(p.mask);
    float factor = position < p.n ? 1.f : 0.f;
    if (mask != nullptr && position < p.n) {
      factor = static_cast<float>(mask[tile.row * p.mask_row_stride + position * p.mask_stride]);
    }
    factors[thread] = factor;
  }
  wait_for_copies_before<0>();
  __syncthreads();
  uint32_t z[P::kSteps][2 * P::kBlocks];
#pragma unroll
  for (int j = 0; j < P::kBlocks; ++j) {
#pragma unroll
    for (int k = 0; k < P::kSteps; k += 2) {
      uint32_t pieces[4];
      const int row = first_position + P::row_of_block(j, lane % 8);
      load_matrices(pieces, (shared_address(x_tile) + InBlocks::place<T>(row, lane / 8)) ^ pieces_on(2 * k));
#pragma unroll
      for (int i = 0; i < 4; ++i) z[k + i / 2][j + i % 2 * P::kBlocks] = pieces[i];
    }
  }
  __syncthreads();  // everyone has read x
#pragma unroll 1
  for (int i = 1; i < In::kChunks - 1; ++i) start();
  normalize<T, P::kBlocks>(z, p.c, p.norm_x);

#pragma unroll 1
  for (Chunk chunk; chunk.layer < Chunk::kLayers; chunk.advance(parts, In::kChunks)) {
    wait_for_copies_before<In::kChunks - 2>();
    In::Weights::round(chunk_of(chunk));
    In::Weights::round(chunk_of(chunk) + In::Weights::kBytes);
    __syncthreads();  // everyone's copies are there, and everyone has read the chunk before
    start();
    const int side = chunk.layer, output = chunk.part * In::kOutputs + first_output;
    if (output >= p.d) continue;
    // Lane 4g + q has the channels g and g + 8, and of the positions of its piece a pair in each block.
    float sums[2][P::kBlocks][4];
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const auto* const bias = static_cast<const T*>(of == 0 ? p.value[side].bias : p.gate[side].bias);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int channel = output + lane / 4 + 8 * h;
        const float of_channel = bias != nullptr && channel < p.d ? static_cast<float>(bias[channel]) : 0.f;
#pragma unroll
        for (int j = 0; j < P::kBlocks; ++j) sums[of][j][2 * h] = sums[of][j][2 * h + 1] = of_channel;
      }
    }
    const uint32_t weights = shared_address(chunk_of(chunk)) + InOrder::place<T>(first_output + lane % 16, lane / 16);
    for_each_step<T>(p.c, [&](int k) {
#pragma unroll
      for (int of = 0; of < 2; ++of) {
        uint32_t w[4];
        load_matrices(w, (weights ^ pieces_on(2 * k)) + static_cast<uint32_t>(of) * In::Weights::kBytes);
#pragma unroll
        for (int j = 0; j < P::kBlocks; ++j) multiply_16x8<T>(sums[of][j], w, {z[k][j], z[k][j + P::kBlocks]});
      }
    });
    const int in_tile = first_position + lane % 4 * vector, position = tile.first + in_tile;
    if (position >= padded_positions<T>(p.n)) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = output + lane / 4 + 8 * h;
      if (channel >= p.d) continue;
      float values[vector];
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        const float value = p.scale[side] * factors[in_tile + i] * sums[0][i / 2][2 * h + i % 2];
        const float gate = sums[1][i / 2][2 * h + i % 2];
        if constexpr (sizeof(T) == 2) {
          // What a nearly closed gate lets through is lost in the sum that follows.
          values[i] = Sigmoid::from_tanh(0.5f * value, tanh_approximate(Sigmoid::kTanhScale * gate));
        } else {
          values[i] = value * Sigmoid::of_scaled<Exactness::kFast>(Sigmoid::kScale * gate);
        }
      }
      T* const to = static_cast<T*>(p.channels[side]) + channel * p.channel_stride + tile.row * p.row_stride + position;
      store<T, vector>(to, pack<T, vector>(values));
    }
  }
}

}  // namespace torchops::cuda::gemm
