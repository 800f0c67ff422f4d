#pragma once

#include "cuda/rows/mailbox.cuh"
#include "cuda/rows/rows.cuh"

// Long rows with parameters, for the operators of rows/rows.cuh, on compute capability 9.0. In rows_kernel, the blocks
// of a cluster wait for memory, then for each other, and then memory waits for them. Here, clusters are persistent:
//   - Copies of the next rows to shared memory are started before a block works on a row. A thread only reads what it
//     copied itself, so this needs no barrier.
//   - A row is written after the next one was measured, so what the blocks send to each other has time to arrive.
//   - Each thread has the same columns of all its rows, and keeps their parameters in registers.
//
// Each of the kStreamThreads threads of a multiprocessor has up to kStreamVectors vectors of a row. Of the
// kStreamStages rows in shared memory, one is measured and the one before it written, so up to 64 KiB are in flight.
namespace torchops::cuda {

constexpr int kStreamThreads = 512;  // per multiprocessor
constexpr int kStreamVectors = 4;    // at most, per thread and row
constexpr int kStreamStages = 4;
constexpr int kStreamSharedBytes = kStreamStages * kStreamVectors * kVectorBytes;  // per thread

/// A warp, as a part of the threads that share a row.
struct StreamWarp {
  static constexpr bool kWholeRow = false;

  template <int kUse, class A, class Op>
  __device__ A reduce(A value, Op op) const {
    return reduce_lanes<kWarp>(value, op);
  }

  int64_t row;
  int rank;  // among all threads that share the row
};

/// The vectors of a row that belong to this thread, out of shared memory.
template <class T, int kParameters>
class StreamRow {
 public:
  static constexpr int kSize = kVectorSize<T>;
  using Vector = Packed<T, kSize>;
  using Kept = Vector[kParameters][kStreamVectors];  // the parameters of these vectors

  /// `stage` is this thread's first vector there; its others are blockDim.x apart.
  __device__ StreamRow(const Vector* stage, T* y, int rank, int size, int vectors, const Kept& kept)
      : y_(y), rank_(rank), size_(size), vectors_(vectors), kept_(kept) {
#pragma unroll
    for (int k = 0; k < kStreamVectors; ++k) {
      if (vector(k) < vectors_) body_[k] = stage[k * blockDim.x];
    }
  }

  __device__ int count() const {
    int count = 0;
#pragma unroll
    for (int k = 0; k < kStreamVectors; ++k) count += vector(k) < vectors_;
    return count * kSize;
  }

  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int k = 0; k < kStreamVectors; ++k) {
      if (vector(k) < vectors_) {
        Accumulate<T> values[kSize];
        unpack(body_[k], values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) f(values[i], i);
      }
    }
  }

  template <class F>
  __device__ void write(const Parameters<T, kParameters>&, F f) const {
#pragma unroll
    for (int k = 0; k < kStreamVectors; ++k) {
      if (vector(k) < vectors_) {
        Accumulate<T> values[kSize];
        unpack(body_[k], values);
        f(values, [&](int i, auto& out) { unpack(kept_[i][k], out); });
        store(y_ + int64_t{vector(k)} * kSize, pack<T, kSize>(values));
      }
    }
  }

 private:
  __device__ int vector(int k) const { return rank_ + k * size_; }

  T* const y_;
  const int rank_, size_, vectors_;
  const Kept& kept_;
  Vector body_[kStreamVectors];
};

/// Rows, x and y, that begin at 16-byte boundaries and are whole vectors. A cluster has at least one row.
template <class T, class Operator>
__global__ __launch_bounds__(kStreamThreads, 1) void streamed_rows_kernel(const Rows<T> rows, const Operator op) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using State = typename Operator::State;
  using Row = StreamRow<T, Operator::kParameters>;
  using Vector = typename Row::Vector;
  constexpr int kStages = kStreamStages, kVectors = kStreamVectors, kWarps = kStreamThreads / kWarp;
  extern __shared__ uint4 memory[];
  // Two, so that a warp can write one while the first warp still reads the other.
  __shared__ State of_warp[2][kWarps];
  __shared__ typename Mailbox<State>::Shared mail;
  Mailbox<State> mailbox(mail);

  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int size = mailbox.blocks * threads, rank = mailbox.block * threads + thread;
  const int vectors = static_cast<int>(rows.columns) / Row::kSize;
  const auto vector = [&](int k) { return rank + k * size; };
  const int64_t first = blockIdx.x / static_cast<unsigned>(mailbox.blocks);
  const unsigned step = gridDim.x / static_cast<unsigned>(mailbox.blocks);
  const int count = static_cast<int>((rows.rows - first - 1) / step) + 1;

  const auto stage = [&](int i) { return reinterpret_cast<Vector*>(memory) + i * kVectors * threads + thread; };
  const auto fetch = [&](int64_t row, int into) {
    if (row < rows.rows) {
      const T* const x = rows.x + row * rows.x_stride;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (vector(k) < vectors) copy_vector(stage(into) + k * threads, x + int64_t{vector(k)} * Row::kSize);
      }
    }
    end_copies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(first + int64_t{step} * i, i);

  typename Row::Kept kept;
#pragma unroll
  for (int i = 0; i < Operator::kParameters; ++i) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector(k) < vectors) {
        Accumulate<T> values[Row::kSize];
        op.parameters.read(i, int64_t{vector(k)} * Row::kSize, values);
        kept[i][k] = pack<T, Row::kSize>(values);
      }
    }
  }
  const auto row_in = [&](int i, int64_t row) {
    return Row(stage(i), rows.y + row * rows.y_stride, rank, size, vectors, kept);
  };

  int64_t row = first;
  int now = 0;
  for (int i = 0; i <= count; ++i) {
    const int before = now == 0 ? kStages - 1 : now - 1;
    if (i < count) {
      wait_for_copies_before<kStages - 2>();
      StreamWarp warp{row, rank};
      const State state = op.measure(row_in(now, row), warp);
      if (thread % kWarp == 0) of_warp[i & 1][thread / kWarp] = state;
      __syncthreads();
      if (thread < kWarp) mailbox.send(i, pool_lanes<kWarps>(of_warp[i & 1], threads / kWarp, op));
    }
    if (i > 0) {
      const int64_t row_before = row - step;
      const State total = pool_lanes<Cluster::kMaxBlocks>(mailbox.receive(i - 1), mailbox.blocks, op);
      op.write(row_in(before, row_before), StreamWarp{row_before, rank}, total);
    }
    fetch(row + int64_t{step} * (kStages - 1), before);
    row += step;
    now = now == kStages - 1 ? 0 : now + 1;
  }
#else
  __trap();  // never launched: the host checks which architecture the code was compiled for
#endif
}

}  // namespace torchops::cuda
