#pragma once

// Where CUTLASS gets the driver's functions: it has the runtime look for them again in every call, which takes several
// times as long as the call. Comes before all headers that make descriptors for TMA.

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cutlass/cuda_host_adapter.hpp>

namespace torchops::cuda::gemm {

template <class... Args>
CUresult call_cuTensorMapEncodeTiled(Args... args) {
  using Function = PFN_cuTensorMapEncodeTiled_v12000;
  static std::atomic<Function> known{nullptr};
  Function function = known.load(std::memory_order_acquire);
  if (function == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      return CUDA_ERROR_UNKNOWN;
    }
    function = reinterpret_cast<Function>(found);
    known.store(function, std::memory_order_release);
  }
  return function(args...);
}
using cutlass::call_cuTensorMapEncodeIm2col;

}  // namespace torchops::cuda::gemm

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(func) ::torchops::cuda::gemm::call_##func
