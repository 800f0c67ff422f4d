#pragma once

#include "cuda/row_groups.cuh"

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
      for (uint64_t& barrier : shared.arrived) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }

  /// Called by one warp, after all warps of the block have read what they received in round `round` - 2.
  __device__ void send(unsigned round, const Message& message) {
    static_assert(sizeof(Message) % sizeof(uint32_t) == 0);
    const int lane = threadIdx.x % kWarp, slot = round % 4;
    if (lane == 0) {
      asm volatile(
          "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&shared_.arrived[slot])),
          "r"(blocks * static_cast<int>(sizeof(Message)))
          : "memory");
    }
    if (lane >= blocks) return;
    const uint32_t to = address_in_block(&shared_.from_block[slot][block], lane);
    const uint32_t barrier = address_in_block(&shared_.arrived[slot], lane);
    const auto* const words = reinterpret_cast<const uint32_t*>(&message);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Message) / sizeof(uint32_t)); ++i) {
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to + 4 * i),
                   "r"(words[i]), "r"(barrier)
                   : "memory");
    }
  }

  /// The messages of all blocks, in their order. A block that has received those of its last round may end.
  __device__ const Message* receive(unsigned round) {
    const int slot = round % 4;
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 arrived, [%0], %1;\n"
        "@!arrived bra again;\n"
        "}\n" ::"r"(shared_address(&shared_.arrived[slot])),
        "r"(round / 4 & 1)
        : "memory");
    return shared_.from_block[slot];
  }

  const int blocks, block;

 private:
  Shared& shared_;
};
#endif

}  // namespace torchops::cuda
