#pragma once

// The input step of a triangle update with more than 128 features or channels: the gated linear units of wide.cuh on
// unchanged rows of x. Their epilogue applies the layer norm and writes channels of positions.

#include "cuda/gemm/pair_padding.cuh"
#include "cuda/gemm/sm90/pair_wide.cuh"

namespace torchops::cuda::gemm {

template <class Gate, class Tile_>
struct ChannelsEpilogue {
  using Tile = Tile_;
  using Element = typename Tile::Element;
  static constexpr int kRows = Tile::kRows, kN = Tile::kN, kBlocks = kRows / kPairRows;
  static_assert(Tile::kProducts == 2 && 2 * kN == 128, "a thread reads the terms of one column of one product");

  struct Shared {
    cute::array_aligned<Element, kN * kPairRows, 1024> results[kBlocks];
    alignas(16) ColumnTerms terms[2][kN];
  };
  struct Parameters {
    PlaneMap<cute::SM90_TMA_STORE, Element, kN, kPairRows> channels[2];
    const ColumnTerms* terms[2];  // of all values, and of all gates
    const ScaleAndShift* moments;
    const Element* mask;
    int64_t mask_row_stride, mask_stride;
    float scale[2];
    int n, in_row, parts;  // tiles of rows in a row of positions, tiles of columns in a side
  };

  CUTLASS_DEVICE static void init(Shared&) {}
  CUTLASS_DEVICE ChannelsEpilogue(const Parameters& p, Shared& shared, int, int thread)
      : p_(p), shared_(shared), thread_(thread) {}

  CUTLASS_DEVICE void begin(int row, int column) {
    plane_ = row / p_.in_row;
    place_ = row % p_.in_row;
    side_ = column / p_.parts;
    part_ = column % p_.parts;
    terms_ = p_.terms[thread_ / kN][column * kN + thread_ % kN];
    const float half = 0.5f * p_.scale[side_];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int position = place_ * kRows + i / 2 * kPairRows + thread_ / 32 * 16 + thread_ % 32 / 4 + i % 2 * 8;
      // Past the last position of a row there are zeros, which add nothing to the products that follow.
      moments_[i] = {0.f, 0.f};
      halves_[i] = 0.f;
      if (position >= p_.n) continue;
      moments_[i] = p_.moments[int64_t{plane_} * p_.n + position];
      halves_[i] = half;
      if (p_.mask != nullptr) {
        halves_[i] *= static_cast<float>(p_.mask[plane_ * p_.mask_row_stride + position * p_.mask_stride]);
      }
    }
  }

  CUTLASS_DEVICE void share() {
    shared_.terms[thread_ / kN][thread_ % kN] = terms_;
    end();  // the stores of the previous results
  }

  template <class Sums, class Sync>
  CUTLASS_DEVICE void finish(const Sums& sums, const Sync& sync) {
    using namespace cute;
    using Block = Shape<Int<kPairRows>, Int<kN>>;
    const typename Tile::Result result_of;
    const auto write = make_tiled_copy_C(Copy_Atom<SM90_U16x8_STSM_T, Element>{}, result_of);
    const auto write_slice = write.get_slice(thread_);
    const Tensor places = result_of.get_slice(thread_).partition_C(make_identity_tensor(Block{}));
    const cutlass::NumericArrayConverter<Element, float, 2> converted;
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      Tensor result = make_tensor_like<Element>(partition_fragment_C(result_of, Block{}));
      Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kN / 8; ++block) {  // a thread has pairs of neighbouring columns, in two rows of 16
        const int column = get<1>(places(make_coord(make_coord(0, 0, block), 0, 0)));
        const float4 values = *reinterpret_cast<const float4*>(&shared_.terms[0][column]);
        const float4 gates = *reinterpret_cast<const float4*>(&shared_.terms[1][column]);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const ScaleAndShift by = moments_[2 * m + r];
          const float half = halves_[2 * m + r], gate_scale = Gate::kTanhScale * by.scale;
          cutlass::Array<float, 2> both;
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 2; ++v) {
            const float z = sums(make_coord(make_coord(v, r, block), m, 0));
            const float t = sums(make_coord(make_coord(v, r, block + kN / 8), m, 0));
            const float value =
                fmaf(by.scale, z, fmaf(by.shift, v == 0 ? values.x : values.z, v == 0 ? values.y : values.w));
            const float gate =
                fmaf(gate_scale, t, fmaf(by.shift, v == 0 ? gates.x : gates.z, v == 0 ? gates.y : gates.w));
            // What a nearly closed gate lets through is lost in the sum that follows.
            both[v] = Gate::from_tanh(half * value, tanh_approximate(gate));
          }
          pairs(make_coord(make_coord(0, r, block), 0, 0)) = converted(both);
        }
      }
      copy(write, write_slice.retile_S(result),
           write_slice.partition_D(as_position_independent_swizzle_tensor(
               make_tensor(make_smem_ptr(shared_.results[m].data()), SwizzledTransposed<Element, kN, kPairRows>{}))));
    }
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread_ != 0) return;
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      p_.channels[side_].store(shared_.results[m].data(), part_, place_ * kBlocks + m, plane_);
    }
  }

  CUTLASS_DEVICE void end() {
    if (thread_ == 0) cute::tma_store_wait<0>();
  }

 private:
  const Parameters& p_;
  Shared& shared_;
  ColumnTerms terms_;
  ScaleAndShift moments_[2 * kBlocks];
  float halves_[2 * kBlocks];  // half of the mask and the scale
  int thread_, plane_ = 0, place_ = 0, side_ = 0, part_ = 0;
};

/// The same as PairIn, for any c and d. Also writes the moments of x.
template <class Gate>
struct WidePairIn {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Epilogue = ChannelsEpilogue<Gate, WideTile<T, tiling, 2>>;
    using Kernel = WideKernel<Epilogue, PositionMap>;
    using Launch = WideLaunch<Kernel>;
    static_assert(Kernel::kPingPong, "a warpgroup has all rows of a tile");

    static int padded_channels(const PairProblem& p) { return Launch::divided(p.d, Kernel::kN) * Kernel::kN; }

    // The weights of values, then of gates, both sides each; and their terms.
    struct Folded {
      T* weights;
      ColumnTerms* terms;
      Folded(Workspace& workspace, const PairProblem& p)
          : weights(workspace.take<T>(int64_t{4} * padded_channels(p) * p.c)),
            terms(workspace.take<ColumnTerms>(4 * padded_channels(p))) {}
    };

    static Status prepare(const PairProblem& p, int64_t& workspace_bytes) {
      Workspace workspace(nullptr);
      const Folded folded(workspace, p);
      workspace_bytes = workspace.bytes();
      return p.moments == nullptr ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const PairProblem& p, cudaStream_t stream) {
      Workspace workspace(p.workspace);
      const Folded folded(workspace, p);
      const int64_t channels = padded_channels(p);
      FoldedWeights<T, 4> all{};
      for (int i = 0; i < 4; ++i) {
        const Layer& layer = i < 2 ? p.value[i] : p.gate[i - 2];
        all.of[i] = {static_cast<const T*>(layer.weight.data),
                     static_cast<const T*>(layer.bias),
                     static_cast<const T*>(p.norm_x.weight),
                     static_cast<const T*>(p.norm_x.bias),
                     layer.weight.row_stride,
                     p.d,
                     static_cast<int>(channels),
                     p.c,
                     i < 2 ? 1.f : Gate::kTanhScale,
                     folded.weights + i * channels * p.c,
                     folded.terms + i * channels};
      }
      const int padded = padded_positions<T>(p.n);
      const Operand gates{folded.weights + 2 * channels * p.c, p.c, 0}, values{folded.weights, p.c, 0};
      bool encoded = are_encodable<T>(p.x, values, gates, Operand{p.channels[0], p.row_stride, p.channel_stride},
                                      Operand{p.channels[1], p.row_stride, p.channel_stride});
      typename Launch::Parameters parameters{};
      auto& epilogue = parameters.epilogue;
      epilogue.in_row = Launch::divided(p.n, Kernel::kM);
      epilogue.parts = Launch::divided(p.d, Kernel::kN);
      parameters.a = decltype(parameters.a)::of(p, epilogue.in_row * (Kernel::kM / Kernel::kRowsOfA));
      for (int i = 0; i < 2; ++i) {
        const Operand& weight = i == 0 ? values : gates;
        parameters.w[i] = std::remove_reference_t<decltype(parameters.w[0])>::of(weight.data, weight.row_stride,
                                                                                 static_cast<int>(2 * channels), p.c);
        epilogue.channels[i] = std::remove_reference_t<decltype(epilogue.channels[0])>::of(
            p.channels[i], p.channel_stride, p.row_stride, p.d, padded, p.n);
        epilogue.terms[i] = folded.terms + 2 * i * channels;
        epilogue.scale[i] = p.scale[i];
        encoded = encoded && are_encoded(parameters.w[i].map, epilogue.channels[i].map);
      }
      if (!encoded) return Status::of(cudaErrorInvalidValue);
      epilogue.moments = static_cast<const ScaleAndShift*>(p.moments);
      epilogue.mask = static_cast<const T*>(p.mask);
      epilogue.mask_row_stride = p.mask_row_stride;
      epilogue.mask_stride = p.mask_stride;
      epilogue.n = p.n;
      parameters.n = static_cast<int>(2 * channels);
      parameters.steps = Launch::divided(p.c, Kernel::kK);
      parameters.rows = p.n * epilogue.in_row;
      parameters.columns = Launch::divided(2 * epilogue.parts, Kernel::kCluster);
      launch_row_moments<T>(p, static_cast<ScaleAndShift*>(p.moments), stream);
      launch_fold_weights(all, stream);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
      return Status::of(Launch::run(parameters, stream));
    }
  };
};

}  // namespace torchops::cuda::gemm
