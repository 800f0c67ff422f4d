#pragma once

#include "cuda/rows.cuh"

// Long rows with parameters for each column, such as a weight. Read from the second-level cache for every row, two
// parameters of 16 bits would be twice the traffic of the row itself. So each cluster of a grid takes several rows, and
// its blocks keep the parameters of their columns in shared memory.
namespace torchops::cuda {

/// Parameters of columns in shared memory, where each thread keeps the kVectors vectors of its own columns, for rows
/// that are whole vectors from a 16-byte boundary on. No other thread reads them.
template <class T, int kVectors>
class HeldVectors {
 public:
  static constexpr int kBytes = kVectors * kVectorBytes;  // per thread

  /// Uses the `index`-th such place of the block.
  __device__ explicit HeldVectors(int index) {
    extern __shared__ uint4 memory[];
    own_ = memory + index * kVectors * blockDim.x + threadIdx.x;
  }
  __device__ void load(const T* parameter, int64_t columns, const Cluster& group) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t vector = group.rank + int64_t{k} * group.size;
      if (vector < columns / kVectorSize<T>) {
        own_[k * blockDim.x] = __ldg(reinterpret_cast<const uint4*>(parameter) + vector);
      }
    }
  }
  __device__ Packed<T, kVectorSize<T>> operator[](int k) const {
    return *reinterpret_cast<const Packed<T, kVectorSize<T>>*>(own_ + k * blockDim.x);
  }

 private:
  uint4* own_;
};

/// rows_kernel() for rows that clusters take in turn. Operator::Held is what it keeps of its parameters for all of
/// them.
template <class T, class Row, class Operator>
__global__ __launch_bounds__(Cluster::kMaxThreads,
                             sizeof(T) == 8 ? 1 : Cluster::kMinBlocks) void held_rows_kernel(const Rows<T> rows,
                                                                                             const Operator op) {
  Cluster group;
  const typename Operator::Held held(op, rows.columns, group);
  for (; group.row < rows.rows; group.advance()) {
    Row row(rows, group);
    op(row, group, held);
  }
}

}  // namespace torchops::cuda
