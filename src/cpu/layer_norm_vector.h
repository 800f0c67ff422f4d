#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

// The vectorised loop of layer_norm_kernel.cpp. layer_norm_vector.cpp is compiled once for each instruction set that
// ATen has kernels for; only pointers are passed, so that no code that others may link is compiled with its
// instructions.
namespace torchops::cpu {

/// Rows with unit column stride. y may be x. weight and bias, which may be null, and mean and rstd have the dtype of
/// the computation: float32, or float64 for a float64 x.
struct LayerNormRows {
  const void* x;
  void* y;
  const void *weight, *bias;
  void *mean, *rstd;
  int64_t columns, x_stride, y_stride, mean_stride, rstd_stride;
  double eps;
};

/// For rows [begin, end).
using LayerNormRoutine = void (*)(const LayerNormRows& rows, int64_t begin, int64_t end);

// The routine for x of this dtype.
namespace DEFAULT {
LayerNormRoutine find_layer_norm_routine(c10::ScalarType dtype);
}
namespace AVX2 {
LayerNormRoutine find_layer_norm_routine(c10::ScalarType dtype);
}
namespace AVX512 {
LayerNormRoutine find_layer_norm_routine(c10::ScalarType dtype);
}

}  // namespace torchops::cpu
