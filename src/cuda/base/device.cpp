#include "cuda/base/device.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

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

// The part of the peak, from clock and width of the bus, that an H200 reaches in a copy of large tensors. A driver may
// report neither: then the predictions are those of an H200.
constexpr double kOfPeak = 0.81;

double read_bytes_per_us(int device) {
  int kilohertz = 0, bits = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device));
  const double peak = 2e-3 * kilohertz * bits / 8;  // two transfers in a period
  return peak > 0 ? kOfPeak * peak : 4e6;
}

}  // namespace

double bytes_per_us() {
  static const std::vector<double> of_devices = [] {
    std::vector<double> values;
    for (int i = 0; i < c10::cuda::device_count(); ++i) values.push_back(read_bytes_per_us(i));
    return values;
  }();
  return of_devices[static_cast<size_t>(c10::cuda::current_device())];
}

const cudaDeviceProp& device_properties() {
  const auto& limits = detail::pretended_device();
  if (!limits) return *at::cuda::getCurrentDeviceProperties();
  static const std::vector<cudaDeviceProp> devices = with_limits(*limits);
  return devices[static_cast<size_t>(c10::cuda::current_device())];
}

}  // namespace torchops::cuda
