#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/base/clusters.h"
#include "cuda/base/device.h"
#include "cuda/base/per_device.h"
#include "cuda/rows/launch_groups.cuh"
#include "cuda/rows/launch_streamed.cuh"
#include "cuda/rows/rows.cuh"

// The host side of rows/rows.cuh: chooses the kernel by the length of the rows.
namespace torchops::cuda {

template <class T, class Row, class Group, class Operator>
void launch(const Rows<T>& rows, const Operator& op, int64_t blocks, int threads, int cluster = 1) {
  int bytes = 0;
  if constexpr (requires { Row::kSharedBytes; }) bytes = Row::kSharedBytes * threads;
  launch_groups(rows_kernel<T, Row, Group, Operator>, blocks, threads, bytes, cluster, rows, op);
}

/// With registers for so many vectors of a row, a multiprocessor runs 1024 threads and has 128 KiB in flight.
constexpr int kRowVectors = 8;

/// Rows too long for these registers, those of a cluster where there are some, use shared memory too, if the operator
/// allows it.
template <class T, class Group, class Operator>
using StagedRow = RowInRegisters<T, Group, kRowVectors, Operator::kStaged>;

/// The largest cluster that can share a row, a power of two; 1 if there is none. Lets the kernels for staged rows use
/// the shared memory they need.
template <class T, class Operator>
int cluster_for_rows() {
  static PerDevice cache;
  int largest = 1;
  C10_CUDA_CHECK(cache.get(largest, [](int& answer) {
    constexpr int threads = Block::kMaxThreads, bytes = threads * StagedRow<T, Block, Operator>::kSharedBytes;
    static_assert(bytes <= kLeastSharedBytes);
    const auto query = [](auto kernel, int shared_bytes, int& of_kernel) {
      return query_largest_cluster(kernel, Cluster::kMaxBlocks, threads, shared_bytes, of_kernel);
    };
    int of_staged = 1;
    cudaError_t error = allow_shared(rows_kernel<T, StagedRow<T, Block, Operator>, Block, Operator>, bytes);
    if (error == cudaSuccess) {
      error = query(rows_kernel<T, RowInRegisters<T, Cluster, kRowVectors>, Cluster, Operator>, 0, answer);
    }
    if (error == cudaSuccess) {
      error = query(rows_kernel<T, StagedRow<T, Cluster, Operator>, Cluster, Operator>, bytes, of_staged);
    }
    answer = std::min(answer, of_staged);
    return error;
  }));
  return largest;
}

/// Applies `op` to every row, on the current stream; `rows` is not empty.
template <class T, class Operator>
void launch_rows(const Rows<T>& rows, const Operator& op) {
  constexpr int kSize = kVectorSize<T>;
  constexpr int kVectors = kRowVectors, kMaxThreads = Block::kMaxThreads;
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const bool same_alignment = (address(rows.x) - address(rows.y)) % kVectorBytes == 0 &&
                              (rows.x_stride - rows.y_stride) * static_cast<int64_t>(sizeof(T)) % kVectorBytes == 0;
  if (!same_alignment) {
    launch<T, RowInMemory<T, Block, 1>, Block>(
        rows, op, rows.rows,
        static_cast<int>(std::clamp<int64_t>(ceil_div(rows.columns, 8 * kWarp) * kWarp, kWarp, kMaxThreads)));
    return;
  }
  const int64_t vectors = rows.columns / kSize;
  const bool by_lanes =
      with_lanes<Operator::kReductions>(lane_vectors(rows.columns, kSize), [&]<int lanes, int each>() {
        using Group = Lanes<lanes>;
        launch<T, RowInRegisters<T, Group, each, 0, Operator::kParameters>, Group>(
            rows, op, ceil_div(rows.rows, Group::kMaxThreads / lanes), Group::kMaxThreads);
      });
  if (by_lanes) return;
  const auto threads = [&](int capacity, int blocks) { return threads_of_row(vectors, capacity, blocks); };
  // With half of the registers, more warps hide the barriers. Shorter rows would leave lanes of a second warp idle.
  // Parameters that are read ahead favour threads with few vectors.
  constexpr int kHalf = kVectors / 2, kMostOfHalf = Operator::kParameters > 0 ? 256 : 224;
  if (vectors > 192 && threads(kHalf, 1) <= kMostOfHalf) {
    using Row = RowInRegisters<T, Block, kHalf, 0, Operator::kParameters>;
    return launch<T, Row, Block>(rows, op, rows.rows, threads(kHalf, 1));
  }
  // Without parameters, clusters of small blocks are faster than a large block; see Cluster.
  const auto prefers_block = [](int n) {
    return n <= kMaxThreads / 2 || Operator::kParameters > 0 || cluster_for_rows<T, Operator>() == 1;
  };
  if (const int n = threads(kVectors, 1); n <= kMaxThreads && prefers_block(n)) {
    return launch<T, RowInRegisters<T, Block, kVectors>, Block>(rows, op, rows.rows, n);
  }
  // Parameters would be read again for each row, and make up two thirds of what a block reads.
  if constexpr (std::is_same_v<decltype(op.parameters), Parameters<T, Operator::kParameters>> &&
                Operator::kParameters > 0) {
    const bool aligned = address(rows.x) % kVectorBytes == 0 && rows.columns % kSize == 0 &&
                         (rows.rows == 1 || rows.x_stride * static_cast<int64_t>(sizeof(T)) % kVectorBytes == 0);
    if (aligned && launch_streamed_rows(rows, op)) return;
  }
  const int largest_cluster = cluster_for_rows<T, Operator>();
  const auto blocks_of = [&](int capacity, int preferred) {
    return blocks_of_cluster([&](int blocks) { return threads(capacity, blocks); }, largest_cluster, preferred,
                             kMaxThreads);
  };
  if (const int blocks = blocks_of(kVectors, Cluster::kPreferredThreads); blocks > 0) {
    return launch<T, RowInRegisters<T, Cluster, kVectors>, Cluster>(rows, op, rows.rows * blocks,
                                                                    threads(kVectors, blocks), blocks);
  }
  constexpr int kCapacity = StagedRow<T, Block, Operator>::kCapacity;
  if (const int n = threads(kCapacity, 1); n <= kMaxThreads) {
    return launch<T, StagedRow<T, Block, Operator>, Block>(rows, op, rows.rows, n);
  }
  if (const int blocks = blocks_of(kCapacity, kMaxThreads); blocks > 0) {
    return launch<T, StagedRow<T, Cluster, Operator>, Cluster>(rows, op, rows.rows * blocks, threads(kCapacity, blocks),
                                                               blocks);
  }
  launch<T, RowInMemory<T, Block, kSize>, Block>(rows, op, rows.rows, kMaxThreads);
}

}  // namespace torchops::cuda
