#pragma once

// Shared by both steps of a triangle update if x or the channels have more than 128 features. Their products are then
// those of wide.cuh: sums of any length, with weights that stream through shared memory.
//
// Layer norms are folded into the weights as in pair.cuh, once per call. The moments of x come from a pass of their
// own: many CTAs multiply the same tile, and each would have to measure it.

#include "cuda/gemm/sm90/pair.cuh"
#include "cuda/gemm/sm90/wide.cuh"

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

constexpr int kMomentRows = 4, kMomentWarps = 8;  // rows of a warp at a time, warps of a block

/// The moments of n x n rows of c features; c is a multiple of 8. Sums are of differences to the first element.
template <class T>
__global__ void __launch_bounds__(32 * kMomentWarps)
    row_moments_kernel(const T* x, int64_t plane_stride, int64_t row_stride, int n, int c, float eps,
                       ScaleAndShift* to) {
  using Piece = cutlass::AlignedArray<T, 8>;
  const int lane = threadIdx.x;
  const int64_t count = int64_t{n} * n, first = (int64_t{blockIdx.x} * kMomentWarps + threadIdx.y) * kMomentRows;
  const cutlass::NumericArrayConverter<float, T, 8> widen;
  const T* rows[kMomentRows];
  float origins[kMomentRows], sums[kMomentRows] = {}, squares[kMomentRows] = {};
#pragma unroll
  for (int i = 0; i < kMomentRows; ++i) {
    const int64_t at = first + i < count ? first + i : count - 1;
    rows[i] = x + at / n * plane_stride + at % n * row_stride;
    origins[i] = static_cast<float>(rows[i][0]);
  }
  for (int column = lane * 8; column < c; column += 32 * 8) {
    Piece pieces[kMomentRows];
#pragma unroll
    for (int i = 0; i < kMomentRows; ++i) pieces[i] = *reinterpret_cast<const Piece*>(rows[i] + column);
#pragma unroll
    for (int i = 0; i < kMomentRows; ++i) {
      const auto values = widen(pieces[i]);
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const float difference = values[v] - origins[i];
        sums[i] += difference;
        squares[i] = fmaf(difference, difference, squares[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kMomentRows; ++i) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], distance);
      squares[i] += __shfl_xor_sync(~0u, squares[i], distance);
    }
    if (lane == i && first + i < count) {
      to[first + i] = ScaleAndShift::of(origins[i], sums[i], squares[i], c, eps);
    }
  }
}

template <class T>
void launch_row_moments(const PairProblem& p, ScaleAndShift* to, cudaStream_t stream) {
  const int64_t of_block = kMomentRows * kMomentWarps, count = int64_t{p.n} * p.n;
  row_moments_kernel<T>
      <<<static_cast<unsigned>((count + of_block - 1) / of_block), dim3(32, kMomentWarps), 0, stream>>>(
          static_cast<const T*>(p.x.data), p.x.batch_stride, p.x.row_stride, p.n, p.c, p.norm_x.eps, to);
}

/// A weight (rows x k) with a layer norm folded in, its rows from `rows` to `padded` being zeros,
/// and their terms times `scale`. With `in_blocks`, rows are at place_in_blocks().
template <class T>
struct FoldedWeight {
  const T *weight, *bias, *norm_weight, *norm_bias;
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

constexpr int kWideFoldWarps = 4;

/// A warp makes one row of one of the weights (blockIdx.y).
template <class T, int count>
__global__ void __launch_bounds__(32 * kWideFoldWarps) fold_weights_kernel(const FoldedWeights<T, count> all) {
  const FoldedWeight<T>& f = all.of[blockIdx.y];
  const int row = static_cast<int>(blockIdx.x) * kWideFoldWarps + threadIdx.y;
  if (row >= f.padded) return;
  const bool exists = row < f.rows;
  const int place = f.in_blocks ? place_in_blocks(row) : row;
  float sum = 0.f, shift = 0.f;
  for (int column = threadIdx.x; column < f.k; column += 32) {
    T folded{};
    if (exists) {
      const auto value = static_cast<float>(f.weight[row * f.row_stride + column]);
      const float gamma = f.norm_weight == nullptr ? 1.f : static_cast<float>(f.norm_weight[column]);
      if (f.norm_bias != nullptr) shift = fmaf(value, static_cast<float>(f.norm_bias[column]), shift);
      folded = static_cast<T>(value * gamma);
      sum += static_cast<float>(folded);
    }
    f.to[int64_t{place} * f.k + column] = folded;
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
  const dim3 blocks(static_cast<unsigned>((rows + kWideFoldWarps - 1) / kWideFoldWarps), count);
  fold_weights_kernel<T, count><<<blocks, dim3(32, kWideFoldWarps), 0, stream>>>(all);
}

/// Tiles of positions, numbered row after row, with `in_row` of them in each row; what TileMap is for a matrix.
template <class Copy, class Element, int rows, int columns>
struct PositionMap : PlaneMap<Copy, Element, rows, columns> {
  using Planes = PlaneMap<Copy, Element, rows, columns>;
  int in_row;

  static PositionMap of(const PairProblem& p, int in_row) {
    return {Planes::of(p.x.data, p.x.row_stride, p.x.batch_stride, p.n, p.c, p.n), in_row};
  }
  CUTLASS_DEVICE void load(Element* shared, int tile, int column, cutlass::arch::ClusterTransactionBarrier& barrier,
                           uint16_t ctas = 0) const {
    Planes::load(shared, tile % in_row, column, tile / in_row, barrier, ctas);
  }
};

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
