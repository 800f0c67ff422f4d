#pragma once

#include <c10/cuda/CUDAException.h>

#include "cuda/base/clusters.h"
#include "cuda/base/per_device.h"
#include "cuda/rows/launch_groups.cuh"
#include "cuda/rows/pairs.cuh"

// The host side of rows/pairs.cuh: chooses the kernel by the length of the rows.
namespace torchops::cuda {

/// With both inputs, as many registers as the eight vectors of rows/rows.cuh.
constexpr int kPairVectors = 4;

template <class T, class Group, int vectors, class Operator>
constexpr auto pair_kernel = rows_kernel<T, RowPair<T, Group, vectors>, Group, Operator>;

/// The threads of each of `blocks` blocks that share rows of so many columns.
template <class T>
int threads_of_row_pair(int64_t columns, int blocks) {
  return threads_of_row(columns / kVectorSize<T>, kPairVectors, blocks);
}

/// How many blocks share a row: several are a cluster. 0 if rows are too long for the registers of a block or, where
/// there are some, of a cluster.
template <class T, class Operator>
int blocks_of_row_pair(int64_t columns) {
  const auto threads = [&](int blocks) { return threads_of_row_pair<T>(columns, blocks); };
  if (threads(1) <= Block::kMaxThreads) return 1;
  static PerDevice cache;
  int largest_cluster = 1;
  C10_CUDA_CHECK(cache.get(largest_cluster, [](int& answer) {
    return query_largest_cluster(pair_kernel<T, Cluster, kPairVectors, Operator>, Cluster::kMaxBlocks,
                                 Cluster::kMaxThreads, 0, answer);
  }));
  return blocks_of_cluster(threads, largest_cluster, Cluster::kPreferredThreads, Cluster::kMaxThreads);
}

/// Applies `op` to every row, on the current stream. `rows` is not empty, and `blocks` is blocks_of_row_pair().
template <class T, class Operator>
void launch_row_pairs(const RowPairs<T>& rows, const Operator& op, int blocks) {
  const bool by_lanes =
      with_lanes<Operator::kReductions>(lane_vectors(rows.columns, kVectorSize<T>), [&]<int lanes, int each>() {
        using Group = Lanes<lanes>;
        launch_groups(pair_kernel<T, Group, each, Operator>, ceil_div(rows.rows, Group::kMaxThreads / lanes),
                      Group::kMaxThreads, 0, 1, rows, op);
      });
  if (by_lanes) return;
  const int threads = threads_of_row_pair<T>(rows.columns, blocks);
  launch_groups(
      blocks == 1 ? pair_kernel<T, Block, kPairVectors, Operator> : pair_kernel<T, Cluster, kPairVectors, Operator>,
      rows.rows * blocks, threads, 0, blocks, rows, op);
}

}  // namespace torchops::cuda
