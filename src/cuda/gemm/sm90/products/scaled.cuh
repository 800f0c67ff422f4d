#pragma once

// Products of eight-bit operands, with the scales applied in the epilogue.

#include <algorithm>

#include "cuda/gemm/sm90/products/epilogue.cuh"
#include "cuda/gemm/sm90/products/kernel.cuh"

namespace torchops::cuda::gemm {

/// The tensor cores of compute capability 9.0 accumulate eight-bit products with about 14 bits. After this many
/// instructions (32 products per output each), a sum is added to one in float32. A multiple of 4.
constexpr int kProductsToPromotion = 16;

/// t = F::kScale * (scale_a * scale_b * sum + bias), as Argument in products/epilogue.cuh.
template <class F>
struct ScaledArgument {
  template <class Fragment>
  struct Of;
  template <int count>
  struct Of<cutlass::Array<float, count>> {
    using Values = cutlass::Array<float, count>;
    CUTLASS_DEVICE Values operator()(Values bias, Values scale_a, Values scale_b, Values sum) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < count; ++i) {
        sum[i] = fmaf(F::kScale * scale_b[i], scale_a[i] * sum[i], F::kScale * bias[i]);
      }
      return sum;
    }
  };
};

/// One float32 per row, or one for all.
template <class Tile>
using RowScale = fusion::Sm90ColBroadcast<0, Tile, float, float, cute::Stride<bool, cute::_0, cute::_0>>;

/// One float32 per column, or one for all.
template <class Tile>
using ColumnScale = fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, bool, cute::_0>>;

/// The sum of two biases in float32: ptr_row, a float32 bias, and `rounded`. Each may be null.
template <class Tile, class Rounded>
struct BiasOfEither : Bias<Tile, float> {
  using Base = Bias<Tile, float>;
  using typename Base::SharedStorage;

  struct Arguments : Base::Arguments {
    const Rounded* rounded = nullptr;
  };
  using Params = Arguments;

  template <class Problem>
  static constexpr Params to_underlying_arguments(const Problem&, const Arguments& arguments, void*) {
    return arguments;
  }

  CUTLASS_HOST_DEVICE BiasOfEither() {}
  CUTLASS_HOST_DEVICE BiasOfEither(const Params& params, const SharedStorage& shared)
      : Base(params, shared), rounded(params.rounded) {
    if (rounded != nullptr) this->is_zero_ = false;
  }

  template <class Callbacks>
  struct Loads : Callbacks {
    const Rounded* rounded;  // for the tile's columns

    CUTLASS_DEVICE Loads(const Callbacks& callbacks, const Rounded* rounded) : Callbacks(callbacks), rounded(rounded) {}

    // Adds to what the same thread has written to shared memory.
    CUTLASS_DEVICE void begin() {
      using namespace cute;
      Callbacks::begin();
      if (rounded == nullptr) return;
      Tensor sums = filter_zeros(this->tGS_sRow);
      const Tensor places = filter_zeros(this->tGS_cRow, this->tGS_gRow.stride());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(sums); ++i) {
        const int column = get<1>(places(i));
        if (column < size<1>(Tile{}) && elem_less(places(i), this->residue_cRow)) {
          sums(i) += static_cast<float>(rounded[column]);
        }
      }
    }
  };

  template <bool reference_source, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Args...>& args) {
    const auto callbacks = Base::template get_consumer_store_callbacks<reference_source>(args);
    const int column = cute::get<1>(args.tile_coord_mnkl) * cute::size<1>(Tile{});
    return Loads<std::remove_const_t<decltype(callbacks)>>(callbacks, rounded == nullptr ? nullptr : rounded + column);
  }

  const Rounded* rounded = nullptr;
};

/// d = F((a @ b.T) * scale_a * scale_b + bias + bias2) for eight-bit a and b; d and bias2 are of type Out, bias is
/// float32. With `gated`, d is this times c, which is also of type Out, and may be d.
template <class F, class Out, bool gated = false>
struct ScaledLinear {
  template <Element element, Tiling tiling>
  struct With {
    static constexpr TilingSpec kTiling = kSpec<tiling>;
    using T = typename ElementOf<element>::Type;
    using Tile =
        cute::Shape<cute::Int<kTiling.tile_m>, cute::Int<kTiling.tile_n>, cute::Int<128 / static_cast<int>(sizeof(T))>>;
    using Argument = fusion::Sm90EVT<fusion::Sm90Compute<ScaledArgument<F>::template Of, float, float, kRound>,
                                     BiasOfEither<Tile, Out>, RowScale<Tile>, ColumnScale<Tile>, Sum>;
    template <class Result>
    using Applied = fusion::Sm90EVT<fusion::Sm90Compute<Value<F, Out>::template Of, Result, float, kRound>, Argument>;
    using Gated = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, Out, float, kRound>,
                                  fusion::Sm90SrcFetch<Out>, Applied<float>>;
    using Product = Gemm<T, tiling, /*b_k_major=*/true, std::conditional_t<gated, Gated, Applied<Out>>, Out,
                         std::conditional_t<gated, Out, void>>;

    static Status prepare(const Problem& p, int64_t&) {
      int clusters = 0;
      return Product::grid_clusters(p.n, clusters);
    }

    // The CTAs that run at once have adjacent tiles along the shorter side of d, so they read all of the operand on
    // that side for a few rows of the other. If that operand doesn't fit into the second-level cache, a block of tiles
    // that is four high reads less; if it fits, the order without blocks is faster. The limit lies between 16 MiB,
    // which fit, and 64 MiB, which don't. Tiles are rounded up to whole blocks, and those outside of d cost as much as
    // others.
    static int height_of_block(const Problem& p) {
      constexpr int height = 4;
      constexpr int64_t least_bytes = int64_t{32} << 20;
      const auto clusters = [](int extent, int step) { return int64_t{extent + step - 1} / step; };
      const auto in_blocks = [](int64_t clusters) { return (clusters + height - 1) / height * height; };
      const int64_t rows = clusters(p.m, kTiling.tile_m * kTiling.cluster_m);
      const int64_t columns = clusters(p.n, kTiling.tile_n * kTiling.cluster_n);
      const bool fits = in_blocks(rows) * in_blocks(columns) * 16 <= rows * columns * 17;
      return fits && int64_t{std::min(p.m, p.n)} * p.k >= least_bytes ? height : 1;
    }

    static Status run(const Problem& p, cudaStream_t stream) {
      int clusters = 0;
      if (!are_encodable<T>(p.a, p.b) || !are_encodable<Out>(gated ? p.c : p.d, p.d)) {
        return Status::of(cudaErrorInvalidValue);
      }
      if (const Status status = Product::grid_clusters(p.n, clusters); !status.done()) return status;
      auto arguments = Product::arguments(p, clusters);
      arguments.mainloop.mma_promotion_interval = kProductsToPromotion;
      arguments.scheduler.max_swizzle_size = height_of_block(p);
      const typename Argument::Arguments argument = {
          {{static_cast<const float*>(p.bias)}, static_cast<const Out*>(p.bias2)},
          {p.scale_a.data, 0.f, {p.scale_a.each, {}, {}}},
          {p.scale_b.data, 0.f, {{}, p.scale_b.each, {}}},
          {},
          {}};
      if constexpr (gated) {
        arguments.epilogue.thread = {{}, {argument, {}}, {}};
      } else {
        arguments.epilogue.thread = {argument, {}};
      }
      return Product::launch(arguments, /*cooperative=*/false, stream);
    }
  };
};

template <class F, class Out>
using ScaledGate = ScaledLinear<F, Out, true>;

}  // namespace torchops::cuda::gemm
