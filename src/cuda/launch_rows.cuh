#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "cuda/rows.cuh"

// The host side of rows.cuh: which kernel takes rows of which length.
namespace torchops::cuda {

/// The most blocks, a power of two, of `kernel` with `threads` threads that this GPU can hold as one cluster; 1 if the
/// code that runs here was compiled for an older one (below 9.0), which has no clusters.
template <class Kernel>
int query_largest_cluster(Kernel kernel, int threads, int shared_bytes) {
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.ptxVersion < 90) return 1;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  for (int blocks = Cluster::kMaxBlocks; blocks > 1; blocks /= 2) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0) return blocks;
    cudaGetLastError();
  }
  return 1;
}

template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

template <class T, class Row, class Group, class Operator>
void launch(const Rows<T>& rows, const Operator& op, int64_t blocks, int threads, int cluster = 1) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  if constexpr (requires { Row::kSharedBytes; }) config.dynamicSmemBytes = Row::kSharedBytes * threads;
  config.stream = c10::cuda::getCurrentCUDAStream();
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, rows_kernel<T, Row, Group, Operator>, rows, op));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, int kLanes, int kVectors, class Operator>
void launch_lanes(const Rows<T>& rows, const Operator& op) {
  using Group = Lanes<kLanes>;
  launch<T, RowInRegisters<T, Group, kVectors>, Group>(rows, op, ceil_div(rows.rows, Group::kMaxThreads / kLanes),
                                                       Group::kMaxThreads);
}

/// Applies `op` to every row, on the current stream; `rows` is not empty.
template <class T, class Operator>
void launch_rows(const Rows<T>& rows, const Operator& op) {
  constexpr int kSize = kVectorSize<T>;
  // Registers for 8 vectors of a row leave a multiprocessor 1024 threads, and 128 KiB on their way. Longer rows take
  // shared memory too, if the operator allows, before they take another block, which costs a barrier.
  constexpr int kVectors = 8, kStaged = Operator::kStaged, kMaxThreads = Block::kMaxThreads;
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
  if (vectors <= 8 * 4) return launch_lanes<T, 8, 4>(rows, op);
  if (vectors <= 16 * 4) return launch_lanes<T, 16, 4>(rows, op);
  if (vectors <= 32 * 4) return launch_lanes<T, 32, 4>(rows, op);
  if (vectors <= 32 * 8) return launch_lanes<T, 32, 8>(rows, op);
  const auto threads = [&](int capacity, int blocks) {
    return static_cast<int>(ceil_div(ceil_div(vectors, int64_t{capacity} * blocks), kWarp) * kWarp);
  };
  if (const int n = threads(kVectors, 1); n <= kMaxThreads) {
    return launch<T, RowInRegisters<T, Block, kVectors>, Block>(rows, op, rows.rows, n);
  }
  using InBlock = RowInRegisters<T, Block, kVectors, kStaged>;
  using InCluster = RowInRegisters<T, Cluster, kVectors, kStaged>;
  static std::array<std::atomic<int>, C10_COMPILE_TIME_MAX_GPUS> largest{};
  std::atomic<int>& largest_here = largest[at::cuda::current_device()];
  if (largest_here == 0) {
    const int bytes = kMaxThreads * InBlock::kSharedBytes;
    allow_shared(rows_kernel<T, InBlock, Block, Operator>, bytes);
    allow_shared(rows_kernel<T, InCluster, Cluster, Operator>, bytes);
    largest_here = query_largest_cluster(rows_kernel<T, InCluster, Cluster, Operator>, kMaxThreads, bytes);
  }
  constexpr int kCapacity = InBlock::kCapacity;
  if (const int n = threads(kCapacity, 1); n <= kMaxThreads) {
    return launch<T, InBlock, Block>(rows, op, rows.rows, n);
  }
  int blocks = 2;
  while (threads(kCapacity, blocks) > kMaxThreads && blocks < largest_here) blocks *= 2;
  if (const int n = threads(kCapacity, blocks); blocks <= largest_here && n <= kMaxThreads) {
    return launch<T, InCluster, Cluster>(rows, op, rows.rows * blocks, n, blocks);
  }
  launch<T, RowInMemory<T, Block, kSize>, Block>(rows, op, rows.rows, kMaxThreads);
}

}  // namespace torchops::cuda
