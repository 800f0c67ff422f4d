#pragma once

// Products of few features, together with the operations around them, in one pass over the rows.
//
// With few features, such a product is bound by memory, and each additional tensor (a second product that it is
// multiplied by, a tensor that it gates) costs as much as the product itself. Here a CTA keeps its columns of all
// weights in shared memory for its whole life; only rows stream through it, each once for a tile's width of features:
//
//   load warp     a tile of rows of a, and of c if the rule reads it -> a stage of shared memory, by TMA, several ahead
//   warpgroups    in turn, a tile each: all its products, side by side in registers; the rule, which turns the sums of
//                 a row and column into one value; the tile of results, over that of c or of a; by TMA to device memory
//
// While one warpgroup computes its rule, the matrix instructions of another run. If the sums of all columns don't fit
// into the registers, they are computed in parts, each while the rule of the previous one is computed, from an operand
// that is read into registers before its shared memory is overwritten.

#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>

#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm90/pointwise.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"
#include "cuda/gemm/sm90/skeleton/turns.cuh"

namespace torchops::cuda::gemm {

/// Compile-time parameters of the kernel.
template <class Rule_, class Element_, NarrowTiling tiling>
struct NarrowKernel {
  using Rule = Rule_;
  using Element = Element_;
  static constexpr int kRows = kSpec<tiling>.rows, kN = kSpec<tiling>.tile_n, kK = kSpec<tiling>.most_k;
  static constexpr int kProducts = Rule::kProducts;
  // A third warpgroup takes registers from the other two, and a single product leaves some. A gate waits for memory,
  // and gains nothing.
  static constexpr int kWarpgroups = kProducts == 1 && !Rule::kReadsC ? 3 : 2;
  static constexpr int kRegisters = kWarpgroups == 3 ? 160 : 232, kLoadRegisters = kWarpgroups == 3 ? 24 : 40;
  static constexpr int kColumns = kN > 128 ? 64 : kN, kParts = kN / kColumns, kSets = std::min(kParts, 2);
  static constexpr bool kFromRegisters = kParts > 1;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kStageBytes = kRows * (kK + (Rule::kReadsC ? kN : 0)) * kSize;
  static constexpr int kWeightBytes = kProducts * kN * kK * kSize;
  static constexpr int kRoom = kMostSharedBytes - 1024 - kWeightBytes - kProducts * kN * 4;
  // If two tensors are read for each one written, the loads may run further ahead of the stores; and a third warpgroup
  // holds a stage, too.
  static constexpr int kMoreStages = Rule::kReadsC || kWarpgroups == 3 ? 2 : 0;
  static constexpr int kStages = std::min(kSpec<tiling>.stages + kMoreStages, kRoom / kStageBytes);
  static constexpr Exactness kExactness = kExactnessOf<Element>;
  static_assert(kStages >= kWarpgroups && kN % kColumns == 0 && (Rule::kReadsC || kN <= kK));
  // If the stages can't be divided evenly among the warpgroups, a stage passes from one to another.
  static constexpr bool kInTurn = kStages % kWarpgroups != 0;
  using Stages = Ring<kStages, /*releases=*/1>;

  template <bool reads_c, class = void>
  struct StageOf {
    cute::array_aligned<Element, kRows * kK, 1024> a;
    CUTLASS_DEVICE Element* result() { return a.data(); }
  };
  template <class Unused>
  struct StageOf<true, Unused> {
    cute::array_aligned<Element, kRows * kK, 1024> a;
    cute::array_aligned<Element, kRows * kN, 1024> c;
    CUTLASS_DEVICE Element* result() { return c.data(); }
  };
  struct Shared {
    cute::array_aligned<Element, kN * kK, 1024> w[kProducts];
    StageOf<Rule::kReadsC> stages[kStages];
    alignas(16) float bias[kProducts][kN];  // scaled as the rule needs it
    LoadBarrier<> w_loaded;
    Stages ring;
    Turns<kWarpgroups> turns;

    CUTLASS_DEVICE void init() { init_barriers(w_loaded, ring, turns); }
  };

  template <int rows, int columns>
  using Load = TileMap<cute::SM90_TMA_LOAD, Element, rows, columns>;
  struct Parameters {
    Load<kRows, kK> a;
    Load<kN, kK> w[kProducts];
    Load<kRows, kN> c;  // a copy of d's if there is none
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kN> d;
    const Element* bias[2];
    int m, n;

    /// A CTA stays in its column of tiles and takes every step-th tile of it.
    CUTLASS_DEVICE int columns() const { return (n + kN - 1) / kN; }
    CUTLASS_DEVICE int column() const { return blockIdx.x % columns(); }
    CUTLASS_DEVICE int first() const { return blockIdx.x / columns(); }
    CUTLASS_DEVICE int step() const { return gridDim.x / columns(); }
    CUTLASS_DEVICE int tiles() const { return divided(m, kRows); }
  };

  static constexpr auto product() {
    using Tile = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kK>>;
    constexpr auto major = cute::GMMA::Major::K;
    if constexpr (kFromRegisters) {
      return cute::make_tiled_mma(cute::GMMA::rs_op_selector<Element, Element, float, Tile, major, major>());
    } else {
      return cute::make_tiled_mma(cute::GMMA::ss_op_selector<Element, Element, float, Tile, major, major>());
    }
  }
  using Product = decltype(product());

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    const int column = p.column();
    // Before the rows: queued behind them, the weights would arrive last, and no product can start without them.
    shared.w_loaded.arrive_and_expect_tx(kWeightBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kProducts; ++i) p.w[i].load(shared.w[i].data(), column, 0, shared.w_loaded);
    typename Stages::At at;
    for (int tile = p.first(); tile < p.tiles(); tile += p.step(), ++at) {
      auto& stage = shared.stages[at.index()];
      auto& loaded = shared.ring.fill(at, kStageBytes);
      p.a.load(stage.a.data(), tile, 0, loaded);
      if constexpr (Rule::kReadsC) p.c.load(stage.c.data(), tile, column, loaded);
    }
  }

  // Called by the warpgroups while the first tiles are being loaded.
  CUTLASS_DEVICE static void load_bias(const Parameters& p, Shared& shared) {
    constexpr int threads = 128 * kWarpgroups;
    load_scaled_bias<Rule>(p.bias, shared.bias, p.column() * kN, p.n, threads);
    cutlass::arch::NamedBarrier::sync(threads, kWarpgroups);
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  static constexpr int kCluster = 1;
  using Roles = gemm::Roles<Warpgroups<kWarpgroups, kRegisters, compute>, Warps<kLoadRegisters, OneThread<load>>>;
};

template <class Rule, class Element, NarrowTiling tiling>
CUTLASS_DEVICE void NarrowKernel<Rule, Element, tiling>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  load_bias(p, shared);
  const int thread = threadIdx.x % 128, column = p.column();
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  const auto in_rows = [](Element* data, auto columns) {
    return as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(data), SwizzledRows<Element, kRows, columns()>{}));
  };
  Product product;
  const auto slice = product.get_slice(thread);
  using Part = Shape<Int<kRows>, Int<kColumns>>;
  // The sums of both products, for the columns whose rule is being computed and for the next columns.
  using Sums = decltype(partition_fragment_C(product, Part{}));
  Sums z[kSets], t[kSets];
  using Rows = SwizzledRows<Element, kRows, kK>;
  Tensor x = slice.partition_fragment_A(make_tensor(make_smem_ptr(shared.stages[0].a.data()), Rows{}));
  const Tensor places = slice.partition_C(make_identity_tensor(Part{}));
  const auto read_c = make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product);
  const auto write_d = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product);
  const auto read_slice = read_c.get_slice(thread);
  const auto write_slice = write_d.get_slice(thread);
  const auto multiply = [&](const auto& a, int part) {
    const auto factor = [&](int i) {
      const Tensor w = local_tile(make_tensor(make_smem_ptr(shared.w[i].data()), SwizzledRows<Element, kN, kK>{}),
                                  Shape<Int<kColumns>, Int<kK>>{}, make_coord(part, 0));
      return slice.make_fragment_B(slice.partition_B(w));
    };
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(a); ++block) {
      cute::gemm(product, a(_, _, block), factor(0)(_, _, block), z[part % kSets]);
      if constexpr (kProducts == 2) cute::gemm(product, a(_, _, block), factor(1)(_, _, block), t[part % kSets]);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  const auto fence = [&] {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSets; ++i) {
      warpgroup_fence_operand(z[i]);
      if constexpr (kProducts == 2) warpgroup_fence_operand(t[i]);
    }
  };

  shared.w_loaded.wait(0);
  typename Stages::At at;
  at.advance(warpgroup);
  int stage_of_store = -1;
  uint32_t round = 0;
  for (int tile = p.first() + warpgroup * p.step(); tile < p.tiles(); tile += kWarpgroups * p.step()) {
    auto& stage = shared.stages[at.index()];
    if (thread == 0 && stage_of_store >= 0) {
      tma_store_wait<0>();
      shared.ring.free[stage_of_store].arrive();
    }
    if constexpr (kInTurn) shared.turns.wait(warpgroup, round);
    shared.ring.wait_until_loaded(at);
    if constexpr (kInTurn) shared.turns.pass_on(warpgroup);
    ++round;
    fence();
    // From a tile in shared memory, a warp reads the rows that only it overwrites.
    if constexpr (kFromRegisters) {
      const auto read_a = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product);
      const auto a_slice = read_a.get_slice(thread);
      copy(read_a, a_slice.partition_S(in_rows(stage.a.data(), Int<kK>{})), a_slice.retile_D(x));
      warpgroup_fence_operand(x);
      multiply(x, 0);
    } else {
      multiply(slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(stage.a.data()), Rows{}))), 0);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      if constexpr (kFromRegisters) {
        if (part + 1 < kParts) multiply(x, part + 1);
      }
      const Tensor in_part = in_rows(stage.result() + part * (kRows * kColumns), Int<kColumns>{});
      Tensor result = make_tensor_like<Element>(z[0]);
      if constexpr (Rule::kReadsC) copy(read_c, read_slice.partition_S(in_part), read_slice.retile_D(result));
      part + 1 < kParts ? warpgroup_wait<1>() : warpgroup_wait<0>();
      fence();

      const cutlass::NumericArrayConverter<Element, float, 2> round;
      Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(result); i += 2) {  // a thread has pairs of neighbouring columns
        const int in_tile = part * kColumns + get<1>(places(i));
        float2 bias[2];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kProducts; ++j) bias[j] = *reinterpret_cast<const float2*>(&shared.bias[j][in_tile]);
        cutlass::Array<float, 2> values;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float first = fmaf(Rule::scale(0), z[part % kSets](i + v), v == 0 ? bias[0].x : bias[0].y);
          float second = 0.f;
          if constexpr (kProducts == 2) {
            second = fmaf(Rule::scale(1), t[part % kSets](i + v), v == 0 ? bias[1].x : bias[1].y);
          }
          values[v] =
              Rule::template value<kExactness>(first, second, Rule::kReadsC ? static_cast<float>(result(i + v)) : 0.f);
        }
        pairs(i / 2) = round(values);
      }
      if constexpr (!kFromRegisters) sync();  // until all warps' products have read what the result overwrites
      copy(write_d, write_slice.retile_S(result), write_slice.partition_D(in_part));
    }
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread == 0) {
      p.d.store(stage.result(), tile, column);
      stage_of_store = at.index();
    }
    at.advance(kWarpgroups);
  }
  if (thread == 0) tma_store_wait<0>();
}

/// d = the rule's value for a @ b.T, and for a @ b2.T and c if it has them. d may be c.
template <class Rule>
struct Narrow {
  template <Element element, NarrowTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = NarrowKernel<Rule, T, tiling>;
    using Launch = Persistent<Kernel>;

    static int columns(const Problem& p) { return divided(p.n, Kernel::kN); }

    static Status prepare(const Problem& p, int64_t&) {
      int count = 0;
      if (p.k > Kernel::kK || p.batch > 1) return Status::not_for_me();
      if (const cudaError_t error = Launch::resident(count); error != cudaSuccess) return Status::of(error);
      return columns(p) <= count ? Status{} : Status::not_for_me();
    }

    static Status run(const Problem& p, cudaStream_t stream) {
      const int rows = divided(p.m, Kernel::kRows);
      return Launch::run(int64_t{rows} * columns(p), stream, [&](auto& parameters, TileMaps& maps, int& blocks) {
        maps(parameters.a, p.a, p.m, p.k);
        maps(parameters.w, p.b, p.b2, p.n, p.k);
        maps(parameters.c, Rule::kReadsC ? p.c : p.d, p.m, p.n);
        maps(parameters.d, p.d, p.m, p.n);
        parameters.bias[0] = static_cast<const T*>(p.bias);
        parameters.bias[1] = static_cast<const T*>(p.bias2);
        parameters.m = p.m;
        parameters.n = p.n;
        blocks -= blocks % columns(p);
      });
    }
  };
};

}  // namespace torchops::cuda::gemm
