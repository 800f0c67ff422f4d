#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

// No torch headers.
namespace torchops::cuda {

/// Caches a number >= 0 for each device. Failures are not cached: the caller gets the error, and the next call queries
/// again. Thread-safe; two threads may query at the same time.
class PerDevice {
 public:
  /// Gets the number of the current device; query(int& answer) returns cudaSuccess if it has set one.
  template <class Query>
  cudaError_t get(int& answer, const Query& query) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const bool kept = device < kMostDevices;
    if (kept) {
      answer = known_[device].load(std::memory_order_acquire) - 1;
      if (answer >= 0) return cudaSuccess;
    }
    const cudaError_t error = query(answer);
    if (error == cudaSuccess && kept) known_[device].store(answer + 1, std::memory_order_release);
    return error;
  }

 private:
  static constexpr int kMostDevices = 64;
  std::array<std::atomic<int>, kMostDevices> known_{};  // the number plus 1; 0: none yet
};

/// Sets the maximum dynamic shared memory of `kernel` on the current device to `shared_bytes`, and returns how many
/// multiprocessors the device has; each kernel has its own cache.
template <class Kernel>
cudaError_t granted_multiprocessors(PerDevice& cache, Kernel* kernel, size_t shared_bytes, int& count) {
  return cache.get(count, [&](int& answer) {
    int device = 0;
    cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    return error != cudaSuccess ? error : cudaDeviceGetAttribute(&answer, cudaDevAttrMultiProcessorCount, device);
  });
}

}  // namespace torchops::cuda
