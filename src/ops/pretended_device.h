#pragma once

#include <cstdint>
#include <optional>

namespace torchops::detail {

/// What the choice of CUDA kernels reads of a GPU.
struct DeviceLimits {
  int64_t major, minor;  // the compute capability
  int64_t shared_bytes_per_block, shared_bytes_per_multiprocessor;
};

/// For tests: the limits of the compute capability in the environment variable TORCHOPS_PRETEND_CAPABILITY, instead of
/// which kernels are chosen for every GPU; nullopt if it is not set. A Hopper GPU so takes what another one would. The
/// machine code stays its own, so this shows that other choices are right, not that they are fast. Throws
/// c10::ValueError if there is no such capability.
const std::optional<DeviceLimits>& pretended_device();

}  // namespace torchops::detail
