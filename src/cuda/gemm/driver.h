#pragma once

// No torch headers.
#include <cuda_runtime_api.h>

#include <atomic>

namespace torchops::cuda::gemm {

/// A function of the driver. The runtime looks it up, which takes several times as long as calling it, so the result is
/// cached; failures are not. Thread-safe.
template <class Function>
class DriverFunction {
 public:
  /// `version` is the CUDA version that gave the function this type, as in the name of the type.
  constexpr DriverFunction(const char* name, unsigned version) : name_(name), version_(version) {}

  /// Null if the driver has no such function.
  cudaError_t get(Function& function) {
    function = known_.load(std::memory_order_acquire);
    if (function != nullptr) return cudaSuccess;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (const cudaError_t error = cudaGetDriverEntryPointByVersion(name_, &found, version_, cudaEnableDefault, &result);
        error != cudaSuccess) {
      return error;
    }
    if (result == cudaDriverEntryPointSuccess) {
      function = reinterpret_cast<Function>(found);
      known_.store(function, std::memory_order_release);
    }
    return cudaSuccess;
  }

 private:
  const char* name_;
  unsigned version_;
  std::atomic<Function> known_{nullptr};
};

}  // namespace torchops::cuda::gemm
