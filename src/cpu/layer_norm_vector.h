#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

// The vectorised loops of layer norms. layer_norm_vector.cpp is compiled once for each instruction set that
// ATen has kernels for; only pointers are passed, so that no code that others may link is compiled with its
// instructions.
namespace torchops::cpu {

/// Rows with unit column stride. y may be x. mean and rstd have the dtype of the computation: float32, or float64 for a
/// float64 x. So do weight and bias, which may be null, unless `narrow_affine`: then they have that of x.
struct LayerNormRows {
  const void* x;
  void* y;
  const void *weight, *bias;
  bool narrow_affine;
  void *mean, *rstd;
  int64_t columns, x_stride, y_stride, mean_stride, rstd_stride;
  double eps;
};

/// For rows [begin, end).
using LayerNormRoutine = void (*)(const LayerNormRows& rows, int64_t begin, int64_t end);

/// Contiguous rows of x and the cotangent. dx may be null. weight, which may be null, and mean and rstd have the dtype
/// of the computation, as have dweight and dbias, to which the rows are added; both may be null.
struct LayerNormGradientRows {
  const void *grad, *x;
  void* dx;
  const void *weight, *mean, *rstd;
  void *dweight, *dbias;
  int64_t columns;
};

/// For rows [begin, end).
using LayerNormGradientRoutine = void (*)(const LayerNormGradientRows& rows, int64_t begin, int64_t end);

// The routines for x of this dtype; that of gradients is for 16 bits.
namespace DEFAULT {
LayerNormRoutine find_layer_norm_routine(c10::ScalarType dtype);
LayerNormGradientRoutine find_layer_norm_gradient_routine(c10::ScalarType dtype);
}  // namespace DEFAULT
namespace AVX2 {
LayerNormRoutine find_layer_norm_routine(c10::ScalarType dtype);
LayerNormGradientRoutine find_layer_norm_gradient_routine(c10::ScalarType dtype);
}  // namespace AVX2
namespace AVX512 {
LayerNormRoutine find_layer_norm_routine(c10::ScalarType dtype);
LayerNormGradientRoutine find_layer_norm_gradient_routine(c10::ScalarType dtype);
}  // namespace AVX512

}  // namespace torchops::cpu
