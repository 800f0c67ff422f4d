#pragma once

// Shared by the gradients that take the cotangent of a product from the output: dz = F::backward(grad, y).

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

#include "cuda/base/activation.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"

namespace torchops::cuda::gemm {

/// A tile of rows x columns in shared memory, for `threads` threads. F is an activation whose backward needs only its
/// output.
template <class F, class Element, int rows, int columns, int threads>
struct CotangentTile {
  static_assert(F::kFromOutput);
  /// A thread takes 16 bytes at a time. They are side by side in a row, so it has the same columns of all its rows, and
  /// the threads have kHeight rows at once.
  static constexpr int kVector = 16 / sizeof(Element), kHeight = threads * kVector / columns;
  static_assert(threads * kVector % columns == 0 && rows % kHeight == 0);
  using Pointwise =
      decltype(cute::make_tiled_copy(cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, Element>{},
                                     cute::Layout<cute::Shape<cute::Int<kHeight>, cute::Int<columns / kVector>>,
                                                  cute::Stride<cute::Int<columns / kVector>, cute::_1>>{},
                                     cute::Layout<cute::Shape<cute::_1, cute::Int<kVector>>>{}));

  /// Writes dz over grad, and adds it, before it is rounded, to the thread's `sums`.
  CUTLASS_DEVICE static void make(Element* grad, Element* y, float (&sums)[kVector], int thread) {
    using namespace cute;
    const auto in_rows = [](Element* data) {
      return as_position_independent_swizzle_tensor(
          make_tensor(make_smem_ptr(data), SwizzledRows<Element, rows, columns>{}));
    };
    const auto slice = Pointwise{}.get_slice(thread);
    Tensor to = slice.partition_D(in_rows(grad));
    const Tensor from = slice.partition_S(in_rows(y));
    Tensor g = make_fragment_like(to), s = make_fragment_like(to);
    copy(Pointwise{}, to, g);
    copy(Pointwise{}, from, s);
    const cutlass::NumericArrayConverter<float, Element, kVector> widen;
    const cutlass::NumericArrayConverter<Element, float, kVector> round;
    Tensor gs = recast<cutlass::Array<Element, kVector>>(g);
    const Tensor ys = recast<cutlass::Array<Element, kVector>>(s);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(gs); ++i) {
      auto dz = widen(gs(i));
      const auto outputs = widen(ys(i));
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kVector; ++v) {
        dz[v] = F::backward(dz[v], 0.f, outputs[v]);
        sums[v] += dz[v];
      }
      gs(i) = round(dz);
    }
    copy(Pointwise{}, g, to);
  }
};

}  // namespace torchops::cuda::gemm
