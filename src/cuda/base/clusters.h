#pragma once

#include <cuda_runtime_api.h>

#include "cuda/base/device.h"

// How many clusters of blocks a GPU can hold. No torch headers.
namespace torchops::cuda {

template <class Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

/// The number of clusters of `kernel`, of this many blocks each, that the current GPU can hold at the same time; 0 if
/// they don't fit, or the code that runs there was compiled for an architecture without clusters (below 9.0). If it
/// isn't 0, the kernel may be launched so.
template <class Kernel>
cudaError_t query_clusters(Kernel kernel, int blocks, int threads, int shared_bytes, int& clusters) {
  clusters = 0;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || attributes.ptxVersion < 90) return error;
  const cudaDeviceProp& device = device_properties();
  if (device.major < 9 || shared_bytes + attributes.sharedSizeBytes > device.sharedMemPerBlockOptin) return error;
  error = allow_shared(kernel, shared_bytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error == cudaSuccess) return error;
  // An error for a cluster that is too large is an answer. If an error remains after it is cleared, that one is real.
  clusters = 0;
  cudaGetLastError();
  return cudaPeekAtLastError() != cudaSuccess ? error : cudaSuccess;
}

/// The largest cluster, a power of two up to `most`, that this GPU can hold; 1 if there is none.
template <class Kernel>
cudaError_t query_largest_cluster(Kernel kernel, int most, int threads, int shared_bytes, int& largest) {
  for (largest = most; largest > 1; largest /= 2) {
    int clusters = 0;
    const cudaError_t error = query_clusters(kernel, largest, threads, shared_bytes, clusters);
    if (error != cudaSuccess || clusters > 0) return error;
  }
  return cudaSuccess;
}

/// The blocks of a cluster that needs threads(blocks) of each: the fewest, a power of two from 2 to `largest`, with at
/// most `preferred` threads, or else `largest` if these have at most `most`. 0 if not, or if `largest` is 1.
template <class Threads>
int blocks_of_cluster(const Threads& threads, int largest, int preferred, int most) {
  if (largest < 2) return 0;
  int blocks = 2;
  while (threads(blocks) > preferred && blocks < largest) blocks *= 2;
  return threads(blocks) <= most ? blocks : 0;
}

}  // namespace torchops::cuda
