#pragma once

// Kernels written by hand that stay on their multiprocessors and take tile after tile.

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/base/per_device.h"
#include "cuda/gemm/problem.h"
#include "cuda/gemm/sm90/skeleton/ring.cuh"
#include "cuda/gemm/sm90/skeleton/roles.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"

namespace torchops::cuda::gemm {

/// The shared memory that a CTA may have.
constexpr int kMostSharedBytes = 227 * 1024;

CUTLASS_HOST_DEVICE int divided(int size, int tile) { return size / tile + (size % tile != 0); }

/// In the grid of tiles.
struct GridPlace {
  int row, column;
};

/// Where a tile is, in groups of `group` rows of tiles, column after column: those that run at once share rows and
/// columns in L2.
CUTLASS_DEVICE GridPlace place_in_groups(int tile, int rows, int columns, int group) {
  const int in_group = group * columns, first = tile / in_group * group, at = tile % in_group;
  const int height = min(group, rows - first);
  return {first + at % height, at / height};
}

/// Kernel has
///   Parameters, Shared   the latter with init(), which passes all of its barriers to init_barriers()
///   Roles                who does what (roles.cuh)
///   kCluster             how many CTAs form a cluster; 1: none
template <class Kernel>
__global__ void __launch_bounds__(Kernel::Roles::kThreads, 1)
    persistent_kernel(const __grid_constant__ typename Kernel::Parameters p) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(bytes);
  if (threadIdx.x == 0) shared.init();
  if constexpr (Kernel::kCluster > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }
  Kernel::Roles::run(p, shared);
  if constexpr (Kernel::kCluster > 1) {
    __syncwarp();
    cute::cluster_sync();  // other CTAs may still write to this one's shared memory
  }
}

/// Launches the kernel, in clusters if it has any; otherwise a cluster is a CTA.
template <class Kernel>
class Persistent {
 public:
  using Parameters = typename Kernel::Parameters;

  /// How many clusters run at once on the current device. Also raises the kernel's limit of shared memory.
  static cudaError_t resident(int& clusters) {
    static PerDevice cache;
    if constexpr (Kernel::kCluster == 1) {
      return granted_multiprocessors(cache, persistent_kernel<Kernel>, kSharedBytes, clusters);
    } else {
      return cache.get(clusters, [](int& answer) {
        const cudaError_t error =
            cudaFuncSetAttribute(reinterpret_cast<const void*>(persistent_kernel<Kernel>),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
        if (error != cudaSuccess) return error;
        cudaLaunchAttribute attribute;
        const cudaLaunchConfig_t one = config(1, nullptr, attribute);
        return cudaOccupancyMaxActiveClusters(&answer, persistent_kernel<Kernel>, &one);
      });
    }
  }

  /// The same, but not more than there are tiles. If the kernel's CTAs write sums that are added later, the order of
  /// these additions depends on this number.
  static cudaError_t resident(int64_t tiles, int& clusters) {
    const cudaError_t error = resident(clusters);
    clusters = static_cast<int>(std::min<int64_t>(clusters, tiles));
    return error;
  }

  /// Whether a cluster can run on the current device.
  static Status prepare() {
    int clusters = 0;
    if (const cudaError_t error = resident(clusters); error != cudaSuccess) return Status::of(error);
    return clusters > 0 ? Status{} : Status::not_for_me();
  }

  /// Runs the kernel with what fill(parameters, maps, clusters) sets; `clusters` are as many as run at once, but not
  /// more than there are tiles, unless fill() changes that.
  template <class Fill>
  static Status run(int64_t tiles, cudaStream_t stream, const Fill& fill) {
    int clusters = 0;
    if (const cudaError_t error = resident(tiles, clusters); error != cudaSuccess) return Status::of(error);
    Parameters parameters{};
    TileMaps maps;
    fill(parameters, maps, clusters);
    if (!maps.are_valid()) return Status::of(cudaErrorInvalidValue);
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t launch = config(clusters, stream, attribute);
    return Status::of(cudaLaunchKernelEx(&launch, persistent_kernel<Kernel>, parameters));
  }

 private:
  static constexpr size_t kSharedBytes = sizeof(typename Kernel::Shared);
  static_assert(kSharedBytes <= kMostSharedBytes);

  static cudaLaunchConfig_t config(int clusters, cudaStream_t stream, cudaLaunchAttribute& attribute) {
    constexpr int ctas = Kernel::kCluster;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {ctas, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(clusters * ctas));
    config.blockDim = dim3(Kernel::Roles::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = ctas > 1 ? 1 : 0;
    return config;
  }
};

}  // namespace torchops::cuda::gemm
