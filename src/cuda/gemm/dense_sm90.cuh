#pragma once

#include "cuda/gemm/element.cuh"
#include "cuda/gemm/kernel_sm90.cuh"
#include "cuda/math.cuh"

namespace torchops::cuda::gemm {

// t = -(sum + bias) * log2(e), what the logistic functions of math.cuh take. Scaled here, for all rows at once, the
// bias costs a quarter of an instruction for each output, and the sum no addition: 8.8 instructions instead of 9.5.
template <class Fragment>
struct LogisticArgument;
template <int count>
struct LogisticArgument<cutlass::Array<float, count>> {
  using Values = cutlass::Array<float, count>;
  CUTLASS_DEVICE Values operator()(Values bias, Values sum) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < count; ++i) sum[i] = fmaf(-kLog2E, sum[i], -kLog2E * bias[i]);
    return sum;
  }
};

// The logistic function of t that is exact enough for a result of type Element.
template <class Element>
struct Logistic {
  template <class Fragment>
  struct Of;
  template <int count>
  struct Of<cutlass::Array<float, count>> {
    CUTLASS_DEVICE cutlass::Array<float, count> operator()(cutlass::Array<float, count> t) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < count; ++i) {
        t[i] = std::is_same_v<Element, cutlass::bfloat16_t> ? coarse_logistic(t[i]) : fast_logistic(t[i]);
      }
      return t;
    }
  };
};

template <DenseTiling tiling>
struct DenseTilingOf;
template <>
struct DenseTilingOf<DenseTiling::k128x256> {
  using Type = Tiling<128, 256, 2, 1, false, 64>;
};
template <>
struct DenseTilingOf<DenseTiling::k128x128> {
  using Type = Tiling<128, 128, 2, 1, true, 64>;
};
template <>
struct DenseTilingOf<DenseTiling::k64x128> {
  // More stages than 5 let the loads run so far ahead of the stores that memory serves both worse: (1048576, 128, 128)
  // in bfloat16 takes 198 us with 5 and 202 with the 8 that fit (H100).
  using Type = Tiling<64, 128, 2, 1, true, 64, 0, 5>;
};
template <>
struct DenseTilingOf<DenseTiling::k128x64> {
  using Type = Tiling<128, 64, 2, 1, true, 64>;
};
template <>
struct DenseTilingOf<DenseTiling::k128x128SharedX> {
  using Type = Tiling<128, 128, 1, 2, true, 64>;
};
template <>
struct DenseTilingOf<DenseTiling::k128x128ResidentW> {
  using Type = Tiling<128, 128, 1, 2, true, 128, 256>;
};

template <DenseType type, DenseTiling tiling>
cudaError_t run_dense(const DenseProblem& p, cudaStream_t stream) {
  using Element = typename DenseElement<type>::Type;
  using Tiling = typename DenseTilingOf<tiling>::Type;
  namespace fusion = cutlass::epilogue::fusion;
  constexpr auto round = cutlass::FloatRoundStyle::round_to_nearest;
  constexpr int tile_k = 128 / sizeof(Element);
  using Tile = cute::Shape<cute::Int<Tiling::kTileM>, cute::Int<Tiling::kTileN>, cute::Int<tile_k>>;
  using Bias = fusion::Sm90RowBroadcast<0, Tile, Element, float>;
  using Argument =
      fusion::Sm90EVT<fusion::Sm90Compute<LogisticArgument, float, float, round>, Bias, fusion::Sm90AccFetch>;
  using Fusion = fusion::Sm90EVT<fusion::Sm90Compute<Logistic<Element>::template Of, Element, float, round>, Argument>;
  using Kernel = typename Sm90Gemm<Element, Tiling, /*b_k_major=*/true, Fusion>::Kernel;

  const int clusters = grid_clusters<Kernel, Tiling>(p.n);
  if (clusters == 0 || (Tiling::kResidentK > 0 && p.k > Tiling::kResidentK)) return cudaErrorNotSupported;
  typename Kernel::Arguments arguments{};
  arguments.problem_shape = {p.m, p.n, p.k, 1};
  arguments.mainloop.ptr_A = static_cast<const Element*>(p.x);
  arguments.mainloop.dA = {p.x_stride, cute::_1{}, 0};
  arguments.mainloop.ptr_B = static_cast<const Element*>(p.w);
  arguments.mainloop.dB = {p.w_stride, cute::_1{}, 0};
  arguments.epilogue.ptr_D = static_cast<Element*>(p.y);
  arguments.epilogue.dD = {p.n, cute::_1{}, 0};
  arguments.epilogue.thread = {{{static_cast<const Element*>(p.bias)}, {}, {}}, {}};
  arguments.hw_info.sm_count = clusters * Tiling::kClusterM * Tiling::kClusterN;
  arguments.hw_info.max_active_clusters = clusters;
  if constexpr (Tiling::kResidentK > 0) {
    arguments.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongN;
  }
  return launch<Kernel>(arguments, /*cooperative=*/false, stream);
}

}  // namespace torchops::cuda::gemm
