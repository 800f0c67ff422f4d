#pragma once

// Shared by both steps of a triangle update if x or the channels have more than 128 features. The weights then stream
// through shared memory, and layer norms are folded into them once per call (see triangle/steps.cuh).

#include "cuda/gemm/sm90/products/streamed_weights.cuh"
#include "cuda/gemm/sm90/triangle/steps.cuh"

namespace torchops::cuda::gemm {

/// Mean and rstd of a position, in the form that products use (see Moments).
struct ScaleAndShift {
  float scale, shift;

  static __device__ ScaleAndShift of(float origin, float sum, float squares, int count, float eps) {
    Moments moments;
    moments.set(0, origin, sum, squares, count, eps);
    return {moments.scale[0], moments.shift[0]};
  }
};

/// The row of a tile in which a thread of a warpgroup has sums, of the m-th matrix instruction; r is 0 or 1.
CUTLASS_DEVICE int row_of_sums(int thread, int m, int r) {
  return m * kPairRows + thread / 32 * 16 + thread % 32 / 4 + r * 8;
}

/// A weight (rows x k) with a layer norm folded in, its rows from `rows` to `padded` being zeros, and their terms times
/// `scale`. With `in_blocks`, rows are at place_in_blocks().
template <class T>
struct FoldedWeight {
  const T *weight, *bias;
  NormValues<T> norm_weight, norm_bias;
  int64_t row_stride;
  int rows, padded, k;
  float scale;
  T* to;
  ColumnTerms* terms;
  bool in_blocks = false;
};

template <class T, int count>
struct FoldedWeights {
  FoldedWeight<T> of[count];
};

/// The order of 32 columns of a product in which the pairs that a thread has in four blocks of 8 accumulator columns
/// are 8 neighbouring columns of the result, 16 bytes: the place of a column.
CUTLASS_HOST_DEVICE int place_in_blocks(int column) {
  return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2;
}

constexpr int kNormFoldWarps = 4;

/// A warp makes one row of one of the weights (blockIdx.y).
template <class T, int count>
__global__ void __launch_bounds__(32 * kNormFoldWarps) fold_weights_kernel(const FoldedWeights<T, count> all) {
  const FoldedWeight<T>& f = all.of[blockIdx.y];
  const int row = static_cast<int>(blockIdx.x) * kNormFoldWarps + threadIdx.y;
  if (row >= f.padded) return;
  const bool exists = row < f.rows;
  const int place = f.in_blocks ? place_in_blocks(row) : row;
  using Piece = cutlass::AlignedArray<T, 8>;
  const cutlass::NumericArrayConverter<float, T, 8> widen;
  const cutlass::NumericArrayConverter<T, float, 8> round;
  float sum = 0.f, shift = 0.f;
  for (int column = threadIdx.x * 8; column < f.k; column += 32 * 8) {
    Piece folded{};
    if (exists) {
      auto values = widen(*reinterpret_cast<const Piece*>(f.weight + row * f.row_stride + column));
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        if (f.norm_bias.data != nullptr) shift = fmaf(values[v], f.norm_bias.at(column + v, 0.f), shift);
        values[v] *= f.norm_weight.at(column + v, 1.f);
      }
      static_cast<cutlass::Array<T, 8>&>(folded) = round(values);
      values = widen(folded);
#pragma unroll
      for (int v = 0; v < 8; ++v) sum += values[v];
    }
    *reinterpret_cast<Piece*>(f.to + int64_t{place} * f.k + column) = folded;
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
    shift += __shfl_xor_sync(~0u, shift, distance);
  }
  if (threadIdx.x != 0) return;
  if (exists && f.bias != nullptr) shift += static_cast<float>(f.bias[row]);
  f.terms[place] = {f.scale * sum, f.scale * shift};
}

template <class T, int count>
void launch_fold_weights(const FoldedWeights<T, count>& all, cudaStream_t stream) {
  int rows = 0;
  for (const auto& f : all.of) rows = std::max(rows, f.padded);
  const dim3 blocks(static_cast<unsigned>((rows + kNormFoldWarps - 1) / kNormFoldWarps), count);
  fold_weights_kernel<T, count><<<blocks, dim3(32, kNormFoldWarps), 0, stream>>>(all);
}

/// Parts of a workspace, each aligned to 16 bytes.
class Workspace {
 public:
  explicit Workspace(void* memory) : memory_(static_cast<unsigned char*>(memory)) {}

  /// Room for `count` elements of T; null if the workspace is only being measured.
  template <class T>
  T* take(int64_t count) {
    const int64_t at = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + at);
  }
  int64_t bytes() const { return bytes_; }

 private:
  unsigned char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace torchops::cuda::gemm
