#pragma once

// Shared by what kernels compute of each element between or after their products.

#include <cute/layout.hpp>

#include "cuda/base/activation.cuh"
#include "cuda/gemm/sm90/skeleton/cutlass.cuh"

namespace torchops::cuda::gemm {

/// How exactly activations are computed whose values are rounded to Element.
template <class Element>
constexpr Exactness kExactnessOf = std::is_same_v<Element, cutlass::bfloat16_t> ? Exactness::kCoarse : Exactness::kFast;

/// An operand of matrix instructions in registers, 64 rows and k columns: of 16 columns, a thread has pairs in two
/// rows, and the same 8 columns further.
template <int k>
using RegisterOperand =
    cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<k / 16>>>;

/// Writes the biases of a tile's columns to shared memory, scaled as the rule needs them, and 0 for columns that do not
/// exist; called by `threads` threads. The tile begins at column `first` of n.
template <class Rule, class Element, int columns>
CUTLASS_DEVICE void load_scaled_bias(const Element* const (&bias)[2], float (&to)[Rule::kProducts][columns], int first,
                                     int n, int threads) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Rule::kProducts; ++i) {
    for (int in_tile = threadIdx.x; in_tile < columns; in_tile += threads) {
      const int column = first + in_tile;
      const bool present = bias[i] != nullptr && column < n;
      to[i][in_tile] = present ? Rule::scale(i) * static_cast<float>(bias[i][column]) : 0.f;
    }
  }
}

}  // namespace torchops::cuda::gemm
