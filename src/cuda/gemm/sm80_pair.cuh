#pragma once

// Shared by both steps of a triangle update, for 16-bit elements and in TF32, on every GPU from compute capability 8.0
// on, up to 128 features and channels. A CTA has a tile of positions, all in one row of the pair matrix. Its warps take
// their positions into registers, normalise them there, and multiply them with weights that come through shared memory
// in chunks of outputs, while the next chunks are being copied.

#include "cuda/gemm/problem.h"
#include "cuda/gemm/sm80_kernel.cuh"

namespace torchops::cuda::gemm {

/// The most features or channels.
constexpr int kMostFeatures = 128;

/// Rows of kMostFeatures elements in pieces of 16 bytes. Instructions sum over two pieces at a time, whatever the type,
/// and a lane has a register of each piece of a row: one of four.
template <class T>
struct Pieces {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kOfRow = kMostFeatures / kElements;
  static constexpr int kSteps = kOfRow / 2, kOfRegister = kElements / 4;
  // Instructions leave two neighbouring columns of 8 in a lane, which is less than a piece. But the order of columns is
  // ours: the rows of the second operand are taken in kBlocks blocks of 8, of which block j has the rows
  //   kElements q + 2j, kElements q + 2j + 1  for q = 0, 1, 2, 3,
  // so the sums of all blocks leave the columns kElements q and following, a whole piece, in lane 4g + q.
  static constexpr int kBlocks = kElements / 2, kColumns = 8 * kBlocks;

  /// The row, of kColumns, that is the r-th of block j.
  __device__ static int row_of_block(int j, int r) { return r / 2 * kElements + j * 2 + r % 2; }
};

/// Where a piece lies in a tile in shared memory, in bytes; a row has `pieces`. They are permuted, so that the eight
/// rows that a matrix load reads at once are in different banks: successive rows, or those of a block.
struct InOrder {
  template <class T, int pieces = Pieces<T>::kOfRow>
  __device__ static uint32_t place(int row, int piece) {
    return static_cast<uint32_t>(row * pieces + (piece ^ (row % 8))) * 16;
  }
};
struct InBlocks {
  template <class T, int pieces = Pieces<T>::kOfRow>
  __device__ static uint32_t place(int row, int piece) {
    return static_cast<uint32_t>(row * pieces + (piece ^ (row / Pieces<T>::kElements % 4 * 2 + row % 2))) * 16;
  }
};

/// Starts to copy a tile of `rows` rows of `columns` elements, of which rows_left rows and columns_left columns are
/// there; the others become 0.
template <int rows, int columns, class Order, class T>
__device__ void start_tile(uint32_t to, const T* from, int64_t stride, int rows_left, int columns_left) {
  constexpr int elements = Pieces<T>::kElements, pieces = columns / elements, step = kSm80Threads / pieces;
  static_assert(rows % step == 0 && pieces % 8 == 0);
  const int piece = static_cast<int>(threadIdx.x) % pieces, first = static_cast<int>(threadIdx.x) / pieces;
  const int bytes = min(max(columns_left - piece * elements, 0), elements) * static_cast<int>(sizeof(T));
#pragma unroll
  for (int row = first; row < rows; row += step) {
    copy_or_clear<16>(to + Order::template place<T, pieces>(row, piece), from + (row * stride + piece * elements),
                      row < rows_left ? bytes : 0);
  }
}

/// A chunk has `outputs` rows of a value's weight, and then as many of a gate's.
template <class T, int outputs>
constexpr uint32_t kHalfChunkBytes = outputs * kMostFeatures * sizeof(T);

/// Starts to copy the chunk of both weights that begins with the output `first`, of `count`.
template <class T, int outputs, class Order>
__device__ void start_chunk(uint32_t to, const Layer& value, const Layer& gate, int first, int count,
                            int value_features, int gate_features) {
  const auto start = [&](uint32_t half, const Operand& weight, int features) {
    start_tile<outputs, kMostFeatures, Order>(half, static_cast<const T*>(weight.data) + first * weight.row_stride,
                                              weight.row_stride, count - first, features);
  };
  start(to, value.weight, value_features);
  start(to + kHalfChunkBytes<T, outputs>, gate.weight, gate_features);
}

/// Four matrices of a weight.
template <class T>
__device__ inline void load_weights(uint32_t (&matrices)[4], uint32_t row) {
  load_matrices(matrices, row);
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (uint32_t& matrix : matrices) matrix = to_tf32(__uint_as_float(matrix));
  }
}

__device__ inline float sum_of_quad(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

/// The layer norm of positions in registers: words[k][i + h * positions] is the register of lane 4g + q of piece 2k + h
/// of its i-th position; the lanes with the same g share positions. Features from `features` on, which is that of a
/// piece, are 0 and stay 0.
template <class T, int positions>
__device__ void normalize(uint32_t (&words)[Pieces<T>::kSteps][2 * positions], int features, const Norm& norm) {
  constexpr int elements = Pieces<T>::kElements, packed = Pieces<T>::kOfRegister;
  const auto for_each = [&](const auto& f) {
#pragma unroll
    for (int k = 0; k < Pieces<T>::kSteps; ++k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if ((2 * k + h) * elements < features) f(k, h);
      }
    }
  };
  const auto read = [&](uint32_t word, float (&values)[packed]) {
    if constexpr (packed == 1) {
      values[0] = __uint_as_float(word);
    } else {
      unpack(reinterpret_cast<const Packed<T, packed>&>(word), values);
    }
  };
  const float by = 1.f / static_cast<float>(features);
  float mean[positions] = {}, rest[positions] = {}, rstd[positions] = {}, values[packed];
  for_each([&](int k, int h) {
#pragma unroll
    for (int i = 0; i < positions; ++i) {
      read(words[k][i + h * positions], values);
#pragma unroll
      for (const float value : values) mean[i] += value;
    }
  });
#pragma unroll
  for (int i = 0; i < positions; ++i) mean[i] = sum_of_quad(mean[i]) * by;
  for_each([&](int k, int h) {
#pragma unroll
    for (int i = 0; i < positions; ++i) {
      read(words[k][i + h * positions], values);
#pragma unroll
      for (const float value : values) {
        const float difference = value - mean[i];
        rest[i] += difference;
        rstd[i] = fmaf(difference, difference, rstd[i]);
      }
    }
  });
#pragma unroll
  for (int i = 0; i < positions; ++i) {
    // What rounding has left in the differences, so that a constant row becomes 0.
    rest[i] = sum_of_quad(rest[i]) * by;
    mean[i] += rest[i];
    const float variance = fmaf(-rest[i], rest[i], sum_of_quad(rstd[i]) * by);
    rstd[i] = rsqrtf(fmaxf(variance, 0.f) + norm.eps);
  }
  const auto *const weight = static_cast<const T*>(norm.weight), *const bias = static_cast<const T*>(norm.bias);
  for_each([&](int k, int h) {
    const int feature = (2 * k + h) * elements + static_cast<int>(threadIdx.x) % 4 * packed;
    float weights[packed], biases[packed];
#pragma unroll
    for (int v = 0; v < packed; ++v) {
      weights[v] = weight != nullptr ? static_cast<float>(weight[feature + v]) : 1.f;
      biases[v] = bias != nullptr ? static_cast<float>(bias[feature + v]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < positions; ++i) {
      uint32_t& word = words[k][i + h * positions];
      read(word, values);
#pragma unroll
      for (int v = 0; v < packed; ++v) values[v] = fmaf((values[v] - mean[i]) * rstd[i], weights[v], biases[v]);
      if constexpr (packed == 1) {
        word = to_tf32(values[0]);
      } else {
        reinterpret_cast<Packed<T, packed>&>(word) = pack<T, packed>(values);
      }
    }
  });
}

/// The tile of a CTA.
template <int positions>
struct PairTile {
  int row, first;  // the row of the pair matrix, and the first position in it

  __device__ explicit PairTile(int n) {
    const int in_row = (n + positions - 1) / positions;
    row = static_cast<int>(blockIdx.x) / in_row;
    first = static_cast<int>(blockIdx.x) % in_row * positions;
  }
  static int64_t count(int64_t n) { return n * ((n + positions - 1) / positions); }
};

}  // namespace torchops::cuda::gemm
