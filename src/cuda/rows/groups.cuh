#pragma once

#include <cstdint>
#include <limits>

#include "cuda/rows/cluster_messages.cuh"

// The groups of threads that share a row, and their reductions; see rows/rows.cuh. Every reduction has a fixed order,
// so equal inputs give equal bits. No torch headers.
namespace torchops::cuda {

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

/// A thread has up to kChains results of its elements, for the first, second, ... of every kChains neighbours in a
/// vector: one result would be a chain of operations that wait for each other, and of sums with more roundings.
constexpr int kChains = 4;

template <class A, class Op>
__device__ inline A reduce_chains(const A (&values)[kChains], Op op) {
  static_assert(kChains == 4);
  return op(op(values[0], values[1]), op(values[2], values[3]));
}

template <int kWidth, class A, class Op>
__device__ inline A reduce_lanes(A value, Op op) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

constexpr int kWarp = 32;

/// The State of the first `count` parts together, from 1 to kWidth, for all threads of a warp.
template <int kWidth, class State, class Operator>
__device__ inline State pool_lanes(const State* parts, int count, const Operator& op) {
  const int lane = threadIdx.x % kWidth;
  return op.pool(lane < count ? parts[lane] : op.nothing(),
                 [](auto value, auto with) { return reduce_lanes<kWidth>(value, with); });
}

/// The number of this block. A grid with more blocks than its x dimension allows continues along y.
__device__ inline int64_t block_number() { return int64_t{blockIdx.y} * gridDim.x + blockIdx.x; }

/// kLanes neighbouring threads of a warp; a block has kMaxThreads / kLanes rows. kWholeRow: measure() sees all of a
/// row.
template <int kLanes>
class Lanes {
 public:
  static constexpr bool kWholeRow = true, kWholeBlocks = false;
  static constexpr int kMinSize = kLanes, kMaxThreads = 128, kMinBlocks = 8;

  __device__ Lanes()
      : row(block_number() * (kMaxThreads / kLanes) + threadIdx.x / kLanes), rank(threadIdx.x % kLanes) {}

  /// Reduces one value per thread of this group, or of this block of it, with `op`; all threads get the result. Each
  /// use needs its own kUse.
  template <int kUse, class A, class Op>
  __device__ A reduce(A value, Op op) {
    return reduce_lanes<kLanes>(value, op);
  }

  /// What measure() returned in each block of the group, as one State. At most once in a kernel.
  template <class State, class Operator>
  __device__ State pool(State state, const Operator&) {
    return state;
  }

  /// The first of the vectors of this thread, which has up to `per_thread`, and the distance to the next.
  __device__ int first(int) const { return rank; }
  __device__ int step() const { return size; }

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
  static constexpr bool kWholeRow = true, kWholeBlocks = true;
  static constexpr int kMinSize = kWarp, kMaxThreads = 512, kMinBlocks = 2;

  __device__ Block() : row(block_number()), size(blockDim.x), rank(threadIdx.x) {}

  template <int kUse, class A, class Op>
  __device__ A reduce(A value, Op op) {
    return reduce_block<kUse>(value, op);
  }

  template <class State, class Operator>
  __device__ State pool(State state, const Operator&) {
    return state;
  }

  __device__ int first(int) const { return rank; }
  __device__ int step() const { return size; }

  const int64_t row;
  const int size, rank;
};

/// The blocks of a cluster (compute capability 9.0). Each has a part of the row that is contiguous, which may be empty
/// in the last blocks, sends its state to all blocks, once in a kernel, and waits for theirs. If blocks are small,
/// others of the multiprocessor move memory meanwhile.
class Cluster {
 public:
  // A grid of clusters is never too long for x: its rows have at least 32 KiB.
  static constexpr bool kWholeRow = false, kWholeBlocks = false;
  static constexpr int kMinSize = kWarp, kMaxThreads = 512, kMinBlocks = 2;
  static constexpr int kMaxBlocks = 16, kPreferredThreads = 128;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ Cluster()
      : blocks_(cluster_blocks()),
        block_(cluster_block()),
        row(block_number() / blocks_),
        size(blocks_ * blockDim.x),
        rank(block_ * blockDim.x + threadIdx.x) {
    if (threadIdx.x == 0) init_message_barrier(barrier());
    __syncwarp();  // .aligned: the whole warp arrives together
    // Others may send once this block has its barrier. pool() waits for theirs, after the loads.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  template <int kUse, class A, class Op>
  __device__ A reduce(A value, Op op) {
    return reduce_block<kUse>(value, op);
  }

  template <class State, class Operator>
  __device__ State pool(State state, const Operator& op) {
    __shared__ State from_block[kMaxBlocks];
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (threadIdx.x == 0) expect_messages(barrier(), blocks_ * static_cast<int>(sizeof(State)));
    if (threadIdx.x < blocks_) send_message(state, &from_block[block_], barrier(), threadIdx.x);
    wait_for_messages(barrier(), 0);
    return pool_lanes<kMaxBlocks>(from_block, blocks_, op);
  }

  __device__ int first(int per_thread) const { return block_ * per_thread * step() + static_cast<int>(threadIdx.x); }
  __device__ int step() const { return static_cast<int>(blockDim.x); }

 private:
  static __device__ uint64_t& barrier() {
    __shared__ uint64_t of_block;
    return of_block;
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
  template <class State, class Operator>
  __device__ State pool(State state, const Operator&) {
    return state;
  }
  __device__ int first(int) const { return 0; }
  __device__ int step() const { return 1; }
#endif
  const int64_t row;
  const int size, rank;
};

}  // namespace torchops::cuda
