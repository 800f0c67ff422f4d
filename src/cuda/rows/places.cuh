#pragma once

#include "cuda/base/vector.cuh"
#include "cuda/rows/groups.cuh"

namespace torchops::cuda {

/// Which elements of a row belong to a thread that has up to `kVectors` vectors of it. The row may begin and end
/// anywhere: elements before the first and after the last 16-byte boundary are its edges, which are read one by one.
template <class T, class Group, int kVectors>
class RowPlaces {
 protected:
  static constexpr int kSize = kVectorSize<T>;
  static constexpr int kEdges = static_cast<int>(ceil_div(2 * (kSize - 1), Group::kMinSize));  // of a thread, at most

  /// Of the row of `group` among `rows`, which begins at x; a row that does not exist has no elements.
  __device__ RowPlaces(const T* x, int64_t rows, int64_t columns, const Group& group)
      : rank_(group.rank), size_(group.size), first_(group.first(kVectors)), step_(group.step()) {
    const int count = group.row < rows ? static_cast<int>(columns) : 0;
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(x) / sizeof(T) % kSize);
    head_ = min((kSize - misaligned) % kSize, count);
    vectors_ = (count - head_) / kSize;
    edges_ = count - vectors_ * kSize;
  }

  __device__ bool has_vector(int k) const { return vector(k) < vectors_; }
  __device__ int column(int k) const { return head_ + vector(k) * kSize; }
  __device__ bool has_edge(int k) const { return edge(k) < edges_; }
  __device__ int edge_column(int k) const { return edge(k) < head_ ? edge(k) : edge(k) + vectors_ * kSize; }

  /// The columns before the first boundary.
  __device__ int head() const { return head_; }

 private:
  __device__ int vector(int k) const { return first_ + k * step_; }
  __device__ int edge(int k) const { return rank_ + k * size_; }

  const int rank_, size_, first_, step_;
  int head_, vectors_, edges_;
};

}  // namespace torchops::cuda
