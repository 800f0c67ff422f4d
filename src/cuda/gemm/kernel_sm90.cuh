#pragma once

// What the two Hopper GEMMs share: CUTLASS's TMA warp-specialised persistent kernel with a given epilogue, and its
// launch. Only for translation units compiled for sm_90a; no torch headers, so that each compiles in seconds, not
// minutes.

#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "cuda/gemm/resident_sm90.cuh"

namespace torchops::cuda::gemm {

/// A CTA computes tile_m x tile_n of the output. With ping-pong each of its two consumer warpgroups has a tile of its
/// own, and the epilogue of one runs beside the matrix instructions of the other; without, they share one tile. The
/// epilogue handles epilogue_n columns (of 16 bits, or half as many of 32) at a time: more means fewer barriers, but
/// less shared memory for the loads. cluster_m x cluster_n CTAs share what they load. With resident_k, sums are no
/// longer than that, and B stays in shared memory. Without, the loads have `stages` buffers, or all that fit.
template <int tile_m, int tile_n, int cluster_m, int cluster_n, bool ping_pong, int epilogue_n, int resident_k = 0,
          int stages = 0>
struct Tiling {
  static constexpr int kTileM = tile_m, kTileN = tile_n, kClusterM = cluster_m, kClusterN = cluster_n;
  static constexpr bool kPingPong = ping_pong;
  static constexpr int kEpilogueThreads = ping_pong ? 128 : 256;
  static constexpr int kEpilogueM = ping_pong ? 64 : 128;
  static constexpr int kEpilogueN = epilogue_n;
  static constexpr int kResidentK = resident_k;
  static constexpr int kStages = stages;
};

/// D (m x n) = fusion(A (m x k) @ B (k x n)), accumulated in float32. A and D have contiguous rows; B has contiguous
/// columns (b_k_major, as w.T of a weight has), or contiguous rows.
template <class Element, class Tiling_, bool b_k_major, class Fusion>
struct Sm90Gemm {
  using Tiling = Tiling_;
  // 128 bytes, the widest swizzle of shared memory.
  static constexpr int kTileK = 128 / sizeof(Element);
  static constexpr int kAlignment = 16 / sizeof(Element);
  using Tile = cute::Shape<cute::Int<Tiling::kTileM>, cute::Int<Tiling::kTileN>, cute::Int<kTileK>>;
  using EpilogueTile =
      cute::Shape<cute::Int<Tiling::kEpilogueM>, cute::Int<Tiling::kEpilogueN * 2 / static_cast<int>(sizeof(Element))>>;
  using Cluster = cute::Shape<cute::Int<Tiling::kClusterM>, cute::Int<Tiling::kClusterN>, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor;
  using LayoutB = std::conditional_t<b_k_major, cutlass::layout::ColumnMajor, RowMajor>;
  using MainloopSchedule = std::conditional_t<Tiling::kPingPong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                              cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using EpilogueSchedule = std::conditional_t<Tiling::kPingPong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile, float, float, void, RowMajor,
      kAlignment, Element, RowMajor, kAlignment, EpilogueSchedule, Fusion>::CollectiveOp;
  template <class Stages>
  using Stream = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, kAlignment, Element, LayoutB, kAlignment,
      float, Tile, Cluster, Stages, MainloopSchedule>::CollectiveOp;
  static constexpr int kEpilogueBytes = static_cast<int>(sizeof(typename Epilogue::SharedStorage));
  // What a resident B leaves of 227 KiB, less 1 KiB for the barriers.
  static constexpr int kStagesOfA = std::min<int>(
      8, (226 * 1024 - kEpilogueBytes - Tiling::kTileN * Tiling::kResidentK * static_cast<int>(sizeof(Element))) /
             (Tiling::kTileM * 128));
  template <bool resident, class = void>
  struct MainloopOf {
    using Stages = std::conditional_t<(Tiling::kStages > 0), cutlass::gemm::collective::StageCount<Tiling::kStages>,
                                      cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>>;
    using Type = Stream<Stages>;
  };
  template <class Unused>
  struct MainloopOf<true, Unused> {
    using Type =
        ResidentMainloop<Stream<cutlass::gemm::collective::StageCount<kStagesOfA>>, Tiling::kResidentK / kTileK>;
  };
  using Mainloop = typename MainloopOf<(Tiling::kResidentK > 0)>::Type;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                      cutlass::gemm::PersistentScheduler>;
};

template <class Kernel>
cudaLaunchConfig_t launch_config(dim3 grid, bool cooperative, cudaStream_t stream,
                                 std::array<cudaLaunchAttribute, 2>& attributes) {
  using Cluster = typename Kernel::DispatchPolicy::ClusterShape;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = cooperative ? 2 : 1;
  return config;
}

/// How many clusters of this kernel the current device holds at once; 0 if it cannot run there. Asked once per device.
template <class Kernel>
int max_resident_clusters() {
  constexpr int most_devices = 64;
  static std::array<std::atomic<int>, most_devices> cache{};  // 1 more than the answer; 0 is "not asked yet"
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= most_devices) return 0;
  if (const int known = cache[device].load(std::memory_order_acquire)) return known - 1;
  const auto kernel = reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>);
  int clusters = 0;
  std::array<cudaLaunchAttribute, 2> attributes{};
  using Cluster = typename Kernel::DispatchPolicy::ClusterShape;
  const dim3 one_cluster(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1);
  const cudaLaunchConfig_t config = launch_config<Kernel>(one_cluster, false, nullptr, attributes);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // the caller goes another way: nothing is left to report
    clusters = 0;
  }
  cache[device].store(clusters + 1, std::memory_order_release);
  return clusters;
}

/// The clusters of a grid for m x n outputs: all that fit, or with a resident B the largest multiple of the columns of
/// clusters, so that each keeps its column. 0 if there is none.
template <class Kernel, class Tiling>
int grid_clusters(int n) {
  const int most = max_resident_clusters<Kernel>();
  if (Tiling::kResidentK == 0) return most;
  constexpr int cluster_columns = Tiling::kTileN * Tiling::kClusterN;
  const int columns = (n + cluster_columns - 1) / cluster_columns;
  return most / columns * columns;
}

template <class Kernel>
cudaError_t launch(const typename Kernel::Arguments& arguments, bool cooperative, cudaStream_t stream) {
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
  std::array<cudaLaunchAttribute, 2> attributes{};
  const cudaLaunchConfig_t config =
      launch_config<Kernel>(Kernel::get_grid_shape(params), cooperative, stream, attributes);
  void* kernel_arguments[] = {&params};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>), kernel_arguments);
}

}  // namespace torchops::cuda::gemm
