#pragma once

#include <limits>

#include "cuda/vector.cuh"

// The device side of operators that reduce the rows of a matrix and write rows of the same length. An operator is
// written once, for two types that the launch chooses by the length of the rows:
//   Group  the threads that share a row: some lanes of a warp, a block, or the blocks of a cluster
//   Row    their view of it: for_each() reads it, possibly again, and write() writes the output
// Every reduction has a fixed order, so equal inputs give equal bits.
namespace torchops::cuda {

/// Rows with unit column stride. y may be x.
template <class T>
struct Rows {
  const T* x;
  T* y;
  int64_t rows, columns, x_stride, y_stride;
};

struct Sum {
  template <class A>
  static constexpr A identity = A{0};
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a + b;
  }
};

/// Ignores NaN unless all values are NaN.
struct Max {
  template <class A>
  static constexpr A identity = -std::numeric_limits<A>::infinity();
  template <class A>
  __device__ A operator()(A a, A b) const {
    return fmax(a, b);
  }
};

template <int kWidth, class A, class Op>
__device__ inline A reduce_lanes(A value, Op op) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

/// The number of elements, their mean, and the sum of their squared distances from it.
template <class A>
struct Spread {
  A count, mean, squares;
};

/// Chan, Golub and LeVeque 1983.
template <class A>
struct Pooled {
  __device__ Spread<A> operator()(const Spread<A>& a, const Spread<A>& b) const {
    const A count = a.count + b.count, part = b.count / count, difference = b.mean - a.mean;
    return {count, a.mean + difference * part, a.squares + b.squares + difference * difference * a.count * part};
  }
};

constexpr int kWarp = 32;

/// The number of this block. A grid with more blocks than its x dimension allows continues along y.
__device__ inline int64_t block_number() { return int64_t{blockIdx.y} * gridDim.x + blockIdx.x; }

/// kLanes neighbouring threads of a warp; a block has kMaxThreads / kLanes rows.
template <int kLanes>
class Lanes {
 public:
  static constexpr bool kOneBlock = true, kWholeBlocks = false;
  static constexpr int kMinSize = kLanes, kMaxThreads = 128, kMinBlocks = 8;

  __device__ Lanes()
      : row(block_number() * (kMaxThreads / kLanes) + threadIdx.x / kLanes), rank(threadIdx.x % kLanes) {}

  /// Reduces one value per thread of this block with `op`; all threads get the result. Each use needs its own kUse.
  template <int kUse, class A, class Op>
  __device__ A reduce(A value, Op op) {
    return reduce_lanes<kLanes>(value, op);
  }

  /// Combines what reduce() returned in each block of the group by op(total, part). At most once in a kernel.
  template <class State, class Op>
  __device__ State merge(State state, Op) {
    return state;
  }

  static constexpr int size = kLanes;
  const int64_t row;
  const int rank;
};

// Each kUse has its own array, so two reductions need no barrier between them.
template <int kUse, class A, class Op>
__device__ inline A reduce_block(A value, Op op) {
  __shared__ A partial[kWarp];
  value = reduce_lanes<kWarp>(value, op);
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = lane < blockDim.x / kWarp ? partial[lane] : Op::template identity<A>;
  return reduce_lanes<kWarp>(value, op);
}

/// A block of up to 512 threads, a multiple of 32, per row. At least two blocks run on a multiprocessor: one moves
/// memory while the other reduces.
class Block {
 public:
  static constexpr bool kOneBlock = true, kWholeBlocks = true;
  static constexpr int kMinSize = kWarp, kMaxThreads = 512, kMinBlocks = 2;

  __device__ Block() : row(block_number()), size(blockDim.x), rank(threadIdx.x) {}

  template <int kUse, class A, class Op>
  __device__ A reduce(A value, Op op) {
    return reduce_block<kUse>(value, op);
  }

  template <class State, class Op>
  __device__ State merge(State state, Op) {
    return state;
  }

  const int64_t row;
  const int size, rank;
};

/// The blocks of a cluster (compute capability 9.0). Each block sends its state to the shared memory of all others.
class Cluster {
 public:
  // A grid of clusters is never too long for x: its rows have at least 64 KiB.
  static constexpr bool kOneBlock = false, kWholeBlocks = false;
  static constexpr int kMinSize = kWarp, kMaxThreads = 512, kMinBlocks = 2;
  static constexpr int kMaxBlocks = 16;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ Cluster()
      : blocks_(special_blocks()),
        block_(special_rank()),
        row(block_number() / blocks_),
        size(blocks_ * blockDim.x),
        rank(block_ * blockDim.x + threadIdx.x) {
    // A block must run before others write to it. merge() waits for this, after the loads.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  template <int kUse, class A, class Op>
  __device__ A reduce(A value, Op op) {
    return reduce_block<kUse>(value, op);
  }

  template <class State, class Op>
  __device__ State merge(State state, Op op) {
    static_assert(sizeof(State) % sizeof(uint32_t) == 0);
    __shared__ State from_block[kMaxBlocks];
    wait();
    if (threadIdx.x < blocks_) put(&from_block[block_], threadIdx.x, state);
    __syncwarp();  // .aligned: the whole warp arrives together
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    wait();
    State total = from_block[0];
    for (int i = 1; i < blocks_; ++i) total = op(total, from_block[i]);
    return total;
  }

 protected:
  static __device__ int special_blocks() {
    int value;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
    return value;
  }
  static __device__ int special_rank() {
    int value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
    return value;
  }
  static __device__ void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
  template <class State>
  static __device__ void put(State* shared, int block, const State& state) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(block));
    const auto* const words = reinterpret_cast<const uint32_t*>(&state);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(State) / sizeof(uint32_t)); ++i) {
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address + 4 * i), "r"(words[i]) : "memory");
    }
  }

  const int blocks_, block_;

 public:
#else
  // Never launched: the host checks which architecture the code was compiled for.
  __device__ Cluster() : row(0), size(1), rank(0) { __trap(); }
  template <int kUse, class A, class Op>
  __device__ A reduce(A value, Op) {
    return value;
  }
  template <class State, class Op>
  __device__ State merge(State state, Op) {
    return state;
  }
#endif
  const int64_t row;
  const int size, rank;
};

/// A row that is read once. Per thread, up to kVectors vectors stay in registers, as in memory, and up to kStaged more
/// in shared memory that no other thread reads. The row may begin and end anywhere: elements before the first and after
/// the last 16-byte boundary are read one by one. x and y must have the same distance to such a boundary.
template <class T, class Group, int kVectors, int kStaged = 0>
class RowInRegisters {
 public:
  static constexpr int kCapacity = kVectors + kStaged;         // vectors per thread
  static constexpr int kSharedBytes = kStaged * kVectorBytes;  // per thread

  __device__ RowInRegisters(const Rows<T>& rows, const Group& group)
      : rank_(group.rank), size_(group.size), y_(rows.y + group.row * rows.y_stride) {
    const T* const x = rows.x + group.row * rows.x_stride;
    const int columns = group.row < rows.rows ? static_cast<int>(rows.columns) : 0;
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(x) / sizeof(T) % kSize);
    head_ = min((kSize - misaligned) % kSize, columns);
    vectors_ = (columns - head_) / kSize;
    edges_ = columns - vectors_ * kSize;
#pragma unroll
    for (int k = kVectors; k < kCapacity; ++k) {
      if (vector(k) < vectors_) copy_vector(staged(k), x + column(k));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector(k) < vectors_) body_[k] = load<T, kSize>(x + column(k));
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (edge(k) < edges_) edge_[k] = x[edge_column(k)];
    }
  }

  /// Calls f(value, index in its vector) for every element of this thread.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector(k) < vectors_) {
        A values[kSize];
        unpack(body_[k], values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) f(values[i], i);
      }
    }
    if constexpr (kStaged > 0) wait_for_copies();
#pragma unroll
    for (int k = kVectors; k < kCapacity; ++k) {
      if (vector(k) < vectors_) {
        A values[kSize];
        unpack(*staged(k), values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) f(values[i], i);
      }
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (edge(k) < edges_) f(static_cast<A>(edge_[k]), 0);
    }
  }

  /// Calls f(values, column) with arrays of neighbouring elements, which start at `column`; f makes them the output.
  template <class F>
  __device__ void write(F f) const {
#pragma unroll
    for (int k = 0; k < kCapacity; ++k) {
      if (vector(k) < vectors_) {
        A values[kSize];
        unpack(k < kVectors ? body_[k < kVectors ? k : 0] : *staged(k), values);
        f(values, int64_t{column(k)});
        store(y_ + column(k), pack<T, kSize>(values));
      }
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (edge(k) < edges_) {
        A values[1] = {static_cast<A>(edge_[k])};
        f(values, int64_t{edge_column(k)});
        y_[edge_column(k)] = static_cast<T>(values[0]);
      }
    }
  }

 private:
  using A = Accumulate<T>;
  static constexpr int kSize = kVectorSize<T>;
  static constexpr int kEdges = static_cast<int>(ceil_div(2 * (kSize - 1), Group::kMinSize));

  static __device__ Packed<T, kSize>* staged(int k) {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<Packed<T, kSize>*>(memory) + (k - kVectors) * blockDim.x + threadIdx.x;
  }
  __device__ int vector(int k) const { return rank_ + k * size_; }
  __device__ int column(int k) const { return head_ + vector(k) * kSize; }
  __device__ int edge(int k) const { return rank_ + k * size_; }
  __device__ int edge_column(int k) const { return edge(k) < head_ ? edge(k) : edge(k) + vectors_ * kSize; }

  const int rank_, size_;
  T* const y_;
  int head_, vectors_, edges_;
  Packed<T, kSize> body_[kVectors];
  T edge_[kEdges];
};

/// A row of any length, read from memory each time, kSize elements at once. With kSize = 1, x and y may lie anywhere.
template <class T, class Group, int kSize>
class RowInMemory {
 public:
  __device__ RowInMemory(const Rows<T>& rows, const Group& group)
      : rank_(group.rank),
        size_(group.size),
        x_(rows.x + group.row * rows.x_stride),
        y_(rows.y + group.row * rows.y_stride) {
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(x_) / sizeof(T) % kSize);
    head_ = static_cast<int>(min(int64_t{(kSize - misaligned) % kSize}, rows.columns));
    vectors_ = (rows.columns - head_) / kSize;
    edges_ = static_cast<int>(rows.columns - vectors_ * kSize);
  }

  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll 4
    for (int64_t i = rank_; i < vectors_; i += size_) {
      A values[kSize];
      unpack(load<T, kSize>(x_ + head_ + i * kSize), values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) f(values[j], j);
    }
    if (rank_ < edges_) f(static_cast<A>(x_[edge_column()]), 0);
  }

  template <class F>
  __device__ void write(F f) const {
    for (int64_t i = rank_; i < vectors_; i += size_) {
      const int64_t column = head_ + i * kSize;
      A values[kSize];
      unpack(load<T, kSize>(x_ + column), values);
      f(values, column);
      store(y_ + column, pack<T, kSize>(values));
    }
    if (rank_ < edges_) {
      A values[1] = {static_cast<A>(x_[edge_column()])};
      f(values, edge_column());
      y_[edge_column()] = static_cast<T>(values[0]);
    }
  }

 private:
  using A = Accumulate<T>;
  static_assert(2 * (kSize - 1) <= Group::kMinSize);

  __device__ int64_t edge_column() const { return rank_ < head_ ? rank_ : rank_ + vectors_ * kSize; }

  const int rank_, size_;
  const T* const x_;
  T* const y_;
  int head_, edges_;
  int64_t vectors_;
};

/// An operator is a function object, called with the Row and the Group of each thread.
template <class T, class Row, class Group, class Operator>
__global__ __launch_bounds__(Group::kMaxThreads,
                             sizeof(T) == 8 ? 1 : Group::kMinBlocks) void rows_kernel(const Rows<T> rows,
                                                                                      const Operator op) {
  Group group;
  // The last blocks of a grid that continues along y may have no row. Groups that share a warp also share its shuffles,
  // so they stay, with an empty row.
  if constexpr (Group::kWholeBlocks) {
    if (group.row >= rows.rows) return;
  }
  Row row(rows, group);
  op(row, group);
}

}  // namespace torchops::cuda
