#pragma once

// What the operations of products/ops.cuh share: CUTLASS's TMA warp-specialised persistent kernel, built from a
// mainloop and an epilogue, and its launch. Only for translation units compiled for sm_90a; no torch headers, so that
// each compiles in seconds rather than minutes.

#include <cutlass/device_kernel.h>

#include <algorithm>
#include <array>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "cuda/base/per_device.h"
#include "cuda/gemm/sm90/products/mainloop.cuh"
#include "cuda/gemm/sm90/skeleton/cutlass.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"

namespace torchops::cuda::gemm {

/// D (m x n) = epilogue(A (m x k) @ B (k x n)), accumulated in float32. A and D have contiguous rows; B has contiguous
/// columns (b_k_major, as w.T of a weight has) or contiguous rows. Visitor is the visitor tree that the epilogue walks
/// for each fragment of the accumulator. Source is the type of the matrix C that the epilogue reads, or void.
template <class Element_, Tiling tiling, bool b_k_major, class Visitor, class Out_ = Element_, class Source = void>
struct Gemm {
  using Element = Element_;
  using Out = Out_;
  static constexpr TilingSpec kTiling = kSpec<tiling>;
  static constexpr bool kPingPong = kTiling.schedule == Schedule::kPingPong;
  // 128 bytes: the widest swizzle of shared memory.
  static constexpr int kTileK = 128 / sizeof(Element);
  static constexpr int kAlignment = 16 / sizeof(Element), kAlignmentOut = 16 / sizeof(Out);
  using Tile = cute::Shape<cute::Int<kTiling.tile_m>, cute::Int<kTiling.tile_n>, cute::Int<kTileK>>;
  static constexpr int kEpilogueN = std::max(kTiling.epilogue_n * 2 / static_cast<int>(sizeof(Out)), 32);
  using EpilogueTile = cute::Shape<cute::Int<kPingPong ? 64 : 128>, cute::Int<kEpilogueN>>;
  using Cluster = cute::Shape<cute::Int<kTiling.cluster_m>, cute::Int<kTiling.cluster_n>, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor;
  using LayoutB = std::conditional_t<b_k_major, cutlass::layout::ColumnMajor, RowMajor>;
  using MainloopSchedule = std::conditional_t<kPingPong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                              cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using EpilogueSchedule = std::conditional_t<kPingPong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile, float, float, Source, RowMajor,
      kAlignmentOut, Out, RowMajor, kAlignmentOut, EpilogueSchedule, Visitor>::CollectiveOp;
  static constexpr int kEpilogueBytes = static_cast<int>(sizeof(typename Epilogue::SharedStorage));
  // What a resident B leaves of 227 KiB, minus 1 KiB for the barriers.
  static constexpr int kStagesOfA = std::min<int>(
      8, (226 * 1024 - kEpilogueBytes - kTiling.tile_n * kTiling.resident_k * static_cast<int>(sizeof(Element))) /
             (kTiling.tile_m * 128));
  using Stages =
      std::conditional_t<(kTiling.resident_k > 0), cutlass::gemm::collective::StageCount<kStagesOfA>,
                         std::conditional_t<(kTiling.stages > 0), cutlass::gemm::collective::StageCount<kTiling.stages>,
                                            cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>>>;
  using Streamed = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, kAlignment, Element, LayoutB, kAlignment,
      float, Tile, Cluster, Stages, MainloopSchedule>::CollectiveOp;
  using Mainloop = std::conditional_t<(kTiling.resident_k > 0),
                                      ResidentMainloop<Streamed, std::max(kTiling.resident_k / kTileK, 1)>, Streamed>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                      cutlass::gemm::PersistentScheduler>;

  /// How many clusters a grid for n columns has: all that the current device holds at once, or, with a resident B, the
  /// largest multiple of the column count in clusters, so that each keeps its column. kNotForMe if there is none.
  static Status grid_clusters(int n, int& clusters);

  /// The arguments that all operations share; they add the visitor's arguments and the scheduler's options.
  static typename Kernel::Arguments arguments(const Problem& p, int clusters) {
    typename Kernel::Arguments arguments{};
    arguments.problem_shape = {p.m, p.n, p.k, p.batch};
    arguments.mainloop.ptr_A = static_cast<const Element*>(p.a.data);
    arguments.mainloop.dA = {p.a.row_stride, cute::_1{}, p.a.batch_stride};
    arguments.mainloop.ptr_B = static_cast<const Element*>(p.b.data);
    if constexpr (b_k_major) {
      arguments.mainloop.dB = {p.b.row_stride, cute::_1{}, p.b.batch_stride};
    } else {
      arguments.mainloop.dB = {cute::_1{}, p.b.row_stride, p.b.batch_stride};
    }
    arguments.epilogue.ptr_D = static_cast<Out*>(const_cast<void*>(p.d.data));
    arguments.epilogue.dD = {p.d.row_stride, cute::_1{}, p.d.batch_stride};
    if constexpr (!std::is_void_v<Source>) {
      arguments.epilogue.ptr_C = static_cast<const Source*>(p.c.data);
      arguments.epilogue.dC = {p.c.row_stride, cute::_1{}, p.c.batch_stride};
    }
    arguments.hw_info.sm_count = clusters * kTiling.cluster_m * kTiling.cluster_n;
    arguments.hw_info.max_active_clusters = clusters;
    return arguments;
  }

  /// With `cooperative`, CUDA guarantees that the whole grid runs at once: kNotForMe if it cannot.
  static Status launch(const typename Kernel::Arguments& arguments, bool cooperative, cudaStream_t stream);

 private:
  static cudaLaunchConfig_t config(dim3 grid, bool cooperative, cudaStream_t stream,
                                   std::array<cudaLaunchAttribute, 2>& attributes) {
    constexpr unsigned cluster_m = kTiling.cluster_m, cluster_n = kTiling.cluster_n;
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {cluster_m, cluster_n, 1};
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

  // How many clusters of this kernel the current device holds at once.
  static cudaError_t max_resident_clusters(int& clusters) {
    static PerDevice cache;
    return cache.get(clusters, [](int& answer) {
      const auto kernel = reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>);
      if (const cudaError_t error =
              cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
          error != cudaSuccess) {
        return error;
      }
      std::array<cudaLaunchAttribute, 2> attributes{};
      const cudaLaunchConfig_t one_cluster =
          config(dim3(kTiling.cluster_m, kTiling.cluster_n, 1), false, nullptr, attributes);
      return cudaOccupancyMaxActiveClusters(&answer, kernel, &one_cluster);
    });
  }
};

template <class Element, Tiling tiling, bool b_k_major, class Visitor, class Out, class Source>
Status Gemm<Element, tiling, b_k_major, Visitor, Out, Source>::grid_clusters(int n, int& clusters) {
  if (const cudaError_t error = max_resident_clusters(clusters); error != cudaSuccess) return Status::of(error);
  if (kTiling.resident_k > 0) {
    constexpr int cluster_columns = kTiling.tile_n * kTiling.cluster_n;
    const int columns = (n + cluster_columns - 1) / cluster_columns;
    clusters = clusters / columns * columns;
  }
  return clusters > 0 ? Status{} : Status::not_for_me();
}

template <class Element, Tiling tiling, bool b_k_major, class Visitor, class Out, class Source>
Status Gemm<Element, tiling, b_k_major, Visitor, Out, Source>::launch(const typename Kernel::Arguments& arguments,
                                                                      bool cooperative, cudaStream_t stream) {
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
  if (!are_encoded(params.mainloop.tma_load_a, params.mainloop.tma_load_b, params.epilogue.tma_store_d)) {
    return Status::of(cudaErrorInvalidValue);
  }
  if constexpr (!std::is_void_v<Source>) {
    if (!are_encoded(params.epilogue.tma_load_c)) return Status::of(cudaErrorInvalidValue);
  }
  std::array<cudaLaunchAttribute, 2> attributes{};
  const cudaLaunchConfig_t launch_config = config(Kernel::get_grid_shape(params), cooperative, stream, attributes);
  void* kernel_arguments[] = {&params};
  const cudaError_t error = cudaLaunchKernelExC(
      &launch_config, reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>), kernel_arguments);
  if (cooperative && error == cudaErrorCooperativeLaunchTooLarge) {
    // This process may use only a part of the device, and the occupancy query did not say so. Nothing was launched.
    cudaGetLastError();
    return Status::not_for_me();
  }
  return Status::of(error);
}

}  // namespace torchops::cuda::gemm
