#pragma once

#include "cuda/gemm/sm90/pair.cuh"

namespace torchops::cuda::gemm {

/// Layer norm of 64 rows of up to kC features that a warpgroup has in registers, as the operand z of its matrix
/// instructions: a row is shared by the four threads of a quad. Features behind c are zeros, and stay zeros.
template <class Element, int kC, class Z>
CUTLASS_DEVICE void normalize_operand(Z& z, const NormVectors<kC>& norm, int c, float eps) {
  using namespace cute;
  using Pair = cutlass::Array<Element, 2>;
  const cutlass::NumericArrayConverter<float, Element, 2> widen;
  const cutlass::NumericArrayConverter<Element, float, 2> round;
  const int in_quad = static_cast<int>(threadIdx.x) % 4 * 2;
  const float by = 1.f / static_cast<float>(c);
  Tensor pairs = recast<Pair>(z);  // row by row of two, then 8 columns further
  const auto of_quad = [](float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
  };
  float mean[2] = {}, rstd[2] = {};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(pairs); ++i) {  // columns behind c are zeros
    const auto values = widen(pairs(i));
    mean[i % 2] += values[0] + values[1];
  }
  CUTLASS_PRAGMA_UNROLL
  for (int row = 0; row < 2; ++row) mean[row] = of_quad(mean[row]) * by;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    if (i / 2 * 8 >= c) continue;
    const auto values = widen(pairs(i));
    const float first = values[0] - mean[i % 2], second = values[1] - mean[i % 2];
    rstd[i % 2] = fmaf(first, first, fmaf(second, second, rstd[i % 2]));
  }
  CUTLASS_PRAGMA_UNROLL
  for (int row = 0; row < 2; ++row) rstd[row] = rsqrtf(fmaf(of_quad(rstd[row]), by, eps));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    const int column = i / 2 * 8 + in_quad;
    const float2 weight = *reinterpret_cast<const float2*>(&norm.weight[column]);
    const float2 bias = *reinterpret_cast<const float2*>(&norm.bias[column]);
    auto values = widen(pairs(i));
    values[0] = fmaf((values[0] - mean[i % 2]) * rstd[i % 2], weight.x, bias.x);
    values[1] = fmaf((values[1] - mean[i % 2]) * rstd[i % 2], weight.y, bias.y);
    pairs(i) = round(values);
  }
}

}  // namespace torchops::cuda::gemm
