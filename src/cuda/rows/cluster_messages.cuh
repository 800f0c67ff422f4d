#pragma once

#include <cstdint>

#include "cuda/base/shared_address.cuh"

// Messages between the blocks of a cluster (compute capability 9.0): a block writes to the shared memory of another,
// and a barrier there counts the bytes that have arrived. No torch headers.
namespace torchops::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// The number of blocks of this cluster, and which one this is.
__device__ inline int cluster_blocks() {
  int value;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  return value;
}
__device__ inline int cluster_block() {
  int value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}

/// Where `shared`, in the shared memory of this block, lies in that of another block of the cluster.
__device__ inline uint32_t address_in_block(const void* shared, int block) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(block));
  return address;
}

/// By one thread. Others may use the barrier, and blocks send to it, after the block, or the cluster, has synchronized.
__device__ inline void init_message_barrier(uint64_t& barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// By one thread in each phase, before or while messages arrive: the phase ends with the last of so many bytes.
__device__ inline void expect_messages(uint64_t& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}
/// Writes to the place of `to` in another block, where the place of `barrier` counts it.
template <class Message>
__device__ inline void send_message(const Message& message, Message* to, const uint64_t& barrier, int block) {
  static_assert(sizeof(Message) % sizeof(uint32_t) == 0);
  const uint32_t address = address_in_block(to, block), barrier_there = address_in_block(&barrier, block);
  const auto* const words = reinterpret_cast<const uint32_t*>(&message);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Message) / sizeof(uint32_t)); ++i) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address + 4 * i),
                 "r"(words[i]), "r"(barrier_there)
                 : "memory");
  }
}
/// Waits for the end of a phase, from which on this thread sees its messages. Phases have the parities 0, 1, 0, ...
__device__ inline void wait_for_messages(uint64_t& barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred arrived;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 arrived, [%0], %1;\n"
      "@!arrived bra again;\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}
#endif

}  // namespace torchops::cuda
