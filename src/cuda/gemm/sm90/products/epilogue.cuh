#pragma once

// The nodes of epilogues. CUTLASS walks a tree of them for each fragment of the accumulator, in registers.

#include <cutlass/epilogue/collective/collective_builder.hpp>

#include "cuda/gemm/sm90/pointwise.cuh"

namespace torchops::cuda::gemm {

namespace fusion = cutlass::epilogue::fusion;

/// t = F::kScale * (sum + bias), the argument of F::of_scaled(). Scaled here, for all rows at once, the bias costs a
/// quarter of an instruction per output, and the sum no addition.
template <class F>
struct Argument {
  template <class Fragment>
  struct Of;
  template <int count>
  struct Of<cutlass::Array<float, count>> {
    using Values = cutlass::Array<float, count>;
    CUTLASS_DEVICE Values operator()(Values bias, Values sum) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < count; ++i) sum[i] = fmaf(F::kScale, sum[i], F::kScale * bias[i]);
      return sum;
    }
  };
};

/// F of a scaled argument, exact enough for results of type Element.
template <class F, class Element>
struct Value {
  template <class Fragment>
  struct Of;
  template <int count>
  struct Of<cutlass::Array<float, count>> {
    static constexpr Exactness kExactness = kExactnessOf<Element>;
    CUTLASS_DEVICE cutlass::Array<float, count> operator()(cutlass::Array<float, count> t) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < count; ++i) t[i] = F::template of_scaled<kExactness>(t[i]);
      return t;
    }
  };
};

constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

/// The accumulator.
using Sum = fusion::Sm90AccFetch;

/// One value per column; zeros if its pointer is null.
template <class Tile, class Element>
using Bias = fusion::Sm90RowBroadcast<0, Tile, Element, float>;

/// F(sum + bias).
template <class F, class Element, class Sum, class Bias>
using Apply =
    fusion::Sm90EVT<fusion::Sm90Compute<Value<F, Element>::template Of, Element, float, kRound>,
                    fusion::Sm90EVT<fusion::Sm90Compute<Argument<F>::template Of, float, float, kRound>, Bias, Sum>>;

/// Lets a GEMM overwrite its own A (a = a @ b): the accumulators of the CTAs that run are the only scratch.
///
/// A row of the result needs all of that row of a, so a panel (tile_m rows) may be overwritten only after every CTA
/// that computes a tile of it has finished reading it. Before its epilogue, each CTA adds 1 to the panel's counter
/// (release) and waits until the counter equals the number of the panel's tiles (acquire). Nothing else differs from an
/// ordinary persistent GEMM, so this is a node of the epilogue's visitor tree.
///
/// Why it always terminates: All clusters of the grid run at the same time. The grid is no larger than what the
/// occupancy query says the device holds at once, and the launch is cooperative, for which CUDA guarantees that the
/// whole grid is resident, whatever else runs (a grid that cannot be is refused at launch; the caller then takes
/// another way). Tiles are numbered along the columns, panel row after panel row, batch after batch (a panel row is the
/// cluster_m panels that a cluster spans; if a cluster also spans several tiles of a row, read "tile" below as all of
/// these), and cluster c of C takes tiles c, c + C, c + 2C, ... in that order. Let p be the first panel row with a tile
/// that has not arrived at its counter. No panel row has more than C tiles (Overwrite::prepare checks it), so the
/// previous tile of the same cluster is in an earlier panel row, all of whose tiles have arrived. So that tile passes
/// its wait and leaves its epilogue, and the cluster goes on to its tile of p, loads and multiplies without waiting for
/// anyone, and arrives. With ping-pong, the two warpgroups enter their epilogues in the order of their tiles, so the
/// same holds. By induction, every tile arrives and every wait ends. For a small problem, the grid is truncated to its
/// tiles, all of which then run at once.
///
/// Prefetching is safe: the load warp may fetch the next tile's rows of a early, but these belong to a later panel row,
/// which nobody has overwritten, because this CTA has not arrived there.
template <int epilogue_threads>
struct PanelBarrier : fusion::Sm90VisitorImpl<> {
  struct Arguments {
    unsigned* counters = nullptr;
    unsigned tiles = 1;   // in a panel
    unsigned panels = 0;  // in a batch element
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

    // The accumulators are complete, so TMA has loaded everything that this warpgroup's products needed.
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
      // The following writes go through TMA, in the async proxy, whose accesses the acquire alone does not order.
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
    const auto [m, n, k, batch] = args.tile_coord_mnkl;
    return StoreCallbacks(params.counters + static_cast<unsigned>(batch) * params.panels + static_cast<unsigned>(m),
                          params.tiles, args.thread_idx);
  }

  Params params;
};

}  // namespace torchops::cuda::gemm
