#pragma once

#include "cuda/rows/cluster_messages.cuh"
#include "cuda/rows/groups.cuh"

// Messages between the blocks of a cluster that nobody waits for, unless they are late.
namespace torchops::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// In each round, every block of the cluster sends a message to all; it receives those of a round after it has sent its
/// own of the next one, if there is one. Before a block sends round i + 4, it has received round i + 2 from all blocks,
/// and they sent that after they had read round i: so its slot, and its barrier, can be used again.
template <class Message>
class Mailbox {
 public:
  struct Shared {
    Message from_block[4][Cluster::kMaxBlocks];
    uint64_t arrived[4];
  };

  __device__ explicit Mailbox(Shared& shared) : blocks(cluster_blocks()), block(cluster_block()), shared_(shared) {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : shared.arrived) init_message_barrier(barrier);
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }

  /// Called by one warp, after all warps of the block have read what they received in round `round` - 2.
  __device__ void send(unsigned round, const Message& message) {
    const int lane = threadIdx.x % kWarp, slot = round % 4;
    uint64_t& barrier = shared_.arrived[slot];
    if (lane == 0) expect_messages(barrier, blocks * static_cast<int>(sizeof(Message)));
    if (lane < blocks) send_message(message, &shared_.from_block[slot][block], barrier, lane);
  }

  /// The messages of all blocks, in their order. A block that has received those of its last round may end.
  __device__ const Message* receive(unsigned round) {
    const int slot = round % 4;
    wait_for_messages(shared_.arrived[slot], round / 4 & 1);
    return shared_.from_block[slot];
  }

  const int blocks, block;

 private:
  Shared& shared_;
};
#endif

}  // namespace torchops::cuda
