#pragma once

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <array>

#include "cuda/base/clusters.h"
#include "cuda/base/per_device.h"
#include "cuda/rows/launch_groups.cuh"
#include "cuda/rows/streamed.cuh"

// The host side of rows/streamed.cuh.
namespace torchops::cuda {

/// Applies `op` to every row, on the current stream, if this device can hold clusters for rows of this length; returns
/// false otherwise. `rows` is not empty; they have more than 64 KiB, begin at 16-byte boundaries and are whole vectors.
template <class T, class Operator>
bool launch_streamed_rows(const Rows<T>& rows, const Operator& op) {
  const auto kernel = streamed_rows_kernel<T, Operator>;
  const auto threads_of = [&](int blocks) {
    return threads_of_row(rows.columns / kVectorSize<T>, kStreamVectors, blocks);
  };
  static std::array<PerDevice, 3> caches;  // for 4, 8 and 16 blocks: two have room for 64 KiB
  static_assert(Cluster::kMaxBlocks == 16);
  size_t log = 0;
  while (log < caches.size() && threads_of(4 << log) > kStreamThreads) ++log;
  if (log == caches.size()) return false;
  const int blocks = 4 << log, threads = threads_of(blocks);
  int resident = 0;
  C10_CUDA_CHECK(caches[log].get(resident, [&](int& answer) {
    return query_clusters(kernel, blocks, kStreamThreads, kStreamThreads * kStreamSharedBytes, answer);
  }));
  if (resident == 0) return false;
  const int64_t clusters = std::min<int64_t>(resident, rows.rows);

  launch_groups(kernel, clusters * blocks, threads, int64_t{threads} * kStreamSharedBytes, blocks, rows, op);
  return true;
}

}  // namespace torchops::cuda
