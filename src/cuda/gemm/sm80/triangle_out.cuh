#pragma once

// The output step of a triangle update (see sm80/triangle.cuh): the layer norms of o and of x, the projection and its
// gate, in one pass over o and x.
//
// A warp has 16 positions, the first operands of both products, and the outputs of a whole piece in each lane. The
// positions of o are transposed on the way from shared memory to registers.

#include "cuda/gemm/sm80/triangle.cuh"

namespace torchops::cuda::gemm {

/// Shared memory has a chunk of outputs of one weight, o and x, whose place more chunks take. Registers have no room
/// for o and x in TF32, so all values are computed before x is read, and two warps share the outputs of a position.
/// Otherwise, a warp has all outputs, and chunks of values and gates take turns.
template <class T>
struct PairOut80 {
  static constexpr bool kTakesTurns = sizeof(T) == 2;
  static constexpr int kWarpsOfChunk = kTakesTurns ? 1 : 2, kOutputs = kWarpsOfChunk * Pieces<T>::kColumns;
  static constexpr int kWarpsOfRow = kSm80Warps / kWarpsOfChunk, kPositions = 16 * kWarpsOfRow;
  static constexpr int kMostParts = kMostFeatures / kOutputs;
  using Channels = TileCopies<T, kMostFeatures, kPositions, InOrder>;
  using Positions = TileCopies<T, kPositions, kMostFeatures, InOrder>;
  using Weights = TileCopies<T, kOutputs, kMostFeatures, InBlocks>;
  static constexpr uint32_t kReusedBytes = Channels::kBytes + (kTakesTurns ? Positions::kBytes : 0);
  static constexpr int kChunks = 1 + static_cast<int>(kReusedBytes / Weights::kBytes);
  static constexpr size_t kSharedBytes = Weights::kBytes + Channels::kBytes + Positions::kBytes;
  static_assert(kSharedBytes <= kLeastSharedBytes);
  static_assert(kReusedBytes % Weights::kBytes == 0);
  using Tile = PairTile<kPositions>;
};

/// The positions of a warp of o, a tile of rows of channels, as the first operand.
template <class T>
__device__ void load_positions(uint32_t (&words)[Pieces<T>::kSteps][4], const unsigned char* tile, int first) {
  constexpr int pieces = PairOut80<T>::kPositions / Pieces<T>::kElements;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < Pieces<T>::kSteps; ++k) {
    if constexpr (sizeof(T) == 2) {
      const int channel = 16 * k + lane / 16 * 8 + lane % 8, piece = first / 8 + lane / 8 % 2;
      load_transposed_matrices(words[k], shared_address(tile) + InOrder::place<T, pieces>(channel, piece));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = 8 * k + i / 2 * 4 + lane % 4, position = first + i % 2 * 8 + lane / 4;
        const uint32_t at = InOrder::place<T, pieces>(channel, position / 4) + position % 4 * 4;
        words[k][i] = *reinterpret_cast<const uint32_t*>(tile + at);
      }
    }
  }
}

/// Writes values[i], plus what is there in `residual` or x if `add_residual`, rounding once.
template <class T>
__device__ void write_update(const PairProblem& p, int row, int position, int feature,
                             float (&values)[Pieces<T>::kElements]) {
  constexpr int vector = Pieces<T>::kElements;
  const int64_t at = row * p.out_stride + position * p.out_row_stride + feature;
  if (p.add_residual && p.residual.data != nullptr) {
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
  if (p.add_residual) {
    const int64_t from = row * p.x.batch_stride + position * p.x.row_stride + feature;
    float x[vector];
    unpack(load<T, vector>(static_cast<const T*>(p.x.data) + from), x);
#pragma unroll
    for (int i = 0; i < vector; ++i) values[i] += x[i];
  }
  store<T, vector>(static_cast<T*>(p.out) + at, pack<T, vector>(values));
}

/// out[i][k] = (layer norm of o[:, i, k] @ value.T + bias) * sigmoid(layer norm of x[i][k] @ gate.T + bias), plus
/// x[i][k] or the residual, if `add_residual`; o is channels[0].
template <class T>
__global__ void __launch_bounds__(kSm80Threads, 2) sm80_pair_out_kernel(const PairProblem p) {
  using Out = PairOut80<T>;
  using P = Pieces<T>;
  using Rule = GateRule;
  constexpr int vector = P::kElements;
  constexpr Exactness exactness = std::is_same_v<T, c10::BFloat16> ? Exactness::kCoarse : Exactness::kFast;
  extern __shared__ __align__(kTileAlignment) unsigned char tiles[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first_position = warp % Out::kWarpsOfRow * 16, first_output = warp / Out::kWarpsOfRow * P::kColumns;
  const typename Out::Tile tile(p.n);
  const int parts = (p.c + Out::kOutputs - 1) / Out::kOutputs;
  const auto chunk_of = [&](const Chunk& chunk) { return tiles + chunk.slot * Out::Weights::kBytes; };
  Chunk chunk, ahead;
  const auto start = [&] {
    if (ahead.layer < Chunk::kLayers && ahead.part < parts) {
      const Operand& weight = ahead.layer == 0 ? p.value[0].weight : p.gate[0].weight;
      const int first = ahead.part * Out::kOutputs;
      const T* const from = static_cast<const T*>(weight.data) + first * weight.row_stride;
      Out::Weights::start(chunk_of(ahead), from, weight.row_stride, p.c - first, ahead.layer == 0 ? p.d : p.c);
      ahead.advance<Out::kTakesTurns>(parts, Out::kChunks);
    }
    end_copies();
  };

  const T* const o = static_cast<const T*>(p.channels[0]) + tile.row * p.row_stride + tile.first;
  const T* const x = static_cast<const T*>(p.x.data) + tile.row * p.x.batch_stride + tile.first * p.x.row_stride;
  unsigned char *const o_tile = tiles + Out::Weights::kBytes, *const x_tile = o_tile + Out::Channels::kBytes;
  Out::Channels::start(o_tile, o, p.channel_stride, p.d, p.n - tile.first);
  start();
  Out::Positions::start(x_tile, x, p.x.row_stride, p.n - tile.first, p.c);
  end_copies();
  wait_for_copies_before<Out::kTakesTurns ? 0 : 1>();
  __syncthreads();
  using Rows = uint32_t[P::kSteps][4];
  Rows of_o, of_x;
  const auto load_x = [&] {
    const uint32_t at = shared_address(x_tile) + InOrder::place<T>(first_position + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < P::kSteps; ++k) load_matrices(of_x[k], at ^ pieces_on(2 * k));
  };
  load_positions<T>(of_o, o_tile, first_position);
  if constexpr (Out::kTakesTurns) load_x();
  __syncthreads();  // everyone has read what chunks overwrite
#pragma unroll 1
  for (int i = 1; i < Out::kChunks - 1; ++i) start();
  normalize<T, 2>(of_o, p.d, p.norm_o);
  if constexpr (Out::kTakesTurns) normalize<T, 2>(of_x, p.c, p.norm_x);

  // Lane 4g + q has the positions g and g + 8, and of the outputs of its piece a pair in each block.
  using Sums = float[P::kBlocks][4];
  const auto receive = [&] {
    wait_for_copies_before<Out::kChunks - 2>();
    Out::Weights::round(chunk_of(chunk));
    __syncthreads();  // everyone's copies are there, and everyone has read the chunk before
    start();
  };
  const auto feature_of = [&](int part) { return part * Out::kOutputs + first_output + lane % 4 * vector; };
  const auto multiply = [&](Sums& sums, const Rows& rows, int part, const void* biases, int features) {
    const int feature = feature_of(part);
#pragma unroll
    for (int i = 0; i < vector; ++i) {
      const float of_feature =
          biases != nullptr && feature < p.c ? static_cast<float>(static_cast<const T*>(biases)[feature + i]) : 0.f;
      sums[i / 2][i % 2] = sums[i / 2][i % 2 + 2] = of_feature;
    }
    const int in_weights = first_output + P::row_of_block(lane / 16, lane % 8);
    const uint32_t weights = shared_address(chunk_of(chunk)) + InBlocks::place<T>(in_weights, lane / 8 % 2);
    for_each_step<T>(features, [&](int k) {
#pragma unroll
      for (int j = 0; j < P::kBlocks; j += 2) {
        uint32_t w[4];
        load_matrices(w, (weights ^ pieces_on(2 * k)) + static_cast<uint32_t>(j) * P::kBlockBytes);
        multiply_16x8<T>(sums[j], rows[k], {w[0], w[1]});
        multiply_16x8<T>(sums[j + 1], rows[k], {w[2], w[3]});
      }
    });
    chunk.advance<Out::kTakesTurns>(parts, Out::kChunks);
  };
  const auto make_values = [&](Sums& sums, int part) {
    receive();
    multiply(sums, of_o, part, p.value[0].bias, p.d);
  };
  const auto finish = [&](const Sums& values, int part) {
    receive();
    Sums gates;
    multiply(gates, of_x, part, p.gate[0].bias, p.c);
    const int feature = feature_of(part);
    if (feature >= p.c) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = tile.first + first_position + lane / 4 + 8 * h;
      if (position >= p.n) continue;
      float update[vector];
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        const int at = i % 2 + 2 * h;
        update[i] = Rule::value<exactness>(Rule::scale(0) * gates[i / 2][at], 0.f, values[i / 2][at]);
      }
      write_update<T>(p, tile.row, position, feature, update);
    }
  };
  if constexpr (Out::kTakesTurns) {
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      Sums values;
      make_values(values, part);
      finish(values, part);
    }
  } else {
    Sums values[Out::kMostParts];
    // Not a loop up to `parts`: these are registers.
#pragma unroll
    for (int part = 0; part < Out::kMostParts; ++part) {
      if (part < parts) make_values(values[part], part);
    }
    load_x();
    normalize<T, 2>(of_x, p.c, p.norm_x);
#pragma unroll
    for (int part = 0; part < Out::kMostParts; ++part) {
      if (part < parts) finish(values[part], part);
    }
  }
}

}  // namespace torchops::cuda::gemm
