#pragma once

#include <cuda_runtime_api.h>

namespace torchops::cuda {

/// The shared memory that a block may have on every GPU from compute capability 8.0 on: 8.6, 8.9 and 12.0 have the
/// least.
constexpr int kLeastSharedBytes = 99 * 1024;

/// The properties of the current device, with the limits of detail::pretended_device() if there is one.
const cudaDeviceProp& device_properties();

/// The bytes that pass through the memory of the current device in a microsecond, as large kernels see it.
double bytes_per_us();

}  // namespace torchops::cuda
