#pragma once

// Lets warpgroups take turns with the tiles of one ring of stages.

#include <cutlass/arch/barrier.h>

#include "cuda/gemm/sm90/skeleton/cutlass.cuh"

namespace torchops::cuda::gemm {

/// A barrier tells phases apart by parity: a thread that waits for a load must know that the previous load is done. So
/// if stages pass from one warpgroup to another, the warpgroups wait for their stages one after another.
///
/// Each warp passes the turn on for itself. If one thread did so for its warpgroup, the turn could come round again
/// while another warp still waits for it: two phases later, that warp would see the parity of the previous phase, and
/// wait forever.
template <int warpgroups>
struct Turns {
  cutlass::arch::ClusterBarrier barriers[warpgroups];

  CUTLASS_DEVICE void init() {
    for (auto& barrier : barriers) barrier.init(4);  // the warps of the previous warpgroup
  }
  /// The first warpgroup waits for the last one's previous round, the others for the one before them in this round.
  CUTLASS_DEVICE void wait(int warpgroup, uint32_t round) {
    if (warpgroup > 0 || round > 0) barriers[warpgroup].wait((warpgroup > 0 ? round : round - 1) & 1);
  }
  /// Called by all threads, once they have seen what they wait for.
  CUTLASS_DEVICE void pass_on(int warpgroup) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barriers[(warpgroup + 1) % warpgroups].arrive();
  }
};

}  // namespace torchops::cuda::gemm
