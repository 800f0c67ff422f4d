#pragma once

// The output step of a triangle update (see sm80_pair.cuh): the layer norms of o and of x, the projection and its gate,
// in one pass over o and x.
//
// A warp has 16 positions, the first operands of both products, and the outputs of a whole piece in each lane. The
// positions of o are transposed on the way from shared memory to registers.

#include "cuda/gemm/sm80_pair.cuh"

namespace torchops::cuda::gemm {

/// o and x, and then chunks of the weights.
template <class T>
struct PairOut80 {
  static constexpr int kOutputs = 32, kWarpsOfChunk = kOutputs / Pieces<T>::kColumns;
  static constexpr int kWarpsOfRow = kSm80Warps / kWarpsOfChunk, kPositions = 16 * kWarpsOfRow;
  static constexpr uint32_t kChunkBytes = 2 * kHalfChunkBytes<T, kOutputs>;
  static constexpr uint32_t kTileBytes = kPositions * kMostFeatures * sizeof(T);
  static constexpr size_t kSharedBytes = 2 * kTileBytes;
  static constexpr int kChunks = static_cast<int>(kSharedBytes / kChunkBytes);
  // In TF32, the positions alone take 128 registers.
  static constexpr int kResident = sizeof(T) == 2 ? 2 : 1;
  using Tile = PairTile<kPositions>;
};

/// The positions of a warp of o, a tile of rows of channels, as the first operand.
template <class T>
__device__ void load_positions(uint32_t (&words)[Pieces<T>::kSteps][4], const unsigned char* shared, int first) {
  constexpr int pieces = PairOut80<T>::kPositions / Pieces<T>::kElements;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < Pieces<T>::kSteps; ++k) {
    if constexpr (sizeof(T) == 2) {
      const int channel = 16 * k + lane / 16 * 8 + lane % 8, piece = first / 8 + lane / 8 % 2;
      load_transposed_matrices(words[k], static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
                                             InOrder::place<T, pieces>(channel, piece));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = 8 * k + i / 2 * 4 + lane % 4, position = first + i % 2 * 8 + lane / 4;
        const uint32_t at = InOrder::place<T, pieces>(channel, position / 4) + position % 4 * 4;
        words[k][i] = *reinterpret_cast<const uint32_t*>(shared + at);
      }
    }
  }
}

/// Writes values[i], plus what is there in `residual` or x if `adds`, rounding once.
template <class T>
__device__ void write_update(const PairProblem& p, int row, int position, int feature,
                             float (&values)[Pieces<T>::kElements]) {
  constexpr int vector = Pieces<T>::kElements;
  const int64_t at = row * p.out_stride + position * p.out_row_stride + feature;
  if (p.adds && p.residual.data != nullptr) {
    const int64_t from = row * p.residual.batch_stride + position * p.residual.row_stride + feature;
#pragma unroll
    for (int i = 0; i < vector; i += 4) {
      auto sums = load<float, 4>(static_cast<const float*>(p.residual.data) + from + i);
#pragma unroll
      for (int v = 0; v < 4; ++v) sums.at[v] += values[i + v];
      store<float, 4>(static_cast<float*>(p.out) + at + i, sums);
    }
    return;
  }
  if (p.adds) {
    const int64_t from = row * p.x.batch_stride + position * p.x.row_stride + feature;
    float x[vector];
    unpack(load<T, vector>(static_cast<const T*>(p.x.data) + from), x);
#pragma unroll
    for (int i = 0; i < vector; ++i) values[i] += x[i];
  }
  store<T, vector>(static_cast<T*>(p.out) + at, pack<T, vector>(values));
}

/// out[i][k] = (layer norm of o[:, i, k] @ value.T + bias) * sigmoid(layer norm of x[i][k] @ gate.T + bias), plus
/// x[i][k] or the residual, if `adds`; o is channels[0].
template <class T>
__global__ void __launch_bounds__(kSm80Threads, PairOut80<T>::kResident) sm80_pair_out_kernel(const PairProblem p) {
  using Out = PairOut80<T>;
  using P = Pieces<T>;
  using Rule = GateRule<Sigmoid>;
  constexpr int vector = P::kElements;
  constexpr Exactness exactness = std::is_same_v<T, c10::BFloat16> ? Exactness::kCoarse : Exactness::kFast;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t chunks = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first_position = warp % Out::kWarpsOfRow * 16, first_output = warp / Out::kWarpsOfRow * P::kColumns;
  const typename Out::Tile tile(p.n);
  const T* const o = static_cast<const T*>(p.channels[0]) + tile.row * p.row_stride + tile.first;
  const T* const x = static_cast<const T*>(p.x.data) + tile.row * p.x.batch_stride + tile.first * p.x.row_stride;
  const uint32_t x_tile = chunks + Out::kTileBytes;
  start_tile<kMostFeatures, Out::kPositions, InOrder>(chunks, o, p.channel_stride, p.d, p.n - tile.first);
  start_tile<Out::kPositions, kMostFeatures, InOrder>(x_tile, x, p.x.row_stride, p.n - tile.first, p.c);
  end_copies();
  wait_for_copies_before<0>();
  __syncthreads();
  uint32_t normalized[P::kSteps][4], z[P::kSteps][4];
  load_positions<T>(normalized, shared, first_position);
#pragma unroll
  for (int k = 0; k < P::kSteps; ++k) {
    load_matrices(z[k], x_tile + InOrder::place<T>(first_position + lane % 16, 2 * k + lane / 16));
  }
  __syncthreads();  // everyone has read the tiles
  const auto chunk_of = [&](int part) {
    return chunks + static_cast<uint32_t>(part % Out::kChunks) * Out::kChunkBytes;
  };
  const auto start = [&](int part) {
    if (part * Out::kOutputs < p.c) {
      start_chunk<T, Out::kOutputs, InBlocks>(chunk_of(part), p.value[0], p.gate[0], part * Out::kOutputs, p.c, p.d,
                                              p.c);
    }
    end_copies();
  };
#pragma unroll 1
  for (int part = 0; part < Out::kChunks; ++part) start(part);
  normalize<T, 2>(normalized, p.d, p.norm_o);
  normalize<T, 2>(z, p.c, p.norm_x);

#pragma unroll 1
  for (int part = 0; part * Out::kOutputs < p.c; ++part) {
    wait_for_copies_before<Out::kChunks - 1>();
    __syncthreads();  // everyone's copies are there
    const int feature = part * Out::kOutputs + first_output + lane % 4 * vector;
    // Lane 4g + q has the positions g and g + 8, and of the features of its piece a pair in each block.
    float sums[2][P::kBlocks][4];
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const auto* const bias = static_cast<const T*>(of == 0 ? p.value[0].bias : p.gate[0].bias);
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        const float of_feature = bias != nullptr && feature < p.c ? static_cast<float>(bias[feature + i]) : 0.f;
        sums[of][i / 2][i % 2] = sums[of][i / 2][i % 2 + 2] = of_feature;
      }
    }
    const auto multiply = [&](int of, const uint32_t (&rows)[4], int k) {
      const uint32_t weight = chunk_of(part) + static_cast<uint32_t>(of) * kHalfChunkBytes<T, Out::kOutputs>;
#pragma unroll
      for (int j = 0; j < P::kBlocks; j += 2) {
        uint32_t w[4];
        const int row = first_output + P::row_of_block(j + lane / 16, lane % 8);
        load_weights<T>(w, weight + InBlocks::place<T>(row, 2 * k + lane / 8 % 2));
        multiply_16x8<T>(sums[of][j], rows, {w[0], w[1]});
        multiply_16x8<T>(sums[of][j + 1], rows, {w[2], w[3]});
      }
    };
#pragma unroll
    for (int k = 0; k < P::kSteps; ++k) {
      if (2 * k * vector < p.d) multiply(0, normalized[k], k);
      if (2 * k * vector < p.c) multiply(1, z[k], k);
    }
    if ((part + Out::kChunks) * Out::kOutputs < p.c) __syncthreads();  // everyone has read the chunk
    start(part + Out::kChunks);
    if (feature >= p.c) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = tile.first + first_position + lane / 4 + 8 * h;
      if (position >= p.n) continue;
      float values[vector];
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        values[i] =
            Rule::value<exactness>(Rule::scale(0) * sums[1][i / 2][i % 2 + 2 * h], 0.f, sums[0][i / 2][i % 2 + 2 * h]);
      }
      write_update<T>(p, tile.row, position, feature, values);
    }
  }
}

}  // namespace torchops::cuda::gemm
