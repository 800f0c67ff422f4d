#pragma once

#include <c10/cuda/CUDAException.h>

#include "cuda/clusters.h"
#include "cuda/launch_groups.h"
#include "cuda/per_device.h"
#include "cuda/row_pairs.cuh"

// The host side of row_pairs.cuh: chooses the kernel by the length of the rows.
namespace torchops::cuda {

/// Applies `op` to every row, on the current stream. Returns false, with nothing done, if rows are too long for the
/// registers of a block or, where there are some, of a cluster. `rows` is not empty.
template <class T, class Operator>
bool launch_row_pairs(const RowPairs<T>& rows, const Operator& op) {
  // With both inputs, as many registers as the eight vectors of rows.cuh.
  constexpr int kVectors = 4, kMaxThreads = Block::kMaxThreads;
  const int64_t vectors = rows.columns / kVectorSize<T>;
  const bool by_lanes =
      with_lanes<Operator::kReductions>(lane_vectors(rows.columns, kVectorSize<T>), [&]<int lanes, int each>() {
        using Group = Lanes<lanes>;
        launch_groups(row_pairs_kernel<T, Group, each, Operator>, ceil_div(rows.rows, Group::kMaxThreads / lanes),
                      Group::kMaxThreads, 0, 1, rows, op);
      });
  if (by_lanes) return true;
  const auto threads = [&](int blocks) {
    return static_cast<int>(ceil_div(ceil_div(vectors, int64_t{kVectors} * blocks), kWarp) * kWarp);
  };
  if (const int n = threads(1); n <= kMaxThreads) {
    launch_groups(row_pairs_kernel<T, Block, kVectors, Operator>, rows.rows, n, 0, 1, rows, op);
    return true;
  }
  constexpr auto kernel = row_pairs_kernel<T, Cluster, kVectors, Operator>;
  static PerDevice cache;
  int largest_cluster = 1;
  C10_CUDA_CHECK(cache.get(largest_cluster, [](int& answer) {
    return query_largest_cluster(kernel, Cluster::kMaxBlocks, kMaxThreads, 0, answer);
  }));
  const int blocks = blocks_of_cluster(threads, largest_cluster, Cluster::kPreferredThreads, kMaxThreads);
  if (blocks == 0) return false;
  launch_groups(kernel, rows.rows * blocks, threads(blocks), 0, blocks, rows, op);
  return true;
}

}  // namespace torchops::cuda
