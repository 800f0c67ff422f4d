#pragma once

// Shared by both steps of a triangle update, for 16-bit elements and in TF32, on every GPU from compute capability 8.0
// on, up to 128 features and channels. A CTA has a tile of positions, all in one row of the pair matrix. Its warps take
// their positions into registers, normalise them there, and multiply them with weights that come through shared memory
// in chunks of outputs, while the next chunks are being copied.

#include "cuda/base/device.h"
#include "cuda/base/quads.cuh"
#include "cuda/gemm/norm_vector.cuh"
#include "cuda/gemm/sm80/kernel.cuh"
#include "cuda/gemm/ways.h"

namespace torchops::cuda::gemm {

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

  /// The row, of kColumns, that is the r-th of block j; and how far the next block is in shared memory, in bytes.
  __device__ static int row_of_block(int j, int r) { return r / 2 * kElements + j * 2 + r % 2; }
  static constexpr uint32_t kBlockBytes = 2 * kMostFeatures * sizeof(T);
};

/// Where a piece lies in a tile in shared memory, in bytes; a row has `pieces`. They are permuted, so that the eight
/// rows that a matrix load reads at once are in different banks: successive rows, or those of a block. In tiles that
/// are aligned to kTileAlignment, what is `pieces_on(n)` further on lies at the place ^ pieces_on(n), if n is a
/// multiple of a power of two above the piece.
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

constexpr uint32_t kTileAlignment = kMostFeatures * sizeof(float);
__device__ constexpr uint32_t pieces_on(int pieces) { return static_cast<uint32_t>(pieces) * 16; }

/// Starts to copy a piece, or makes it 0. (The form with a number of bytes takes five more instructions.)
__device__ inline void copy_or_clear_piece(uint32_t to, const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred clear;\n"
      "setp.eq.u32 clear, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, clear;\n"
      "}" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

/// What a thread copies of tiles of `rows` rows of `columns` elements. Instructions that address memory count here: a
/// warp has few products of each chunk.
template <class T, int rows, int columns, class Order>
class TileCopies {
 public:
  static constexpr uint32_t kBytes = rows * columns * sizeof(T);

  /// Starts to copy a tile, of which rows_left rows and columns_left columns are there, rounded up to whole pieces; the
  /// others become 0.
  __device__ static void start(unsigned char* to, const T* from, int64_t stride, int rows_left, int columns_left) {
    if (piece() * kElements >= columns_left) rows_left = 0;
    from += row() * stride + piece() * kElements;
    const uint32_t tile = shared_address(to);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copy_or_clear_piece(tile + place(i), from, row() + i * kStep < rows_left);
      from += kStep * stride;
    }
  }

  /// Rounds what this thread has copied to TF32, in place, so that not every reader has to.
  __device__ static void round(unsigned char* tile) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        auto* const at = reinterpret_cast<Packed<float, 4>*>(tile + place(i));
        Packed<float, 4> words = *at;
#pragma unroll
        for (float& word : words.at) word = __uint_as_float(to_tf32(word));
        *at = words;
      }
    }
  }

 private:
  static constexpr int kElements = Pieces<T>::kElements, kPieces = columns / kElements;
  static constexpr int kStep = kSm80Threads / kPieces, kCopies = rows / kStep;
  static_assert(rows % kStep == 0 && kPieces % 8 == 0);

  __device__ static int row() { return static_cast<int>(threadIdx.x) / kPieces; }
  __device__ static int piece() { return static_cast<int>(threadIdx.x) % kPieces; }
  __device__ static uint32_t place(int i) { return Order::template place<T, kPieces>(row() + i * kStep, piece()); }
};

/// A chunk of the weight of one of two layers, which has parts, and its place among slots. Layers follow each other, or
/// take turns.
struct Chunk {
  static constexpr int kLayers = 2;
  int layer = 0, part = 0, slot = 0;

  template <bool takes_turns = false>
  __device__ void advance(int parts, int slots) {
    int &inner = takes_turns ? layer : part, &outer = takes_turns ? part : layer;
    if (++inner == (takes_turns ? kLayers : parts)) {
      inner = 0;
      ++outer;
    }
    if (++slot == slots) slot = 0;
  }
};

/// Calls f(k) for the steps of an inner product, of which only the first `features` terms are not 0. Branches for each
/// step would keep loads from overtaking products.
template <class T, class F>
__device__ void for_each_step(int features, const F& f) {
  constexpr int half = Pieces<T>::kSteps / 2;
#pragma unroll
  for (int first = 0; first < 2 * half; first += half) {
    if (first * 2 * Pieces<T>::kElements >= features) continue;
#pragma unroll
    for (int k = first; k < first + half; ++k) f(k);
  }
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
  const NormValues<T> weight{norm.weight}, bias{norm.bias};
  for_each([&](int k, int h) {
    const int feature = (2 * k + h) * elements + static_cast<int>(threadIdx.x) % 4 * packed;
    float weights[packed], biases[packed];
#pragma unroll
    for (int v = 0; v < packed; ++v) {
      weights[v] = weight.at(feature + v, 1.f);
      biases[v] = bias.at(feature + v, 0.f);
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
