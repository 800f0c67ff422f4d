#pragma once

#include "cuda/base/quads.cuh"
#include "cuda/gemm/sm90/triangle/steps.cuh"

// Layer norms of 64 rows of up to 128 features that a warpgroup has in registers, as an operand or as accumulators of
// its matrix instructions, which have the same layout: a row is shared by the four threads of a quad, and each of them
// has pairs of columns, alternately in one row and in another, then 8 columns further on.
namespace torchops::cuda::gemm {

/// Mean and rstd of both rows. Features from c on are zeros.
template <class Element, class Pairs>
CUTLASS_DEVICE void quad_moments(const Pairs& pairs, int c, float eps, float (&mean)[2], float (&rstd)[2]) {
  const cutlass::NumericArrayConverter<float, Element, 2> widen;
  const float by = 1.f / static_cast<float>(c);
  mean[0] = mean[1] = rstd[0] = rstd[1] = 0.f;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    const auto values = widen(pairs(i));
    mean[i % 2] += values[0] + values[1];
  }
  CUTLASS_PRAGMA_UNROLL
  for (int row = 0; row < 2; ++row) mean[row] = sum_of_quad(mean[row]) * by;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    if (i / 2 * 8 >= c) continue;
    const auto values = widen(pairs(i));
    const float first = values[0] - mean[i % 2], second = values[1] - mean[i % 2];
    rstd[i % 2] = fmaf(first, first, fmaf(second, second, rstd[i % 2]));
  }
  CUTLASS_PRAGMA_UNROLL
  for (int row = 0; row < 2; ++row) rstd[row] = rsqrtf(fmaf(sum_of_quad(rstd[row]), by, eps));
}

/// The layer norm in place. Features from c on stay zeros.
template <class Element, int kC, class Z>
CUTLASS_DEVICE void normalize_operand(Z& z, const NormVectors<kC>& norm, int c, float eps) {
  using namespace cute;
  const cutlass::NumericArrayConverter<float, Element, 2> widen;
  const cutlass::NumericArrayConverter<Element, float, 2> round;
  const int in_quad = static_cast<int>(threadIdx.x) % 4 * 2;
  Tensor pairs = recast<cutlass::Array<Element, 2>>(z);
  float mean[2], rstd[2];
  quad_moments<Element>(pairs, c, eps, mean, rstd);
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

/// The same without weight and bias; returns rstd of both rows.
template <class Element, class Rows>
CUTLASS_DEVICE void normalize_rows(Rows& rows, int c, float eps, float (&rstd)[2]) {
  using namespace cute;
  const cutlass::NumericArrayConverter<float, Element, 2> widen;
  const cutlass::NumericArrayConverter<Element, float, 2> round;
  Tensor pairs = recast<cutlass::Array<Element, 2>>(rows);
  float mean[2];
  quad_moments<Element>(pairs, c, eps, mean, rstd);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    if (i / 2 * 8 >= c) continue;
    auto values = widen(pairs(i));
    values[0] = (values[0] - mean[i % 2]) * rstd[i % 2];
    values[1] = (values[1] - mean[i % 2]) * rstd[i % 2];
    pairs(i) = round(values);
  }
}

/// The gradient of rows, given that of the normalised rows, xhat: rstd (g - mean(g) - xhat mean(g xhat)).
template <class Element, class Sums, class Rows>
CUTLASS_DEVICE void through_norm(Sums& g, Rows& xhat, int c, const float (&rstd)[2]) {
  using namespace cute;
  const cutlass::NumericArrayConverter<float, Element, 2> widen;
  Tensor pairs = recast<cutlass::Array<Element, 2>>(xhat);
  const float by = 1.f / static_cast<float>(c);
  float sum[2] = {}, slope[2] = {};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    const auto values = widen(pairs(i));
    sum[i % 2] += g(2 * i) + g(2 * i + 1);
    slope[i % 2] = fmaf(g(2 * i), values[0], fmaf(g(2 * i + 1), values[1], slope[i % 2]));
  }
  CUTLASS_PRAGMA_UNROLL
  for (int row = 0; row < 2; ++row) {
    sum[row] = -rstd[row] * by * sum_of_quad(sum[row]);
    slope[row] = -rstd[row] * by * sum_of_quad(slope[row]);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    const auto values = widen(pairs(i));
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 2; ++v) {
      g(2 * i + v) = fmaf(rstd[i % 2], g(2 * i + v), fmaf(slope[i % 2], values[v], sum[i % 2]));
    }
  }
}

}  // namespace torchops::cuda::gemm
