#pragma once

#include "cuda/rows/rows.cuh"

// Short rows without gaps, whose columns are no whole vectors: a thread that read its row would read single elements.
// Here a warp brings the rows of its threads to shared memory by whole vectors, and takes them back.
namespace torchops::cuda {

/// A row of one thread. x and y lie at 16-byte boundaries.
template <class T>
class RowOfWarp {
  static constexpr int kSize = kVectorSize<T>;

 public:
  using Rows = cuda::Rows<T>;
  using Group = Lanes<1>;

  static constexpr int64_t kMostColumns = 32;

  /// Whether this may be the view of such rows.
  static bool fits(const Rows& rows) {
    const auto is_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
    return rows.columns <= kMostColumns && rows.x_stride == rows.columns && rows.y_stride == rows.columns &&
           is_aligned(rows.x) && is_aligned(rows.y);
  }
  /// Per thread, for rows of so many columns.
  static int64_t shared_bytes(int64_t columns) { return columns * static_cast<int64_t>(sizeof(T)); }

  __device__ RowOfWarp(const Rows& rows, const Group& group)
      : columns_(static_cast<int>(rows.columns)), lane_(static_cast<int>(threadIdx.x) % kWarp) {
    const int64_t first = group.row - lane_, count = min(max(rows.rows - first, int64_t{0}), int64_t{kWarp});
    exists_ = lane_ < count;
    elements_ = static_cast<int>(count) * columns_;
    y_ = rows.y + first * columns_;
    // 32 rows are whole vectors.
    extern __shared__ uint4 memory[];
    warp_ = reinterpret_cast<T*>(memory) + (static_cast<int>(threadIdx.x) - lane_) * columns_;
    copy(warp_, rows.x + first * columns_);
  }

  template <class F>
  __device__ void for_each(F f) const {
    if (!exists_) return;
    const T* const row = warp_ + lane_ * columns_;
    for (int i = 0; i < columns_; i += kChains) {
#pragma unroll
      for (int j = 0; j < kChains; ++j) {
        if (i + j < columns_) f(static_cast<A>(row[i + j]), j);
      }
    }
  }

  template <class P, int n, class F>
  __device__ void write(const Parameters<P, n>& parameters, F f) const {
    T* const row = warp_ + lane_ * columns_;
    for (int i = 0; exists_ && i < columns_; ++i) {
      A values[1] = {static_cast<A>(row[i])};
      f(values, [&](int which, auto& out) { parameters.read(which, i, out); });
      row[i] = static_cast<T>(values[0]);
    }
    __syncwarp();
    copy(y_, warp_);
  }

 private:
  using A = Accumulate<T>;

  /// Of all elements of the warp.
  __device__ void copy(T* to, const T* from) const {
    const int whole = elements_ / kSize * kSize;
    for (int i = lane_ * kSize; i < whole; i += kWarp * kSize) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
    if (whole + lane_ < elements_) to[whole + lane_] = from[whole + lane_];
    __syncwarp();
  }

  const int columns_, lane_;
  int elements_;
  bool exists_;
  T *y_, *warp_;
};

}  // namespace torchops::cuda
