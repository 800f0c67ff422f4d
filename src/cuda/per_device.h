#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

// No torch headers.
namespace torchops::cuda {

/// What one question, asked of each device once, was answered: a number >= 0. A failure is not an answer: it goes to
/// the caller, and the question is asked again the next time. Safe to use from many threads; two may ask at the same
/// time.
class PerDevice {
 public:
  /// Answers for the current device; ask(int& answer) returns cudaSuccess if it gave one.
  template <class Ask>
  cudaError_t get(int& answer, const Ask& ask) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const bool kept = device < kMostDevices;
    if (kept) {
      answer = known_[device].load(std::memory_order_acquire) - 1;
      if (answer >= 0) return cudaSuccess;
    }
    const cudaError_t error = ask(answer);
    if (error == cudaSuccess && kept) known_[device].store(answer + 1, std::memory_order_release);
    return error;
  }

 private:
  static constexpr int kMostDevices = 64;
  std::array<std::atomic<int>, kMostDevices> known_{};  // 1 more than the answer; 0 is "not asked yet"
};

/// Lets `kernel` have so much dynamic shared memory on the current device, and tells how many multiprocessors that has;
/// the cache is the kernel's own.
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
