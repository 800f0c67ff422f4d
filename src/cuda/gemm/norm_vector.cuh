#pragma once

#include "cuda/gemm/problem.h"

// How kernels on elements of type T read the weight and bias of a layer norm, and write their gradients: both are T or
// float32. Which of these is known when they run, since it changes only a few loads.
namespace torchops::cuda::gemm {

template <class T>
struct NormValues : NormVector {
  /// The value of a feature; `otherwise` if there is no vector.
  __device__ float at(int64_t feature, float otherwise) const {
    if (data == nullptr) return otherwise;
    return is_float32 ? static_cast<const float*>(data)[feature]
                      : static_cast<float>(static_cast<const T*>(data)[feature]);
  }
};

/// The gradient of such a vector; null if it is not wanted.
template <class T>
struct NormSums {
  void* data = nullptr;
  bool is_float32 = false;

  __device__ void set(int64_t feature, float value) const {
    if (data == nullptr) return;
    if (is_float32) {
      static_cast<float*>(data)[feature] = value;
    } else {
      static_cast<T*>(data)[feature] = static_cast<T>(value);
    }
  }
};

}  // namespace torchops::cuda::gemm
