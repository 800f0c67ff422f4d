#pragma once

// A mainloop for short sums: B stays in shared memory.
//
// With short sums (k <= 256), a GEMM on Hopper is bound by memory, and CUTLASS's mainloop fetches B again for every
// tile of the output: at k = 256, tiles of 128 x 128 request more bytes from the second-level cache than device memory
// has to deliver. Here a CTA keeps its column of tiles for its whole life, so its part of B, all of k, is loaded once,
// and only A streams through the pipeline.

#include <cutlass/gemm/collective/collective_builder.hpp>

#include "cuda/gemm/sm90/skeleton/cutlass.cuh"

namespace torchops::cuda::gemm {

/// Stream is CUTLASS's mainloop, of whose pipeline only the stages of A are used. B has room for `k_tiles` tiles along
/// k. The caller ensures that all tiles of a CTA are in one column (see Gemm::grid_clusters) and in one batch element.
template <class Stream, int k_tiles>
struct ResidentMainloop : Stream {
  using typename Stream::MainloopPipeline;
  using typename Stream::Params;
  using typename Stream::PipelineState;
  using typename Stream::TiledMma;
  using typename Stream::TileShape;
  using ClusterShape = typename Stream::DispatchPolicy::ClusterShape;

  using LayoutA = typename Stream::SmemLayoutA;
  static constexpr bool kBNMajor = cutlass::gemm::detail::is_major<0, typename Stream::StrideB>();
  using LayoutB = decltype(cute::tile_to_shape(
      typename Stream::SmemLayoutAtomB{},
      cute::make_shape(cute::shape<1>(TileShape{}), cute::shape<2>(TileShape{}), cute::Int<k_tiles>{}),
      cute::conditional_t<kBNMajor, cute::Step<cute::_2, cute::_1, cute::_3>,
                          cute::Step<cute::_1, cute::_2, cute::_3>>{}));

  struct SharedStorage {
    struct TensorStorage : cute::aligned_struct<128, cute::_0> {
      cute::array_aligned<typename TiledMma::ValTypeA, cute::cosize_v<LayoutA>> a;
      cute::array_aligned<typename TiledMma::ValTypeB, cute::cosize_v<LayoutB>> b;
    } tensors;
    typename MainloopPipeline::SharedStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;

  template <class Problem>
  static Params to_underlying_arguments(const Problem& problem, const typename Stream::Arguments& arguments,
                                        void* workspace) {
    Params params = Stream::to_underlying_arguments(problem, arguments, workspace);
    params.tma_transaction_bytes = params.tma_transaction_bytes_mk;
    return params;
  }

  /// With the first tile, B arrives at the barriers of the stages of A. Of two ping-pong warpgroups, the second one
  /// starts its products when the first one has seen all of its own stages, and therefore all of B.
  template <class Inputs, class KTiles, class Coordinates>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState write, const Inputs& inputs,
                           const Coordinates& tile, KTiles k_tile, int k_tile_count, int, uint32_t rank,
                           TensorStorage& storage) {
    if (!cute::elect_one_sync()) return;
    using namespace cute;
    constexpr uint32_t cluster_m = size<0>(ClusterShape{});
    const uint32_t rank_m = rank % cluster_m, rank_n = rank / cluster_m;
    const auto copy_a = params.tma_load_a.get_slice(rank_n);
    const auto copy_b = params.tma_load_b.get_slice(rank_m);
    const Tensor from_a = copy_a.partition_S(get<0>(inputs)(_, _, get<0>(tile), _, get<3>(tile)));
    const Tensor from_b = copy_b.partition_S(get<1>(inputs)(_, _, get<1>(tile), _, get<3>(tile)));
    Tensor to_a = copy_a.partition_D(make_tensor(make_smem_ptr(storage.a.data()), LayoutA{}));
    Tensor to_b = copy_b.partition_D(make_tensor(make_smem_ptr(storage.b.data()), LayoutB{}));
    // The CTAs of a cluster that share this part of A are along n; those that share this part of B are along m.
    uint16_t share_a = 0, share_b = 0;
    for (uint32_t n = 0; n < size<1>(ClusterShape{}); ++n) share_a |= uint16_t(1u << (rank_m + n * cluster_m));
    for (uint32_t m = 0; m < cluster_m; ++m) share_b |= uint16_t(1u << (m + rank_n * cluster_m));
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = 0; k < k_tile_count; ++k, ++k_tile, ++write) {
      if (!b_requested_) {
        // Before the stage's own bytes are announced: another CTA of the cluster may have sent its half of B by then,
        // and the pending bytes must not reach 0 before everything has arrived.
        while (pipeline.producer_try_acquire(write) != cutlass::BarrierStatus::WaitDone) {
        }
        pipeline.producer_expect_transaction(write, params.tma_transaction_bytes_nk);
      }
      pipeline.producer_acquire(write);
      auto* const barrier = pipeline.producer_get_barrier(write);
      if (!b_requested_) {
        copy(params.tma_load_b.with(*barrier, share_b), from_b(_, _, _, *k_tile), to_b(_, _, _, k));
      }
      copy(params.tma_load_a.with(*barrier, share_a), from_a(_, _, _, *k_tile), to_a(_, _, _, write.index()));
    }
    b_requested_ = true;
  }

  /// Leaves the products of the last stage in flight, and that stage unreleased, for mma_tail().
  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& sums, int k_tile_count,
                          int thread, TensorStorage& storage, const Params&) {
    using namespace cute;
    TiledMma products;
    const int warpgroup = thread / cutlass::NumThreadsPerWarpGroup;
    const auto slice = products.get_slice(__shfl_sync(~0u, warpgroup, 0) * cutlass::NumThreadsPerWarpGroup);
    const Tensor a = slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(storage.a.data()), LayoutA{})));
    const Tensor b = slice.make_fragment_B(slice.partition_B(make_tensor(make_smem_ptr(storage.b.data()), LayoutB{})));
    PipelineState release = read;
    products.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = 0; k < k_tile_count; ++k, ++read) {
      pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(a); ++block) {
        cute::gemm(products, a(_, _, block, read.index()), b(_, _, block, k), sums);
        products.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      if (k > 0) {
        warpgroup_wait<1>();
        pipeline.consumer_release(release);
        ++release;
      }
    }
    warpgroup_fence_operand(sums);
  }

  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState read, int k_tile_count) {
    read.advance(k_tile_count - 1);
    cute::warpgroup_wait<0>();
    pipeline.consumer_release(read);
  }

 private:
  bool b_requested_ = false;  // by the loading thread
};

}  // namespace torchops::cuda::gemm
