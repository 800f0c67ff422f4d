#pragma once

#include "cuda/rows/mailbox.cuh"
#include "cuda/rows/rows.cuh"

// The device side of gradients that read two matrices once, x and the cotangent, and write a third: a row of dx depends
// on its elements and on sums over the row. The same pass computes the sums over rows, which are the gradients of
// parameters.
//
// Blocks are persistent. Each thread has the same columns of all its rows, so it reads a parameter once and keeps sums
// over rows in registers. Before the block works on a row, copies of the next two rows to shared memory are started. A
// thread only reads what it copied itself, so this needs no barrier. Each of the kGradientThreads threads of a
// multiprocessor has kGradientVectors vectors of both inputs in flight for each of two rows: 128 KiB if rows fill them,
// and at least a quarter of that (rows of one vector, or of nine); half of it where clusters share rows. 512 threads
// have 128 registers each. Two column sums of a thread's vectors take half of those.
//
// Every sum has a fixed order, which depends on the shape and the number of multiprocessors.
namespace torchops::cuda {

constexpr int kGradientThreads = 512;  // per multiprocessor
constexpr int kGradientVectors = 4;    // at most, per thread and row
constexpr int kGradientStages = 3;
constexpr int kGradientSharedBytes = kGradientStages * 2 * kGradientVectors * kVectorBytes;  // per thread

/// Rows with unit column stride that begin at 16-byte boundaries and are whole vectors.
template <class T>
struct GradientRows {
  const T *x, *grad;  // x may be null if only sums that don't read it are computed
  T* dx;              // contiguous, or null
  // For each block (or cluster), Operator::kColumnSums * columns sums over its rows.
  Accumulate<T>* partial;
  int64_t rows, columns, x_stride, grad_stride;
  int lanes;  // of a warp that share a row, for GradientLanes; a power of two
};

// The groups of threads that share a row, as in rows/rows.cuh. A block has `groups` of them. Group number `among`
// starts at row `first` + `among` and goes on in steps of `step`. All threads that meet at a barrier have the same
// `first`. The sums of a row are there at once, by reduce(), or, if kLate, after those of the next one were sent, by
// send() and receive().

class GradientLanes {
 public:
  static constexpr int kMaxThreads = 128;
  static constexpr bool kLate = false;

  __device__ explicit GradientLanes(int lanes)
      : size(lanes), rank(threadIdx.x & (lanes - 1)), among(threadIdx.x / static_cast<unsigned>(lanes)) {}

  static __device__ int threads() { return kMaxThreads; }
  __device__ int groups() const { return kMaxThreads / static_cast<unsigned>(size); }
  __device__ int64_t first() const { return int64_t{blockIdx.x} * groups(); }
  __device__ unsigned step() const { return gridDim.x * groups(); }
  __device__ int part() const { return blockIdx.x; }

  /// Turns each thread's sums into the sums over the row. `turn` alternates between 0 and 1.
  template <class A, int n>
  __device__ void reduce(A (&sums)[n], int) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (A& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
  }

  const int size, rank, among;
};

/// The sums of each warp of a block.
template <class A, int n>
struct SumsOfWarps {
  A at[n][kWarp];

  /// The i-th sum over the block. All lanes of the calling warp get it.
  __device__ A total(int i) const {
    const int lane = threadIdx.x % kWarp;
    return reduce_lanes<kWarp>(lane < blockDim.x / kWarp ? at[i][lane] : A{0}, Sum());
  }
};

/// Adds up `sums` of the lanes of each warp, all of which are there for the whole block on return. With two arrays in
/// turn, a thread that writes one again has passed the barrier after which all had read it.
template <class A, int n>
__device__ inline const SumsOfWarps<A, n>& sum_warps(const A (&sums)[n], int turn) {
  __shared__ SumsOfWarps<A, n> of_warps[2];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const A sum = reduce_lanes<kWarp>(sums[i], Sum());
    if (threadIdx.x % kWarp == 0) of_warps[turn].at[i][threadIdx.x / kWarp] = sum;
  }
  __syncthreads();
  return of_warps[turn];
}

class GradientBlock {
 public:
  static constexpr int kMaxThreads = kGradientThreads, among = 0;
  static constexpr bool kLate = false;

  __device__ explicit GradientBlock(int) : size(blockDim.x), rank(threadIdx.x) {}

  static __device__ int threads() { return blockDim.x; }
  __device__ int groups() const { return 1; }
  __device__ int64_t first() const { return blockIdx.x; }
  __device__ unsigned step() const { return gridDim.x; }
  __device__ int part() const { return blockIdx.x; }

  template <class A, int n>
  __device__ void reduce(A (&sums)[n], int turn) {
    const SumsOfWarps<A, n>& of_warps = sum_warps(sums, turn);
#pragma unroll
    for (int i = 0; i < n; ++i) sums[i] = of_warps.total(i);
  }

  const int size, rank;
};

/// The blocks of a cluster (compute capability 9.0). The sums of a row are complete after the next row was added up, so
/// what the blocks send to each other has time to arrive.
template <class A, int n>
class GradientCluster {
 public:
  static constexpr int kMaxThreads = kGradientThreads, among = 0;
  static constexpr bool kLate = true;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ explicit GradientCluster(int)
      : mailbox_(mail()), size(mailbox_.blocks * blockDim.x), rank(mailbox_.block * blockDim.x + threadIdx.x) {}

  static __device__ int threads() { return blockDim.x; }
  __device__ int groups() const { return 1; }
  __device__ int64_t first() const { return part(); }
  __device__ unsigned step() const { return gridDim.x / static_cast<unsigned>(mailbox_.blocks); }
  __device__ int part() const { return static_cast<int>(blockIdx.x / static_cast<unsigned>(mailbox_.blocks)); }

  __device__ void send(unsigned round, const A (&sums)[n]) {
    const SumsOfWarps<A, n>& of_warps = sum_warps(sums, static_cast<int>(round & 1));
    if (threadIdx.x >= kWarp) return;
    Sums message;
#pragma unroll
    for (int i = 0; i < n; ++i) message.at[i] = of_warps.total(i);
    mailbox_.send(round, message);
  }

  __device__ void receive(unsigned round, A (&sums)[n]) {
    const Sums* const of_block = mailbox_.receive(round);
    const int lane = threadIdx.x % Cluster::kMaxBlocks;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      sums[i] = reduce_lanes<Cluster::kMaxBlocks>(lane < mailbox_.blocks ? of_block[lane].at[i] : A{0}, Sum());
    }
  }

 private:
  struct Sums {
    A at[n];
  };
  static __device__ typename Mailbox<Sums>::Shared& mail() {
    __shared__ typename Mailbox<Sums>::Shared shared;
    return shared;
  }

  Mailbox<Sums> mailbox_;

 public:
#else
  // Never launched: the host checks which architecture the code was compiled for.
  __device__ explicit GradientCluster(int) : size(1), rank(0) { __trap(); }
  static __device__ int threads() { return 1; }
  __device__ int groups() const { return 1; }
  __device__ int64_t first() const { return 0; }
  __device__ unsigned step() const { return 1; }
  __device__ int part() const { return 0; }
  __device__ void send(unsigned, const A (&)[n]) {}
  __device__ void receive(unsigned, A (&)[n]) {}
#endif
  const int size, rank;
};

/// An operator works on vectors of x and grad, arrays of Accumulate<T>, and has
///   kSums, kColumnSums               the number of sums over a row, and over a column
///   Columns columns(int64_t column)  the parameters of a vector of columns
///   OfRow of_row(int64_t row)        the numbers that belong to a row
///   void add(OfRow, Columns, x, grad, sums, column_sums)
///   void gradient(OfRow, Columns, x, grad, sums)  grad becomes dx
template <class T, class Group, class Operator>
__global__ __launch_bounds__(Group::kMaxThreads, kGradientThreads / Group::kMaxThreads) void row_gradients_kernel(
    const GradientRows<T> rows, const Operator op) {
  using A = Accumulate<T>;
  constexpr int kSize = kVectorSize<T>, kVectors = kGradientVectors, kStages = kGradientStages;
  constexpr int kColumnSums = Operator::kColumnSums;
  extern __shared__ uint4 memory[];
  Group group(rows.lanes);
  const auto column = [&](int k) { return (group.rank + k * group.size) * kSize; };
  const int columns = static_cast<int>(rows.columns);
  const auto slot = [&](int stage, int input, int k) {
    return reinterpret_cast<Packed<T, kSize>*>(memory) + ((stage * 2 + input) * kVectors + k) * Group::threads() +
           static_cast<int>(threadIdx.x);
  };
  const auto read = [&](int stage, int k, A(&x)[kSize], A(&grad)[kSize]) {
    unpack(*slot(stage, 0, k), x);
    unpack(*slot(stage, 1, k), grad);
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < rows.rows) {
      const T *const x = rows.x + row * rows.x_stride, *const grad = rows.grad + row * rows.grad_stride;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (column(k) < columns) {
          if (rows.x != nullptr) copy_vector(slot(stage, 0, k), x + column(k));
          copy_vector(slot(stage, 1, k), grad + column(k));
        }
      }
    }
    end_copies();
  };

  // The same number for all threads that meet at a barrier, so the last rows of some groups may not exist.
  const unsigned step = group.step();
  const int64_t first = group.first();
  const int count = first < rows.rows ? static_cast<int>((rows.rows - first - 1) / step) + 1 : 0;
  int64_t row = first + group.among;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(row + int64_t{step} * stage, stage);
  typename Operator::Columns parameters[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (column(k) < columns) parameters[k] = op.columns(column(k));
  }
  A column_sums[kVectors][kColumnSums > 0 ? kColumnSums : 1][kSize] = {};
  using OfRow = typename Operator::OfRow;
  using Sums = A[Operator::kSums];
  const auto add = [&](bool exists, const OfRow& of_row, int stage, Sums& sums) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (exists && column(k) < columns) {
        A x[kSize], grad[kSize];
        read(stage, k, x, grad);
        op.add(of_row, parameters[k], x, grad, sums, column_sums[k]);
        asm volatile("" ::: "memory");  // one vector after the other, to save registers
      }
    }
  };
  const auto write = [&](bool exists, int64_t row, const OfRow& of_row, int stage, const Sums& sums) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (exists && column(k) < columns) {
        A x[kSize], grad[kSize];
        read(stage, k, x, grad);
        op.gradient(of_row, parameters[k], x, grad, sums);
        store(rows.dx + row * columns + column(k), pack<T, kSize>(grad));
      }
    }
  };
  const auto after = [](int stage) { return stage == kStages - 1 ? 0 : stage + 1; };
  const auto before = [](int stage) { return stage == 0 ? kStages - 1 : stage - 1; };
  if constexpr (Group::kLate) {
    // A row stays in shared memory for one turn more, so one row less is on its way.
    OfRow of_row{}, of_row_before{};
    for (int i = 0, stage = 0; i <= count; ++i, row += step, stage = after(stage)) {
      if (i < count) {
        of_row = op.of_row(row);
        wait_for_copies_before<kStages - 2>();
        Sums sums = {};
        add(true, of_row, stage, sums);
        if (rows.dx != nullptr) group.send(i, sums);
      }
      if (i > 0 && rows.dx != nullptr) {
        Sums sums;
        group.receive(i - 1, sums);
        write(true, row - step, of_row_before, before(stage), sums);
      }
      fetch(row + int64_t{step} * (kStages - 1), before(stage));
      of_row_before = of_row;
    }
  } else {
    for (int i = 0, stage = 0; i < count; ++i, row += step, stage = after(stage)) {
      const bool exists = row < rows.rows;
      const OfRow of_row = op.of_row(exists ? row : rows.rows - 1);
      fetch(row + int64_t{step} * (kStages - 1), before(stage));
      wait_for_copies_before<kStages - 1>();
      Sums sums = {};
      add(exists, of_row, stage, sums);
      if (rows.dx != nullptr) {
        group.reduce(sums, i & 1);
        write(exists, row, of_row, stage, sums);
      }
    }
  }

  if constexpr (kColumnSums > 0) {
    A* const partial = rows.partial + int64_t{group.part()} * kColumnSums * columns;
    if (group.groups() == 1) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (column(k) < columns) {
#pragma unroll
          for (int i = 0; i < kColumnSums * kSize; ++i) {
            partial[i / kSize * columns + column(k) + i % kSize] = column_sums[k][i / kSize][i % kSize];
          }
        }
      }
      return;
    }
    // Adds up the groups of the block, in the shared memory that its rows no longer need.
    constexpr int kOfThread = kVectors * kColumnSums * kSize;
    static_assert(kOfThread * sizeof(A) <= kGradientSharedBytes);
    A* const shared = reinterpret_cast<A*>(memory);
    wait_for_copies();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      shared[i * Group::threads() + static_cast<int>(threadIdx.x)] =
          column_sums[i / (kColumnSums * kSize)][i / kSize % kColumnSums][i % kSize];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kColumnSums * columns; i += Group::threads()) {
      const int which = i / columns, vector = i % columns / kSize;
      const int k = vector / group.size, rank = vector % group.size;
      const int index = (k * kColumnSums + which) * kSize + i % columns % kSize;
      A sum = 0;
      for (int other = 0; other < group.groups(); ++other) {
        sum += shared[index * Group::threads() + other * group.size + rank];
      }
      partial[i] = sum;
    }
  }
}

}  // namespace torchops::cuda
