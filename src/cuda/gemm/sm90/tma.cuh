#pragma once

#include <algorithm>
#include <cute/arch/copy_sm90_desc.hpp>

#include "cuda/gemm/sm90/cutlass.cuh"

namespace torchops::cuda::gemm {

/// Whether the driver has made these descriptors for TMA. CUTLASS only asserts it, which is compiled out here, and
/// would launch with the zeros that a failure leaves.
template <class... Copy>
bool are_encoded(const Copy&... copies) {
  const auto is_encoded = [](const cute::TmaDescriptor* descriptor) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(descriptor);
    return std::any_of(bytes, bytes + sizeof(*descriptor), [](unsigned char byte) { return byte != 0; });
  };
  return (is_encoded(copies.get_tma_descriptor()) && ...);
}

}  // namespace torchops::cuda::gemm
