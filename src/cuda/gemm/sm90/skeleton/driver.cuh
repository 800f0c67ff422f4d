#pragma once

// Caches the driver's functions for CUTLASS, which has the runtime look them up again in every call. Each translation
// unit includes it before all headers that make descriptors for TMA (unit.cu.in does): their inline functions, which
// the library has once, would else call the one or the other.

#include <cudaTypedefs.h>

#include <cutlass/cuda_host_adapter.hpp>

#include "cuda/gemm/driver.h"

namespace torchops::cuda::gemm {

template <class... Args>
CUresult call_cuTensorMapEncodeTiled(Args... args) {
  static DriverFunction<PFN_cuTensorMapEncodeTiled_v12000> known("cuTensorMapEncodeTiled", 12000);
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  if (known.get(encode) != cudaSuccess || encode == nullptr) return CUDA_ERROR_UNKNOWN;
  return encode(args...);
}
using cutlass::call_cuTensorMapEncodeIm2col;

}  // namespace torchops::cuda::gemm

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(func) ::torchops::cuda::gemm::call_##func
