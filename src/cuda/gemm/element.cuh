#pragma once

#include <cutlass/numeric_types.h>

#include "cuda/gemm/dense.h"

namespace torchops::cuda::gemm {

template <DenseType type>
struct DenseElement;
template <>
struct DenseElement<DenseType::kFloat16> {
  using Type = cutlass::half_t;
};
template <>
struct DenseElement<DenseType::kBFloat16> {
  using Type = cutlass::bfloat16_t;
};
// From float, CUTLASS has TMA round to TF32 while loading.
template <>
struct DenseElement<DenseType::kTF32> {
  using Type = float;
};

}  // namespace torchops::cuda::gemm
