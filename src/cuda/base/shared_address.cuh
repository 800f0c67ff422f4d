#pragma once

#include <cstdint>

namespace torchops::cuda {

/// The address of shared memory as instructions take it.
__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

}  // namespace torchops::cuda
