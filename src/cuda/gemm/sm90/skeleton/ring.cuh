#pragma once

// Stages of shared memory that tiles pass through, from the thread that loads them to those that compute. The memory of
// the stages is a member of its own: it is aligned to 1024 bytes, which would pad barriers next to each stage.

#include <cutlass/arch/barrier.h>

#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "cuda/gemm/sm90/skeleton/cutlass.cuh"

namespace torchops::cuda::gemm {

/// A barrier whose phase ends with so many arrivals.
template <int arrivals>
struct Barrier : cutlass::arch::ClusterBarrier {
  CUTLASS_DEVICE void init() { cutlass::arch::ClusterBarrier::init(arrivals); }
};

/// A barrier whose phase ends with so many arrivals, and with the bytes that these announce.
template <int arrivals = 1>
struct LoadBarrier : cutlass::arch::ClusterTransactionBarrier {
  CUTLASS_DEVICE void init() { cutlass::arch::ClusterTransactionBarrier::init(arrivals); }
};

/// The barriers of `count` stages. A stage is free again after `releases`, loaded after `arrivals` and their bytes.
template <int count, int releases, int arrivals = 1>
struct Ring {
  static constexpr int kStages = count;
  /// A place in the order of tiles, from which its stage and the phase of its barriers follow.
  using At = cutlass::PipelineState<count>;

  LoadBarrier<arrivals> loaded[count];
  Barrier<releases> free[count];

  CUTLASS_DEVICE void init() {
    for (int stage = 0; stage < count; ++stage) {
      loaded[stage].init();
      free[stage].init();
    }
  }

  /// Waits until the stage is free, which all are in the first round.
  CUTLASS_DEVICE void wait_until_free(const At& at) { free[at.index()].wait(at.phase() ^ 1); }

  /// The same, for the thread that loads; returns the barrier at which `bytes` are to arrive.
  CUTLASS_DEVICE auto& fill(const At& at, int bytes) {
    auto& barrier = loaded[at.index()];
    wait_until_free(at);
    barrier.arrive_and_expect_tx(bytes);
    return barrier;
  }

  CUTLASS_DEVICE void wait_until_loaded(const At& at) { loaded[at.index()].wait(at.phase()); }
};

template <class One>
CUTLASS_DEVICE void init_each(One& barrier) {
  barrier.init();
}
template <class One, int count>
CUTLASS_DEVICE void init_each(One (&barriers)[count]) {
  for (auto& barrier : barriers) init_each(barrier);
}

/// Initialises barriers, rings, and what else has an init(), or arrays of them; on one thread of a CTA.
template <class... All>
CUTLASS_DEVICE void init_barriers(All&... all) {
  (init_each(all), ...);
  cutlass::arch::fence_barrier_init();
}

}  // namespace torchops::cuda::gemm
