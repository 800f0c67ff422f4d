#include "cuda/base/device.h"

#include <ATen/cuda/CUDAContext.h>

#include <vector>

#include "ops/pretended_device.h"

namespace torchops::cuda {
namespace {

std::vector<cudaDeviceProp> with_limits(const detail::DeviceLimits& limits) {
  std::vector<cudaDeviceProp> devices;
  for (c10::DeviceIndex i = 0; i < c10::cuda::device_count(); ++i) {
    cudaDeviceProp device = *at::cuda::getDeviceProperties(i);
    device.major = static_cast<int>(limits.major);
    device.minor = static_cast<int>(limits.minor);
    device.sharedMemPerBlockOptin = static_cast<size_t>(limits.shared_bytes_per_block);
    device.sharedMemPerMultiprocessor = static_cast<size_t>(limits.shared_bytes_per_multiprocessor);
    devices.push_back(device);
  }
  return devices;
}

}  // namespace

const cudaDeviceProp& device_properties() {
  const auto& limits = detail::pretended_device();
  if (!limits) return *at::cuda::getCurrentDeviceProperties();
  static const std::vector<cudaDeviceProp> devices = with_limits(*limits);
  return devices[static_cast<size_t>(c10::cuda::current_device())];
}

}  // namespace torchops::cuda
