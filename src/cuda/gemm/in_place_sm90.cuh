#pragma once

// a = a @ b where the accumulators of the CTAs that run are the only scratch.
//
// A row of the result needs all of that row of a, so a panel (kTileM rows) may be overwritten only when every CTA that
// computes a tile of it has finished reading it. Before its epilogue each CTA adds 1 to the panel's counter (release)
// and waits until the counter equals the number of the panel's tiles (acquire). That is all that differs from an
// ordinary persistent GEMM, so it is a node of the epilogue's visitor tree.
//
// Why it always ends. All clusters of the grid run at the same time: the grid is no larger than what the occupancy
// query says the device holds at once, and the launch is cooperative, for which CUDA guarantees that all of the grid is
// resident, whatever else runs (a grid that cannot be is refused at the launch; the caller then takes another way).
// Tiles are numbered along the columns, panel row after panel row (a panel row is the kClusterM panels that a cluster
// spans; where it spans several tiles of a row too, read "tile" below as all of these), and cluster c of C takes tiles
// c, c + C, c + 2C, ... in that order. Let p be the first panel row with a tile that has not arrived at its counter. No
// panel row has more than C tiles (checked below), so the tile that the same cluster had before lies in an earlier
// panel row, all of whose tiles have arrived; so that one passes its wait, leaves its epilogue, and the cluster goes on
// to its tile of p, loads and multiplies without waiting for anyone, and arrives. With ping-pong, the two warpgroups
// enter their epilogues in the order of their tiles, so the same holds. By induction every tile arrives, and every wait
// ends. The grid is truncated to the tiles of a small problem, all of which then run at once.
//
// Reads ahead: the loading warp may fetch the next tile's rows of a early. They belong to a later panel row, which
// nobody has overwritten, because this CTA has not arrived there.

#include "cuda/gemm/in_place.h"
#include "cuda/gemm/kernel_sm90.cuh"

namespace torchops::cuda::gemm {

namespace fusion = cutlass::epilogue::fusion;

template <int epilogue_threads>
struct PanelBarrier : fusion::Sm90VisitorImpl<> {
  struct Arguments {
    unsigned* counters = nullptr;
    unsigned tiles = 1;  // of one panel
  };
  using Params = Arguments;
  struct SharedStorage {};

  template <class Problem>
  static constexpr Params to_underlying_arguments(const Problem&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class Problem>
  static bool can_implement(const Problem&, const Arguments&) {
    return true;
  }
  template <class Problem>
  static size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }
  template <class Problem>
  static cutlass::Status initialize_workspace(const Problem&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE PanelBarrier() {}
  CUTLASS_HOST_DEVICE PanelBarrier(const Params& params, const SharedStorage&) : params(params) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(const fusion::ProducerLoadArgs<Args...>&) {
    return fusion::EmptyProducerLoadCallbacks{};
  }

  struct StoreCallbacks : fusion::EmptyConsumerStoreCallbacks {
    unsigned* counter;
    unsigned tiles;
    int thread;

    CUTLASS_DEVICE StoreCallbacks(unsigned* counter, unsigned tiles, int thread)
        : counter(counter), tiles(tiles), thread(thread) {}

    // The accumulators are complete, so the copy engine has read everything that this warpgroup's products needed.
    CUTLASS_DEVICE void begin() {
      if (tiles == 1) return;
      sync();
      if (thread == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        unsigned arrived;
        do {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
        } while (arrived < tiles);
      }
      sync();
      // What follows writes through the copy engine, whose accesses the acquire alone does not order.
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }

    CUTLASS_DEVICE static void sync() {
      cutlass::arch::NamedBarrier::sync(epilogue_threads, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
    }

    template <class ElementAccumulator, class ElementInput, int count>
    CUTLASS_DEVICE cutlass::Array<ElementInput, count> visit(const cutlass::Array<ElementAccumulator, count>&, int, int,
                                                             int, const cutlass::Array<ElementInput, count>& input) {
      return input;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Args...>& args) {
    return StoreCallbacks(params.counters + static_cast<int>(cute::get<0>(args.tile_coord_mnkl)), params.tiles,
                          args.thread_idx);
  }

  Params params;
};

template <InPlaceType type>
using InPlaceElement = std::conditional_t<type == InPlaceType::kFloat16, cutlass::half_t, cutlass::bfloat16_t>;

template <InPlaceTiling tiling>
struct InPlaceTilingOf;
template <>
struct InPlaceTilingOf<InPlaceTiling::k64x192> {
  using Type = Tiling<64, 192, 1, 1, true, 64, 192>;
};
template <>
struct InPlaceTilingOf<InPlaceTiling::k64x256> {
  using Type = Tiling<64, 256, 1, 1, true, 64, 256>;
};
template <>
struct InPlaceTilingOf<InPlaceTiling::k128x256> {
  using Type = Tiling<128, 256, 2, 1, false, 64>;
};
template <>
struct InPlaceTilingOf<InPlaceTiling::k128x128> {
  using Type = Tiling<128, 128, 2, 1, true, 64>;
};
template <>
struct InPlaceTilingOf<InPlaceTiling::k128x128SharedA> {
  using Type = Tiling<128, 128, 1, 2, true, 128>;
};

template <class Element, class Tiling, bool b_k_major>
struct InPlaceGemm {
  using Barrier = PanelBarrier<Tiling::kEpilogueThreads>;
  using Kernel = typename Sm90Gemm<Element, Tiling, b_k_major, fusion::Sm90EVT<Barrier, fusion::Sm90AccFetch>>::Kernel;

  static int round_up(int value, int step) { return (value + step - 1) / step * step; }
  static int tiles(const InPlaceProblem& p) {
    return round_up((p.n + Tiling::kTileN - 1) / Tiling::kTileN, Tiling::kClusterN);
  }

  static int64_t counters(const InPlaceProblem& p) {
    if (Tiling::kResidentK > 0 && p.n > Tiling::kResidentK) return -1;
    const int clusters = grid_clusters<Kernel, Tiling>(p.n);
    if (clusters == 0 || tiles(p) / Tiling::kClusterN > clusters) return -1;
    return tiles(p) == 1 ? 0 : round_up((p.rows + Tiling::kTileM - 1) / Tiling::kTileM, Tiling::kClusterM);
  }

  static cudaError_t run(const InPlaceProblem& p, unsigned* counters, cudaStream_t stream) {
    typename Kernel::Arguments arguments{};
    arguments.problem_shape = {p.rows, p.n, p.n, 1};
    arguments.mainloop.ptr_A = static_cast<const Element*>(p.a);
    arguments.mainloop.dA = {p.a_stride, cute::_1{}, 0};
    arguments.mainloop.ptr_B = static_cast<const Element*>(p.b);
    if constexpr (b_k_major) {
      arguments.mainloop.dB = {p.b_stride, cute::_1{}, 0};
    } else {
      arguments.mainloop.dB = {cute::_1{}, p.b_stride, 0};
    }
    arguments.epilogue.ptr_D = static_cast<Element*>(p.a);
    arguments.epilogue.dD = {p.a_stride, cute::_1{}, 0};
    arguments.epilogue.thread = {{}, {counters, static_cast<unsigned>(tiles(p))}};
    const int clusters = grid_clusters<Kernel, Tiling>(p.n);
    arguments.hw_info.sm_count = clusters * Tiling::kClusterM * Tiling::kClusterN;
    arguments.hw_info.max_active_clusters = clusters;
    arguments.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongN;
    arguments.scheduler.max_swizzle_size = 1;
    return launch<Kernel>(arguments, /*cooperative=*/tiles(p) > 1, stream);
  }
};

template <InPlaceType type, InPlaceTiling tiling, bool b_k_major>
int64_t in_place_counters(const InPlaceProblem& problem) {
  return InPlaceGemm<InPlaceElement<type>, typename InPlaceTilingOf<tiling>::Type, b_k_major>::counters(problem);
}

template <InPlaceType type, InPlaceTiling tiling, bool b_k_major>
cudaError_t run_in_place(const InPlaceProblem& problem, unsigned* counters, cudaStream_t stream) {
  return InPlaceGemm<InPlaceElement<type>, typename InPlaceTilingOf<tiling>::Type, b_k_major>::run(problem, counters,
                                                                                                   stream);
}

}  // namespace torchops::cuda::gemm
