#pragma once

// Launches kernels written by hand in clusters.

#include <cuda_runtime_api.h>

#include "cuda/base/per_device.h"
#include "cuda/gemm/problem.h"

namespace torchops::cuda::gemm {

inline int divided(int size, int tile) { return size / tile + (size % tile != 0); }

/// Launches `kernel` in clusters of `ctas` CTAs. Kernel has its parameters,
/// number of threads and shared memory.
template <class Kernel, void (*kernel)(typename Kernel::Parameters), int ctas>
class ClusterLaunch {
 public:
  /// How many clusters run at once on the current device. Also raises the kernel's limit of shared memory.
  static cudaError_t resident(int& clusters) {
    static PerDevice cache;
    return cache.get(clusters, [](int& answer) {
      const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kSharedBytes));
      if (error != cudaSuccess) return error;
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t one = config(1, nullptr, attribute);
      return cudaOccupancyMaxActiveClusters(&answer, kernel, &one);
    });
  }

  /// Whether a cluster can run on the current device.
  static Status prepare() {
    int clusters = 0;
    if (const cudaError_t error = resident(clusters); error != cudaSuccess) return Status::of(error);
    return clusters > 0 ? Status{} : Status::not_for_me();
  }

  /// Call resident() first.
  static cudaError_t run(const typename Kernel::Parameters& parameters, int clusters, cudaStream_t stream) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t launch = config(clusters, stream, attribute);
    return cudaLaunchKernelEx(&launch, kernel, parameters);
  }

 private:
  static constexpr size_t kSharedBytes = sizeof(typename Kernel::Shared);

  static cudaLaunchConfig_t config(int clusters, cudaStream_t stream, cudaLaunchAttribute& attribute) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {ctas, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(clusters * ctas));
    config.blockDim = dim3(Kernel::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return config;
  }
};

}  // namespace torchops::cuda::gemm
