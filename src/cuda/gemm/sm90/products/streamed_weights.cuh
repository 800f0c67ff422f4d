#pragma once

// One or two products of the same rows, with an epilogue in registers, for sums of any length
// (products/resident_weights.cuh is for few features). The epilogues are in products/streamed_value.cuh and
// gradients/streamed_cotangents.cuh.
//
// A tile of two weights is one operand in shared memory: tile_n rows of b, followed by the same rows of b2. One matrix
// instruction computes both products, and a thread has column j of both, so the products never leave the CTA. A single
// weight has as many rows in a tile as two have together:
//
//   load warp     tiles of a and of the weights, 64 columns of each -> a stage of shared memory, by TMA, several ahead
//   warpgroups    kCooperative: half of a tile's rows each; kPingPong: a tile each, in turn, so that the epilogue of
//                 one overlaps the matrix instructions of the other
//
// The CTAs of a cluster are side by side. Each loads a part of the rows that all of them need, and TMA delivers it to
// all.

#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/cluster_sm90.hpp>

#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm90/pointwise.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"
#include "cuda/gemm/sm90/skeleton/turns.cuh"

namespace torchops::cuda::gemm {

/// How a tile is divided, and which part of it a thread has.
template <class Element_, Tiling tiling, int products>
struct StreamedTile {
  using Element = Element_;
  static constexpr TilingSpec kTiling = kSpec<tiling>;
  static constexpr bool kPingPong = kTiling.schedule == Schedule::kPingPong;
  static constexpr int kProducts = products, kColumns = 2 * kTiling.tile_n, kN = kColumns / products;
  static constexpr int kM = kTiling.tile_m, kK = 64, kCluster = kTiling.cluster_n;
  static constexpr int kWarpgroups = 2;
  static constexpr int kRows = kPingPong ? kM : kM / kWarpgroups;  // per warpgroup
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr Exactness kExactness = kExactnessOf<Element>;
  static_assert(kSize == 2 && kRows % 64 == 0 && kN % 64 == 0 && kN <= 128);
  static_assert(kRows * kColumns <= 64 * 256, "the sums are 128 registers of a thread");
  static_assert(kTiling.cluster_m == 1 && kTiling.epilogue_n == kTiling.tile_n && kTiling.resident_k == 0 &&
                kTiling.stages == 0);

  template <int n>
  using ProductOf = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<n>, cute::Int<kK>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  using Product = ProductOf<kColumns>;
  using Result = ProductOf<kN>;  // assigns a result to the thread that has its sums
  using SharedRows = cute::array_aligned<Element, kRows * kN, 1024>;
};

/// Starts a stage's part of sums += a @ w.T as its own group of matrix instructions; all are fragments of a warpgroup.
template <class Product, class A, class W, class Sums>
CUTLASS_DEVICE void start_products(Product& product, const A& a, const W& w, Sums& sums) {
  using namespace cute;
  warpgroup_arrive();
  CUTLASS_PRAGMA_UNROLL
  for (int block = 0; block < size<2>(a); ++block) {
    cute::gemm(product, a(_, _, block), w(_, _, block), sums);
    product.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

/// The biases of a tile's columns, scaled as the rule needs them; 0 for columns that do not exist.
template <class Rule, class Tile>
struct StreamedBias {
  struct Shared {
    alignas(16) float at[Rule::kProducts][Tile::kN];
  };
  using Pointers = const typename Tile::Element* [2];
  float of_thread[Rule::kProducts];

  CUTLASS_DEVICE void read(const Pointers& bias, int n, int column, int thread) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Rule::kProducts; ++i) {
      const bool present = bias[i] != nullptr && thread < Tile::kN && column * Tile::kN + thread < n;
      of_thread[i] = present ? Rule::scale(i) * static_cast<float>(bias[i][column * Tile::kN + thread]) : 0.f;
    }
  }
  CUTLASS_DEVICE void share(Shared& shared, int thread) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Rule::kProducts; ++i) {
      if (thread < Tile::kN) shared.at[i][thread] = of_thread[i];
    }
  }
};

/// Epilogue_ has
///   Tile                              a StreamedTile
///   Parameters                        which are part of the kernel's
///   Shared                            shared memory of a warpgroup; init() is called by one thread of the CTA
///   (parameters, shared, n, thread)   its constructor, for each thread of a warpgroup
///   begin(row, column)                before the products of a tile at this place in the grid of tiles of kRows x kN
///   share()                           while the last of these products run; then all threads synchronise
///   finish(sums, sync)                when the products are complete
///   end()                             after the last tile
template <class Epilogue_>
struct StreamedKernel {
  using Epilogue = Epilogue_;
  using Tile = typename Epilogue::Tile;
  using Element = typename Tile::Element;
  using Product = typename Tile::Product;
  static constexpr bool kPingPong = Tile::kPingPong;
  static constexpr int kM = Tile::kM, kN = Tile::kN, kK = Tile::kK, kColumns = Tile::kColumns, kRows = Tile::kRows;
  static constexpr int kProducts = Tile::kProducts, kCluster = Tile::kCluster, kWarpgroups = Tile::kWarpgroups;
  static constexpr int kRowsOfA = kM / kCluster;  // loaded by a CTA for its cluster
  static constexpr int kStageBytes = (kM + kColumns) * kK * Tile::kSize;
  static constexpr int kEpilogueBytes = static_cast<int>(sizeof(typename Epilogue::Shared));
  static constexpr int kStages = (kMostSharedBytes - 1024 - kWarpgroups * kEpilogueBytes) / kStageBytes;
  static_assert(kStages >= 3);
  using Stages = Ring<kStages, /*releases=*/kCluster*(kPingPong ? 1 : kWarpgroups)>;

  struct Stage {
    cute::array_aligned<Element, kM * kK, 1024> a;
    cute::array_aligned<Element, kColumns * kK, 1024> w;
  };
  struct Shared {
    Stage stages[kStages];
    typename Epilogue::Shared epilogue[kWarpgroups];
    Stages ring;
    Turns<kWarpgroups> turns;

    CUTLASS_DEVICE void init() {
      if constexpr (kPingPong) {
        init_barriers(ring, turns, epilogue);
      } else {
        init_barriers(ring, epilogue);
      }
    }
  };

  using LoadOfA = std::conditional_t<(kCluster > 1), cute::SM90_TMA_LOAD_MULTICAST, cute::SM90_TMA_LOAD>;
  struct Parameters {
    TileMap<LoadOfA, Element, kRowsOfA, kK> a;
    TileMap<cute::SM90_TMA_LOAD, Element, kN, kK> w[kProducts];
    typename Epilogue::Parameters epilogue;
    int n, steps;
    int rows, columns;  // of the grid of cluster tiles
  };

  CUTLASS_DEVICE static int rank() { return kCluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0; }
  CUTLASS_DEVICE static int first() { return static_cast<int>(blockIdx.x) / kCluster; }
  CUTLASS_DEVICE static int clusters() { return static_cast<int>(gridDim.x) / kCluster; }

  /// Where this CTA's part of a cluster tile is, in the grid of CTA tiles. With kPingPong, a CTA has two tiles at a
  /// time, so groups have twice as many rows.
  CUTLASS_DEVICE static GridPlace place(const Parameters& p, int tile) {
    const GridPlace of_cluster = place_in_groups(tile, p.rows, p.columns, (kPingPong ? 4096 : 2048) / kM);
    return {of_cluster.row, of_cluster.column * kCluster + rank()};
  }

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    const int rank = StreamedKernel::rank();
    typename Stages::At at;
    for (int tile = first(); tile < p.rows * p.columns; tile += clusters()) {
      const GridPlace place = StreamedKernel::place(p, tile);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < p.steps; ++step, ++at) {
        Stage& stage = shared.stages[at.index()];
        auto& loaded = shared.ring.fill(at, kStageBytes);
        p.a.load(stage.a.data() + rank * kRowsOfA * kK, place.row * kCluster + rank, step, loaded, (1 << kCluster) - 1);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kProducts; ++i) p.w[i].load(stage.w.data() + i * kN * kK, place.column, step, loaded);
      }
    }
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 232, compute>, Warps<40, OneThread<load>>>;
};

template <class Epilogue>
CUTLASS_DEVICE void StreamedKernel<Epilogue>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128;
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  // Signals all CTAs that load for this one; one thread for each.
  const auto release = [&](int stage) {
    if constexpr (kCluster == 1) {
      if (thread == 0) shared.ring.free[stage].arrive();
    } else {
      if (thread < kCluster) shared.ring.free[stage].arrive(thread);
    }
  };
  Product product;
  const auto slice = product.get_slice(thread);
  Tensor sums = partition_fragment_C(product, Shape<Int<kRows>, Int<kColumns>>{});
  Epilogue epilogue(p.epilogue, shared.epilogue[warpgroup], p.n, thread);

  typename Stages::At at;
  if (kPingPong && warpgroup > 0) at.advance(p.steps);
  uint32_t round = 0;
  for (int tile = first() + (kPingPong ? warpgroup : 0) * clusters(); tile < p.rows * p.columns;
       tile += (kPingPong ? kWarpgroups : 1) * clusters(), ++round) {
    const GridPlace place = StreamedKernel::place(p, tile);
    epilogue.begin(kPingPong ? place.row : place.row * kWarpgroups + warpgroup, place.column);
    if constexpr (kPingPong) shared.turns.wait(warpgroup, round);  // until the other one has seen all of its stages
    int former = 0;
    product.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < p.steps; ++step, ++at) {
      Stage& stage = shared.stages[at.index()];
      shared.ring.wait_until_loaded(at);
      if constexpr (kPingPong) {
        if (step == p.steps - 1) shared.turns.pass_on(warpgroup);
      }
      const Tensor a = slice.make_fragment_A(
          slice.partition_A(make_tensor(make_smem_ptr(stage.a.data() + (kPingPong ? 0 : warpgroup) * kRows * kK),
                                        SwizzledRows<Element, kRows, kK>{})));
      const Tensor w = slice.make_fragment_B(
          slice.partition_B(make_tensor(make_smem_ptr(stage.w.data()), SwizzledRows<Element, kColumns, kK>{})));
      start_products(product, a, w, sums);
      if (step > 0) {
        warpgroup_wait<1>();
        release(former);
      }
      former = at.index();
    }
    epilogue.share();
    sync();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release(former);
    if constexpr (kPingPong) at.advance(p.steps);
    epilogue.finish(sums, sync);
  }
  epilogue.end();
}

/// Launches a StreamedKernel.
template <class Kernel>
struct StreamedLaunch {
  static Status prepare() { return Persistent<Kernel>::prepare(); }

  /// a is m x k; both weights are n x k. fill(epilogue, maps) sets the parameters of the epilogue.
  template <class Fill>
  static Status run(int m, int n, int k, const Operand& a, const Operand& b, const Operand& b2, cudaStream_t stream,
                    const Fill& fill) {
    const int rows = divided(m, Kernel::kM), columns = divided(n, Kernel::kN * Kernel::kCluster);
    return Persistent<Kernel>::run(int64_t{rows} * columns, stream, [&](auto& parameters, TileMaps& maps, int&) {
      maps(parameters.a, a, m, k);
      maps(parameters.w, b, b2, n, k);
      parameters.n = n;
      parameters.steps = divided(k, Kernel::kK);
      parameters.rows = rows;
      parameters.columns = columns;
      fill(parameters.epilogue, maps);
    });
  }
};

}  // namespace torchops::cuda::gemm
