#pragma once

namespace torchops::cuda {

/// The sum over the four lanes of a quad, which share rows in the accumulators of matrix instructions.
__device__ inline float sum_of_quad(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

}  // namespace torchops::cuda
