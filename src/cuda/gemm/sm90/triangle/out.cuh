#pragma once

// The output step of a triangle update: layer norm of the product o, projection, gate from the layer norm of x, and the
// residual, from channels of positions to rows of features, in one pass over o and x.
//
// A CTA keeps all weights in shared memory, and tiles of 64 positions stream through it. Its three computing warpgroups
// take them in turn, and multiply them from shared memory, o transposed. The results may overwrite x: no other CTA
// reads these rows.

#include "cuda/gemm/sm90/float32_residual.cuh"
#include "cuda/gemm/sm90/skeleton/turns.cuh"
#include "cuda/gemm/sm90/triangle/steps.cuh"

namespace torchops::cuda::gemm {

template <class Element_, class Gate, NarrowTiling tiling>
struct PairOutKernel {
  using Element = Element_;
  // Both products have c columns; their sums have lengths d and c.
  static constexpr int kRows = kPairRows, kColumns = kPairColumns, kN = kSpec<tiling>.tile_n, kK = kSpec<tiling>.most_k;
  static constexpr int kParts = kN / kColumns, kWeights = 2 * kParts;
  static constexpr int kSize = static_cast<int>(sizeof(Element)), kComputing = 3, kRegisters = 160;
  static constexpr int kTileBytes = kRows * kK * kSize, kWeightBytes = kColumns * kK * kSize;
  static constexpr int kRoom = kMostSharedBytes - 512 - kWeights * (kWeightBytes + 8 * kColumns) - 2 * 8 * kK -
                               kComputing * (kColumns * kRows * kSize + 8 * 4 * kRows);
  static constexpr int kStages = std::min(kSpec<tiling>.stages, kRoom / (2 * kTileBytes));
  static constexpr Exactness kExactness = kExactnessOf<Element>;
  static_assert(kSpec<tiling>.rows == kRows && kN == kK && kStages > kComputing);
  using Stages = Ring<kStages, /*releases=*/1>;
  // A stage does not always go to the same warpgroup.
  static constexpr bool kInTurn = kStages % kComputing != 0;

  struct Stage {
    cute::array_aligned<Element, kK * kRows, 1024> o;
    cute::array_aligned<Element, kRows * kK, 1024> x;
  };
  struct Shared {
    cute::array_aligned<Element, kColumns * kK, 1024> w[2][kParts];
    cute::array_aligned<Element, kRows * kColumns, 1024> results[kComputing];
    Stage stages[kStages];
    alignas(16) ColumnTerms terms[2][kParts][kColumns];
    alignas(16) float2 partial[kComputing][4][kRows];
    NormVectors<kK> norm_o, norm_x;
    LoadBarrier<> w_loaded;
    Stages ring;
    Turns<kComputing> turns;

    CUTLASS_DEVICE void init() { init_barriers(w_loaded, ring, turns); }
  };

  struct Parameters {
    PlaneMap<cute::SM90_TMA_LOAD, Element, kRows, kK> x;
    PlaneMap<cute::SM90_TMA_LOAD, Element, kK, kRows> o;
    PlaneMap<cute::SM90_TMA_STORE, Element, kRows, kColumns> out;
    TileMap<cute::SM90_TMA_LOAD, Element, kColumns, kK> w[2];
    const Element* bias[2];
    NormValues<Element> norm_x[2], norm_o[2];
    float eps_x, eps_o;
    int c, d;
    bool add_residual;
    Float32Residual residual;
    PairTiles tiles;
  };

  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kK>>;
  using OfChannels = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape, cute::GMMA::Major::MN, cute::GMMA::Major::K>()));
  using OfRows = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape, cute::GMMA::Major::K, cute::GMMA::Major::K>()));

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    shared.w_loaded.arrive_and_expect_tx(kWeights * kWeightBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWeights; ++i) {
      p.w[i / kParts].load(shared.w[i / kParts][i % kParts].data(), i % kParts, 0, shared.w_loaded);
    }
    typename Stages::At at;
    for (int64_t tile = blockIdx.x; tile < p.tiles.count(); tile += gridDim.x, ++at) {
      auto& stage = shared.stages[at.index()];
      const int place = p.tiles.place_in_row(tile), row = p.tiles.row(tile);
      auto& loaded = shared.ring.fill(at, 2 * kTileBytes);
      p.o.load(stage.o.data(), 0, place, row, loaded);
      p.x.load(stage.x.data(), place, 0, row, loaded);
    }
  }

  // Called by the computing warpgroups while the first tiles are being loaded.
  CUTLASS_DEVICE static void fold_norms(const Parameters& p, Shared& shared) {
    constexpr int threads = 128 * kComputing;
    shared.norm_o.load(p.norm_o[0], p.norm_o[1], p.d, threads);
    shared.norm_x.load(p.norm_x[0], p.norm_x[1], p.c, threads);
    sync_computing<kComputing>();
    shared.w_loaded.wait(0);
    for (int i = static_cast<int>(threadIdx.x); i < kWeights * kColumns; i += threads) {
      const int product = i / (kParts * kColumns), part = i / kColumns % kParts, row = i % kColumns;
      const int column = part * kColumns + row;
      const Element* const bias = p.bias[product];
      shared.terms[product][part][row] = fold_norm<kColumns>(
          shared.w[product][part].data(), row, product == 0 ? shared.norm_o : shared.norm_x,
          bias == nullptr || column >= p.c ? nullptr : bias + column, product == 0 ? 1.f : Gate::kScale);
    }
    cutlass::arch::fence_view_async_shared();
    sync_computing<kComputing>();
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  static constexpr int kCluster = 1;
  using Roles = gemm::Roles<Warpgroups<kComputing, kRegisters, compute>, Warps<24, OneThread<load>>>;
};

template <class Element, class Gate, NarrowTiling tiling>
CUTLASS_DEVICE void PairOutKernel<Element, Gate, tiling>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  using Tile = cute::Shape<Int<kRows>, Int<kColumns>>;
  const int thread = threadIdx.x % 128;
  OfChannels of_channels;
  OfRows of_rows;
  const auto slice_o = of_channels.get_slice(thread);
  const auto slice = of_rows.get_slice(thread);
  Tensor y = partition_fragment_C(of_channels, Tile{});
  Tensor t = make_fragment_like(y);
  const Tensor places = slice.partition_C(make_identity_tensor(Tile{}));
  const auto in_rows = [](Element* data) {
    return as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(data), SwizzledRows<Element, kRows, kColumns>{}));
  };
  const auto read = make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, of_rows);
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, of_rows);
  const auto read_slice = read.get_slice(thread);
  const auto write_slice = write.get_slice(thread);
  Element* const results = shared.results[warpgroup].data();
  Tensor to_results = write_slice.partition_D(in_rows(results));
  const auto sync = [&] { sync_warpgroup(warpgroup); };
  const int parts = (p.c + kColumns - 1) / kColumns;

  fold_norms(p, shared);
  typename Stages::At at;
  at.advance(warpgroup);
  uint32_t round = 0;
  for (int64_t tile = blockIdx.x + int64_t{warpgroup} * gridDim.x; tile < p.tiles.count();
       tile += int64_t{kComputing} * gridDim.x) {
    Stage& stage = shared.stages[at.index()];
    if constexpr (kInTurn) shared.turns.wait(warpgroup, round);
    shared.ring.wait_until_loaded(at);
    if constexpr (kInTurn) shared.turns.pass_on(warpgroup);
    ++round;
    const Tensor a_o = slice_o.make_fragment_A(
        slice_o.partition_A(make_tensor(make_smem_ptr(stage.o.data()), SwizzledTransposed<Element, kK, kRows>{})));
    const Tensor a_x = slice.make_fragment_A(
        slice.partition_A(make_tensor(make_smem_ptr(stage.x.data()), SwizzledRows<Element, kRows, kK>{})));
    Moments of_o, of_x;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int part = 0; part < parts; ++part) {
      const auto weight = [&](int i) {
        return make_tensor(make_smem_ptr(shared.w[i][part].data()), SwizzledRows<Element, kColumns, kK>{});
      };
      const Tensor project = slice_o.make_fragment_B(slice_o.partition_B(weight(0)));
      const Tensor gate = slice.make_fragment_B(slice.partition_B(weight(1)));
      warpgroup_fence_operand(y);
      warpgroup_fence_operand(t);
      warpgroup_arrive();
      of_channels.accumulate_ = of_rows.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(a_o); ++block) {
        cute::gemm(of_channels, a_o(_, _, block), project(_, _, block), y);
        cute::gemm(of_rows, a_x(_, _, block), gate(_, _, block), t);
        of_channels.accumulate_ = of_rows.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      if (part == 0) {
        of_o = channel_moments<Element, kK>(stage.o.data(), shared.partial[warpgroup], p.d, p.eps_o, sync);
        of_x = row_moments<Element, kK>(stage.x.data(), p.c, p.eps_x);
      }
      const bool has_residual = p.residual.from != nullptr;
      const int row = p.tiles.row(tile), place = p.tiles.place_in_row(tile);
      Float32ResidualRow<kColumns / 8> residual[2];  // the two rows in which a thread has columns
      if (has_residual) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int position = place * kRows + get<0>(places(2 * i)), column = part * kColumns + get<1>(places(0));
          residual[i].load(p.residual, row, position, column, position < p.tiles.n ? p.c : 0);
        }
      }
      Tensor x = make_tensor_like<Element>(y);
      if (p.add_residual && !has_residual) {
        copy(read, read_slice.partition_S(in_rows(stage.x.data() + part * (kRows * kColumns))), read_slice.retile_D(x));
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(y);
      warpgroup_fence_operand(t);

      // Pairs of neighbouring columns, alternating between two rows.
      const auto update = [&](int i) {
        const int in_tile = get<1>(places(i)), of_thread = i / 2 % 2;
        const float4 terms = *reinterpret_cast<const float4*>(&shared.terms[0][part][in_tile]);
        const float4 gate_terms = *reinterpret_cast<const float4*>(&shared.terms[1][part][in_tile]);
        const float shift_o = of_o.shift[of_thread], shift_x = of_x.shift[of_thread];
        cutlass::Array<float, 2> values;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float of_column = v == 0 ? fmaf(shift_o, terms.x, terms.y) : fmaf(shift_o, terms.z, terms.w);
          const float gate_of_column =
              v == 0 ? fmaf(shift_x, gate_terms.x, gate_terms.y) : fmaf(shift_x, gate_terms.z, gate_terms.w);
          const float s =
              Gate::of_scaled<kExactness>(fmaf(Gate::kScale * of_x.scale[of_thread], t(i + v), gate_of_column));
          values[v] = fmaf(of_o.scale[of_thread], y(i + v), of_column) * s;
        }
        return values;
      };
      if (has_residual) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(y); i += 2) residual[i / 2 % 2].add(i / 4, update(i));
        finish_reads();
        sync();  // until all have read the tile
        if (part + 1 == parts && thread == 0) shared.ring.free[at.index()].arrive();
        continue;
      }
      Tensor result = make_tensor_like<Element>(y);
      const cutlass::NumericArrayConverter<Element, float, 2> to_element;
      Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(y); i += 2) {
        cutlass::Array<float, 2> values = update(i);
        if (p.add_residual) {
          values[0] += static_cast<float>(x(i));
          values[1] += static_cast<float>(x(i + 1));
        }
        pairs(i / 2) = to_element(values);
      }
      if (thread == 0) tma_store_wait<0>();
      sync();  // until TMA has read the previous results
      copy(write, write_slice.retile_S(result), to_results);
      cutlass::arch::fence_view_async_shared();  // of these writes, and of reads of the tile
      sync();
      if (thread == 0) {
        if (part + 1 == parts) shared.ring.free[at.index()].arrive();
        p.out.store(results, place, part, row);
      }
    }
    at.advance(kComputing);
  }
  if (thread == 0) tma_store_wait<0>();
}

/// out[i][k] = (layer norm of o[:, i, k] @ value.T + bias) * sigmoid(layer norm of x[i][k] @ gate.T + bias), plus
/// x[i][k] or the residual, if `add_residual`; o is channels[0].
template <class Gate>
struct PairOut {
  template <Element element, NarrowTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = PairOutKernel<T, Gate, tiling>;
    using Launch = Persistent<Kernel>;

    static Status prepare(const PairProblem& p, int64_t&) {
      int count = 0;
      if (p.c > Kernel::kK || p.d > Kernel::kK) return Status::not_for_me();
      return Status::of(Launch::resident(PairTiles{p.n, p.rows}.count(), count));
    }

    static Status run(const PairProblem& p, cudaStream_t stream) {
      const PairTiles tiles{p.n, p.rows};
      return Launch::run(tiles.count(), stream, [&](auto& parameters, TileMaps& maps, int) {
        const Operand out{p.out, p.out_row_stride, p.out_stride};
        maps(parameters.x, p.x, p.n, p.c, p.rows);
        maps(parameters.o, {p.channels[0], p.channel_stride, p.row_stride}, p.d, p.n, p.rows);
        if (p.add_residual && p.residual.data != nullptr) {
          parameters.residual = Float32Residual(p.residual, out);
        } else {
          maps(parameters.out, out, p.n, p.c, p.rows);
        }
        maps(parameters.w[0], p.value[0].weight, p.c, p.d);
        maps(parameters.w[1], p.gate[0].weight, p.c, p.c);
        parameters.bias[0] = static_cast<const T*>(p.value[0].bias);
        parameters.bias[1] = static_cast<const T*>(p.gate[0].bias);
        parameters.norm_x[0] = {p.norm_x.weight};
        parameters.norm_x[1] = {p.norm_x.bias};
        parameters.norm_o[0] = {p.norm_o.weight};
        parameters.norm_o[1] = {p.norm_o.bias};
        parameters.eps_x = p.norm_x.eps;
        parameters.eps_o = p.norm_o.eps;
        parameters.c = p.c;
        parameters.d = p.d;
        parameters.add_residual = p.add_residual;
        parameters.tiles = tiles;
      });
    }
  };
};

}  // namespace torchops::cuda::gemm
