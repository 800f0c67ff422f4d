#pragma once

// The input step of a triangle update: layer norm, two gated linear units and the mask, from rows of features to
// channels of positions, in one pass over x.
//
// A CTA keeps all weights in shared memory, and tiles of 64 positions stream through it (see pair.cuh). A computing
// warpgroup reads its tile once and normalises it in registers, where it stays as the operand of all products: shared
// memory, which would otherwise deliver it to each product again, is as busy here as the matrix instructions. It
// multiplies the tile for a, then for b, and stores the results transposed; TMA writes them to the channels.

#include "cuda/gemm/pair_padding.cuh"
#include "cuda/gemm/sm90/operand_norm.cuh"
#include "cuda/gemm/sm90/pair.cuh"

namespace torchops::cuda::gemm {

template <class Element_, class Gate, NarrowTiling tiling>
struct PairInKernel {
  using Element = Element_;
  static constexpr int kRows = kPairRows, kColumns = kPairColumns, kN = kSpec<tiling>.tile_n, kK = kSpec<tiling>.most_k;
  static constexpr int kParts = kN / kColumns, kProducts = 2, kWeights = 2 * kParts * kProducts;
  static constexpr int kSize = static_cast<int>(sizeof(Element)), kRegisters = 160;
  static constexpr int kStageBytes = kRows * kK * kSize, kWeightBytes = kColumns * kK * kSize;
  static constexpr int kRoom =
      227 * 1024 - 512 - kWeights * (kWeightBytes + 4 * kColumns) - kPairComputing * kColumns * kRows * kSize - 8 * kK;
  static constexpr int kStages = std::min(kSpec<tiling>.stages, kRoom / kStageBytes);
  // The scale of the gate's product; the biases of its columns have it too.
  static constexpr float kGateScale = Gate::kTanhScale;
  static_assert(kSpec<tiling>.rows == kRows && kStages > kPairComputing);
  using PipelineState = cutlass::PipelineState<kStages>;

  struct Shared {
    cute::array_aligned<Element, kColumns * kK, 1024> w[2][kParts][kProducts];
    cute::array_aligned<Element, kColumns * kRows, 1024> results[kPairComputing];
    cute::array_aligned<Element, kRows * kK, 1024> stages[kStages];
    alignas(16) float bias[2][kParts][kProducts][kColumns];  // including that of the norm
    NormVectors<kK> norm;
    PairBarriers<kStages> barriers;
  };
  static_assert(sizeof(Shared) <= 227 * 1024);

  using Weights = TileMap<cute::SM90_TMA_LOAD, Element, kColumns, kK>;
  using Channels = PlaneMap<cute::SM90_TMA_STORE, Element, kColumns, kRows>;
  struct Side {
    Weights w[kProducts];
    Channels channels;
    const Element* bias[kProducts];
    float scale;
  };
  struct Parameters {
    PlaneMap<cute::SM90_TMA_LOAD, Element, kRows, kK> x;
    Side sides[2];
    const Element *mask, *norm[2];
    int64_t mask_row_stride, mask_stride;
    float eps;
    int c, d;
    PairTiles tiles;
  };

  using Product = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kK>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  /// The rows of a tile as an operand: of 16 features, a thread has pairs in two rows, and the same 8 features further.
  using Operand = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kK / 16>>>;

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    auto& barriers = shared.barriers;
    barriers.w_loaded.arrive_and_expect_tx(kWeights * kWeightBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int side = 0; side < 2; ++side) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kProducts; ++i) {
          p.sides[side].w[i].load(shared.w[side][part][i].data(), part, 0, barriers.w_loaded);
        }
      }
    }
    PipelineState at;
    for (int64_t tile = blockIdx.x; tile < p.tiles.count(); tile += gridDim.x, ++at) {
      auto& loaded = barriers.loaded[at.index()];
      barriers.free[at.index()].wait(at.phase() ^ 1);  // doesn't block in the first round
      loaded.arrive_and_expect_tx(kStageBytes);
      p.x.load(shared.stages[at.index()].data(), p.tiles.place_in_row(tile), 0, p.tiles.row(tile), loaded);
    }
  }

  // Called by the computing warpgroups while the first tiles are being loaded.
  CUTLASS_DEVICE static void fold_norms(const Parameters& p, Shared& shared) {
    constexpr int threads = 128 * kPairComputing;
    shared.norm.load(p.norm[0], p.norm[1], p.c, threads);
    sync_computing();
    shared.barriers.w_loaded.wait(0);
    for (int i = static_cast<int>(threadIdx.x); i < kWeights * kColumns; i += threads) {
      const int side = i / (kWeights * kColumns / 2), part = i / (kProducts * kColumns) % kParts;
      const int product = i / kColumns % kProducts, row = i % kColumns, channel = part * kColumns + row;
      const Element* const bias = p.sides[side].bias[product];
      shared.bias[side][part][product][row] =
          fold_norm<kColumns>(shared.w[side][part][product].data(), row, shared.norm,
                              bias == nullptr || channel >= p.d ? nullptr : bias + channel,
                              product == 0 ? 1.f : kGateScale)
              .bias;
    }
    cutlass::arch::fence_view_async_shared();
    sync_computing();
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);
};

template <class Element, class Gate, NarrowTiling tiling>
CUTLASS_DEVICE void PairInKernel<Element, Gate, tiling>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128;
  Product product;
  const auto slice = product.get_slice(thread);
  Tensor z = partition_fragment_C(product, Shape<Int<kRows>, Int<kColumns>>{});
  Tensor t = make_fragment_like(z);
  const Tensor places = slice.partition_C(make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{}));
  Tensor x = make_tensor<Element>(Operand{});
  const auto read = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product);
  const auto read_slice = read.get_slice(thread);
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U16x8_STSM_T, Element>{}, product);
  const auto write_slice = write.get_slice(thread);
  Element* const results = shared.results[warpgroup].data();
  Tensor to_results = write_slice.partition_D(as_position_independent_swizzle_tensor(
      make_tensor(make_smem_ptr(results), SwizzledTransposed<Element, kColumns, kRows>{})));
  const int parts = (p.d + kColumns - 1) / kColumns;

  fold_norms(p, shared);
  PipelineState at;
  at.advance(warpgroup);
  uint32_t round = 0;
  for (int64_t tile = blockIdx.x + int64_t{warpgroup} * gridDim.x; tile < p.tiles.count();
       tile += int64_t{kPairComputing} * gridDim.x) {
    const int row = p.tiles.row(tile), place = p.tiles.place_in_row(tile);
    // A thread has two positions of the tile. After the last of a row there are zeros, which add nothing to products.
    float factors[2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int position = place * kRows + get<0>(places(2 * i));
      factors[i] = position < p.tiles.n ? 1.f : 0.f;
      if (p.mask != nullptr && position < p.tiles.n) {
        factors[i] = static_cast<float>(p.mask[row * p.mask_row_stride + position * p.mask_stride]);
      }
    }
    shared.barriers.wait_for(at.index(), at.phase(), warpgroup, round++);
    copy(read,
         read_slice.partition_S(as_position_independent_swizzle_tensor(
             make_tensor(make_smem_ptr(shared.stages[at.index()].data()), SwizzledRows<Element, kRows, kK>{}))),
         read_slice.retile_D(x));
    float rstd[2];
    normalize_rows<Element>(x, p.c, p.eps, rstd);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < 2 * parts; ++step) {
      const int side = step / parts, part = step % parts;
      const auto factor = [&](int i) {
        const Tensor w =
            make_tensor(make_smem_ptr(shared.w[side][part][i].data()), SwizzledRows<Element, kColumns, kK>{});
        return slice.make_fragment_B(slice.partition_B(w));
      };
      warpgroup_fence_operand(z);
      warpgroup_fence_operand(t);
      warpgroup_fence_operand(x);
      warpgroup_arrive();
      product.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(x); ++block) {
        cute::gemm(product, x(_, _, block), factor(0)(_, _, block), z);
        cute::gemm(product, x(_, _, block), factor(1)(_, _, block), t);
        product.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(z);
      warpgroup_fence_operand(t);

      Tensor result = make_tensor_like<Element>(z);
      const cutlass::NumericArrayConverter<Element, float, 2> to_element;
      Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
      const float half = 0.5f * p.sides[side].scale;
      const float halves[2] = {half * factors[0], half * factors[1]};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(z); i += 2) {  // pairs of neighbouring columns, alternating between two rows
        const int in_tile = get<1>(places(i)), of_thread = i / 2 % 2;
        const float2 bias = *reinterpret_cast<const float2*>(&shared.bias[side][part][0][in_tile]);
        const float2 gate_bias = *reinterpret_cast<const float2*>(&shared.bias[side][part][1][in_tile]);
        cutlass::Array<float, 2> values;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float value = z(i + v) + (v == 0 ? bias.x : bias.y);
          const float gate = fmaf(kGateScale, t(i + v), v == 0 ? gate_bias.x : gate_bias.y);
          // What a nearly closed gate lets through is lost in the sum that follows.
          values[v] = Gate::from_tanh(halves[of_thread] * value, tanh_approximate(gate));
        }
        pairs(i / 2) = to_element(values);
      }
      if (thread == 0) tma_store_wait<0>();
      sync_warpgroup(warpgroup);  // until all threads have read the tile, and TMA the previous results
      if (step == 0 && thread == 0) shared.barriers.free[at.index()].arrive();
      copy(write, write_slice.retile_S(result), to_results);
      cutlass::arch::fence_view_async_shared();
      sync_warpgroup(warpgroup);
      if (thread == 0) p.sides[side].channels.store(results, part, place, row);
    }
    at.advance(kPairComputing);
  }
  if (thread == 0) tma_store_wait<0>();
}

/// channels[s][h][i][k] = (z @ value[s].T + bias) * sigmoid(z @ gate[s].T + bias) * mask[i][k] * scale[s] for the h-th
/// column, where z is the layer norm of x[i][k]; 0 from the n-th k up to padded_positions().
template <class Gate>
struct PairIn {
  template <Element element, NarrowTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = PairInKernel<T, Gate, tiling>;

    static Status prepare(const PairProblem& p, int64_t& workspace_bytes) {
      workspace_bytes = 0;
      int count = 0;
      if (p.c > Kernel::kK || p.d > Kernel::kN) return Status::not_for_me();
      return Status::of(pair_blocks<Kernel>({p.n, p.rows}, count));
    }

    static Status run(const PairProblem& p, cudaStream_t stream) {
      using Parameters = typename Kernel::Parameters;
      int blocks = 0;
      const PairTiles tiles{p.n, p.rows};
      if (const cudaError_t error = pair_blocks<Kernel>(tiles, blocks); error != cudaSuccess) return Status::of(error);
      const int padded = padded_positions<T>(p.n);
      Parameters parameters{};
      bool encoded = are_encodable<T>(p.x);
      parameters.x = decltype(Parameters::x)::of(p.x.data, p.x.row_stride, p.x.batch_stride, p.n, p.c, p.rows);
      for (int s = 0; s < 2; ++s) {
        auto& side = parameters.sides[s];
        const Operand channels{p.channels[s], p.row_stride, s == 0 ? p.channel_stride : p.second_channel_stride};
        encoded = encoded && are_encodable<T>(p.value[s].weight, p.gate[s].weight, channels);
        side.w[0] = Kernel::Weights::of(p.value[s].weight.data, p.value[s].weight.row_stride, p.d, p.c);
        side.w[1] = Kernel::Weights::of(p.gate[s].weight.data, p.gate[s].weight.row_stride, p.d, p.c);
        side.channels = Kernel::Channels::of(p.channels[s], channels.batch_stride, p.row_stride, p.d, padded, p.rows);
        side.bias[0] = static_cast<const T*>(p.value[s].bias);
        side.bias[1] = static_cast<const T*>(p.gate[s].bias);
        side.scale = p.scale[s];
        encoded = encoded && are_encoded(side.w[0].map, side.w[1].map, side.channels.map);
      }
      if (!encoded || !are_encoded(parameters.x.map)) return Status::of(cudaErrorInvalidValue);
      parameters.mask = static_cast<const T*>(p.mask);
      parameters.mask_row_stride = p.mask_row_stride;
      parameters.mask_stride = p.mask_stride;
      parameters.norm[0] = static_cast<const T*>(p.norm_x.weight);
      parameters.norm[1] = static_cast<const T*>(p.norm_x.bias);
      parameters.eps = p.norm_x.eps;
      parameters.c = p.c;
      parameters.d = p.d;
      parameters.tiles = tiles;
      pair_kernel<Kernel><<<blocks, kPairThreads, sizeof(typename Kernel::Shared), stream>>>(parameters);
      return Status::of(cudaGetLastError());
    }
  };
};

}  // namespace torchops::cuda::gemm
