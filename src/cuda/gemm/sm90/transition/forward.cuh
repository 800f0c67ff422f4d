#pragma once

// A transition: layer norm, two products with their activation, and a product back, with the residual, in one pass over
// the rows. The hidden features are never in memory, not even in shared memory:
//
//   load warp     rows of x -> a stage of shared memory; then gate, up and down weights, 64 hidden features at a time,
//                 through a ring of stages, again for each tile
//   warpgroups    64 rows each: x normalised in registers, where it stays as an operand. For each 64 hidden features,
//                 one matrix instruction computes the products with gate and up; its accumulators, once activated
//                 and multiplied, are the operand of the product with down, as probabilities are in
//                 attention kernels
//
// While one warpgroup activates, the other's matrix instructions run, and its own for the previous 64 features. Two
// CTAs form a cluster, and each loads one half of the weights for both: 384 KiB for 128 rows would be more than the
// second-level cache can deliver.

#include <cute/arch/cluster_sm90.hpp>

#include "cuda/gemm/sm90/float32_residual.cuh"
#include "cuda/gemm/sm90/operand_norm.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/triangle/steps.cuh"

namespace torchops::cuda::gemm {

template <class Element_, class F, NarrowTiling tiling>
struct FeedForwardKernel {
  using Element = Element_;
  static constexpr int kRows = kSpec<tiling>.rows, kC = kSpec<tiling>.most_k, kMostHidden = 512;
  static constexpr int kChunk = 64;  // hidden features at a time: the columns of a swizzled box
  static constexpr int kWarpgroups = 2, kCluster = 2;
  static constexpr int kStages = 3, kTiles = 2;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kTileBytes = kRows * kC * kSize, kFactorBytes = 2 * kChunk * kC * kSize;
  static constexpr int kDownBytes = kC * kChunk * kSize, kPiece = kChunk * kChunk;
  static_assert(kRows == 64 && kC == kCluster * kChunk && kSpec<tiling>.tile_n == kC);
  using Stages = Ring<kStages, /*releases=*/kWarpgroups * kCluster>;
  using Tiles = Ring<kTiles, /*releases=*/1>;
  using Chunk = typename Stages::At;
  using Tile = typename Tiles::At;

  struct Shared {
    cute::array_aligned<Element, 2 * kChunk * kC, 1024> factors[kStages];  // rows of gate, then of up
    cute::array_aligned<Element, kC * kChunk, 1024> down[kStages];
    cute::array_aligned<Element, kRows * kC, 1024> x[kTiles][kWarpgroups];  // later the results
    alignas(16) float gate_bias[kMostHidden], up_bias[kMostHidden], down_bias[kC];
    NormVectors<kC> norm;
    Tiles x_ring[kWarpgroups];
    Stages factor_ring, down_ring;

    CUTLASS_DEVICE void init() { init_barriers(factor_ring, down_ring, x_ring); }
  };

  struct Parameters {
    TileMap<cute::SM90_TMA_LOAD, Element, kRows, kC> x;
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kC> out;
    TileMap<cute::SM90_TMA_LOAD_MULTICAST, Element, kChunk, kChunk> gate, up, down;
    const Element *gate_bias, *up_bias, *down_bias;
    NormValues<Element> norm[2];
    float eps;
    int m, c, hidden, row_tiles;  // row_tiles: of the rows of a cluster
    bool add_residual;
    Float32Residual residual;

    CUTLASS_DEVICE int chunks() const { return (hidden + kChunk - 1) / kChunk; }
    CUTLASS_DEVICE int first() const { return blockIdx.x / kCluster; }
    CUTLASS_DEVICE int step() const { return gridDim.x / kCluster; }
    /// In units of kRows rows.
    CUTLASS_DEVICE int place(int tile, int warpgroup) const {
      return (tile * kCluster + static_cast<int>(cute::block_rank_in_cluster())) * kWarpgroups + warpgroup;
    }
  };

  // For all products: 64 rows in registers by 128 columns.
  using Product = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::Int<kRows>, cute::Int<kC>, cute::Int<kC>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    const int rank = static_cast<int>(cute::block_rank_in_cluster()), chunks = p.chunks();
    constexpr uint16_t both = (1 << kCluster) - 1;
    Tile tile_at;
    Chunk at;
    const auto load_x = [&](int tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
        auto& loaded = shared.x_ring[warpgroup].fill(tile_at, kTileBytes);
        p.x.load(shared.x[tile_at.index()][warpgroup].data(), p.place(tile, warpgroup), 0, loaded);
      }
      ++tile_at;
    };
    if (p.first() < p.row_tiles) load_x(p.first());
    for (int tile = p.first(); tile < p.row_tiles; tile += p.step()) {
      for (int chunk = 0; chunk < chunks; ++chunk, ++at) {
        // Waits until the stage is free in both CTAs. The other CTA's data may arrive before the bytes are announced
        // here, but not before the stage is free.
        Element* const factors = shared.factors[at.index()].data() + rank * 2 * kPiece;
        auto& factors_loaded = shared.factor_ring.fill(at, kFactorBytes);
        p.gate.load(factors, chunk, rank, factors_loaded, both);
        p.up.load(factors + kPiece, chunk, rank, factors_loaded, both);
        auto& down_loaded = shared.down_ring.fill(at, kDownBytes);
        p.down.load(shared.down[at.index()].data() + rank * kPiece, rank, chunk, down_loaded, both);
        // Usually late enough for the stage of x to be free, and early enough for the ring not to run dry.
        if (chunk == min(kStages, chunks - 1) && tile + p.step() < p.row_tiles) load_x(tile + p.step());
      }
    }
  }

  // Called by the warpgroups while the first tiles are being loaded.
  CUTLASS_DEVICE static void load_vectors(const Parameters& p, Shared& shared) {
    constexpr int threads = 128 * kWarpgroups;
    const auto load = [](float* to, const Element* from, int count, int room, float scale) {
      for (int i = static_cast<int>(threadIdx.x); i < room; i += threads) {
        to[i] = from != nullptr && i < count ? scale * static_cast<float>(from[i]) : 0.f;
      }
    };
    load(shared.gate_bias, p.gate_bias, p.hidden, kMostHidden, kGateScale);
    load(shared.up_bias, p.up_bias, p.hidden, kMostHidden, 1.f);
    load(shared.down_bias, p.down_bias, p.c, kC, 1.f);
    shared.norm.load(p.norm[0], p.norm[1], p.c, threads);
    cutlass::arch::NamedBarrier::sync(threads, kWarpgroups);
  }

  // silu(u) * v. Hidden features only contribute to sums, so in bfloat16 one tanh is enough (base/activation.cuh).
  static constexpr bool kCoarse = std::is_same_v<Element, cutlass::bfloat16_t>;
  static constexpr float kGateScale = kCoarse ? Sigmoid::kTanhScale : F::kScale;
  CUTLASS_DEVICE static float activated(float scaled_u, float v) {
    if constexpr (kCoarse) {
      return Sigmoid::from_tanh(scaled_u * v, tanh_approximate(scaled_u));
    } else {
      return F::template of_scaled<Exactness::kFast>(scaled_u) * v;
    }
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 232, compute>, Warps<40, OneThread<load>>>;
};

template <class Element, class F, NarrowTiling tiling>
CUTLASS_DEVICE void FeedForwardKernel<Element, F, tiling>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128, in_quad = thread % 4 * 2, chunks = p.chunks();
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  const auto in_rows = [](Element* data) {
    return as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(data), SwizzledRows<Element, kRows, kC>{}));
  };
  Product product;
  const auto slice = product.get_slice(thread);
  Tensor z = make_tensor<Element>(RegisterOperand<kC>{});
  Tensor h = make_tensor<Element>(RegisterOperand<kChunk>{});
  Tensor hidden = partition_fragment_C(product, Shape<Int<kRows>, Int<kC>>{});  // columns of gate, then of up
  Tensor y = make_fragment_like(hidden);
  clear(h);
  clear(y);
  const auto factors = [&](int stage) {
    return slice.make_fragment_B(slice.partition_B(
        make_tensor(make_smem_ptr(shared.factors[stage].data()), SwizzledRows<Element, 2 * kChunk, kC>{})));
  };
  const auto down = [&](int stage) {
    return slice.make_fragment_B(
        slice.partition_B(make_tensor(make_smem_ptr(shared.down[stage].data()), SwizzledRows<Element, kC, kChunk>{})));
  };
  const auto read_z = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product);
  const auto read_x = make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product);
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product);
  const auto z_slice = read_z.get_slice(thread);
  const auto x_slice = read_x.get_slice(thread);
  const auto write_slice = write.get_slice(thread);
  // Each CTA writes to the stages of both, so both are signalled.
  const auto release = [&](const cutlass::arch::ClusterBarrier& free) { free.arrive(thread, thread < kCluster); };

  // The registers of all products that follow must have their values here: if one is written while others run, the
  // compiler runs the products one after the other.
  const auto begin = [&] {
    warpgroup_fence_operand(hidden);
    warpgroup_fence_operand(y);
    warpgroup_fence_operand(z);
    warpgroup_fence_operand(h);
  };
  const auto start_factors = [&](const Chunk& at) {
    shared.factor_ring.wait_until_loaded(at);
    begin();
    warpgroup_arrive();
    const Tensor b = factors(at.index());
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(b); ++block) {
      cute::gemm(product, z(_, _, block), b(_, _, block), hidden);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  const auto start_down = [&](const Chunk& at, bool first) {
    shared.down_ring.wait_until_loaded(at);
    warpgroup_arrive();
    const Tensor b = down(at.index());
    product.accumulate_ = first ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(b); ++block) {
      cute::gemm(product, h(_, _, block), b(_, _, block), y);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  // A product's accumulators have the same layout in a thread as its next operand.
  constexpr int count = decltype(size(h))::value;
  const auto activate_chunk = [&](int chunk) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < count; i += 2) {
      const int column = chunk * kChunk + i / 4 * 8 + in_quad;
      const float2 gate = *reinterpret_cast<const float2*>(&shared.gate_bias[column]);
      const float2 up = *reinterpret_cast<const float2*>(&shared.up_bias[column]);
      hidden(i) = activated(fmaf(kGateScale, hidden(i), gate.x), hidden(count + i) + up.x);
      hidden(i + 1) = activated(fmaf(kGateScale, hidden(i + 1), gate.y), hidden(count + i + 1) + up.y);
    }
  };
  // Call this once no product reads h any more.
  const auto round_to_h = [&] {
    const cutlass::NumericArrayConverter<Element, float, 2> round;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(h);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < count; i += 2) pairs(i / 2) = round(cutlass::Array<float, 2>{hidden(i), hidden(i + 1)});
  };

  load_vectors(p, shared);
  Tile tile_at;
  Chunk at, down_at;
  int stored = -1;
  for (int tile = p.first(); tile < p.row_tiles; tile += p.step(), ++tile_at) {
    Element* const x = shared.x[tile_at.index()][warpgroup].data();
    shared.x_ring[warpgroup].wait_until_loaded(tile_at);
    copy(read_z, z_slice.partition_S(in_rows(x)), z_slice.retile_D(z));
    normalize_operand<Element>(z, shared.norm, p.c, p.eps);
    const bool has_residual = p.residual.from != nullptr;
    const int first_row = p.place(tile, warpgroup) * kRows;
    if (has_residual && first_row + thread / 2 < p.m) p.residual.prefetch(first_row + thread / 2, p.c, thread % 2, 2);

    start_factors(at);
    if (thread == 0 && stored >= 0) {
      tma_store_wait<0>();
      shared.x_ring[warpgroup].free[stored].arrive();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(hidden);
    release(shared.factor_ring.free[at.index()]);
    activate_chunk(0);
    round_to_h();
    ++at;
    for (int chunk = 1; chunk < chunks; ++chunk, ++at, ++down_at) {
      start_factors(at);
      start_down(down_at, chunk == 1);
      warpgroup_wait<1>();
      warpgroup_fence_operand(hidden);
      release(shared.factor_ring.free[at.index()]);
      activate_chunk(chunk);
      warpgroup_wait<0>();
      warpgroup_fence_operand(y);
      warpgroup_fence_operand(h);
      release(shared.down_ring.free[down_at.index()]);
      round_to_h();
    }
    // The two rows in which a thread has columns: half of them at a time, while registers of hidden features are free.
    constexpr int kPairs = kC / 16;
    Float32ResidualRow<kPairs> residual[2];
    const auto load_residual = [&](int column) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + thread / 32 * 16 + thread % 32 / 4 + 8 * i;
        residual[i].load(p.residual, 0, row, column + in_quad, row < p.m ? p.c : 0);
      }
    };
    begin();
    if (has_residual) load_residual(0);
    start_down(down_at, chunks == 1);
    Tensor old = make_tensor_like<Element>(y);
    if (p.add_residual && !has_residual) copy(read_x, x_slice.partition_S(in_rows(x)), x_slice.retile_D(old));
    warpgroup_wait<0>();
    warpgroup_fence_operand(y);
    release(shared.down_ring.free[down_at.index()]);
    ++down_at;

    stored = tile_at.index();
    const auto update = [&](int i) {
      const float2 bias = *reinterpret_cast<const float2*>(&shared.down_bias[i / 4 * 8 + in_quad]);
      return cutlass::Array<float, 2>{y(i) + bias.x, y(i + 1) + bias.y};
    };
    if (has_residual) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (half == 1) load_residual(kC / 2);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(y) / 2; i += 2) residual[i / 2 % 2].add(i / 4, update(half * (size(y) / 2) + i));
      }
      sync();  // until all warps have read x
      continue;
    }
    Tensor result = make_tensor_like<Element>(y);
    const cutlass::NumericArrayConverter<Element, float, 2> round;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(y); i += 2) {
      cutlass::Array<float, 2> values = update(i);
      if (p.add_residual) {
        values[0] += static_cast<float>(old(i));
        values[1] += static_cast<float>(old(i + 1));
      }
      pairs(i / 2) = round(values);
    }
    sync();  // until all warps have read x
    copy(write, write_slice.retile_S(result), write_slice.partition_D(in_rows(x)));
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread == 0) p.out.store(x, p.place(tile, warpgroup), 0);
  }
  if (thread == 0) tma_store_wait<0>();
}

/// out = down(F(gate(z)) * up(z)) with z = layer norm of x; plus x or the residual if `add_residual`.
template <class F>
struct FeedForward {
  template <Element element, NarrowTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = FeedForwardKernel<T, F, tiling>;
    using Launch = Persistent<Kernel>;

    static Status prepare(const TransitionProblem& p, int64_t&) {
      return p.c > Kernel::kC || p.hidden > Kernel::kMostHidden ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const TransitionProblem& p, cudaStream_t stream) {
      const int row_tiles = divided(p.m, Kernel::kRows * Kernel::kWarpgroups * Kernel::kCluster);
      return Launch::run(row_tiles, stream, [&](auto& parameters, TileMaps& maps, int) {
        maps(parameters.x, p.x, p.m, p.c);
        if (p.add_residual && p.residual.data != nullptr) {
          parameters.residual = Float32Residual(p.residual, p.out);
        } else {
          maps(parameters.out, p.out, p.m, p.c);
        }
        maps(parameters.gate, p.gate.weight, p.hidden, p.c);
        maps(parameters.up, p.up.weight, p.hidden, p.c);
        maps(parameters.down, p.down.weight, p.c, p.hidden);
        parameters.gate_bias = static_cast<const T*>(p.gate.bias);
        parameters.up_bias = static_cast<const T*>(p.up.bias);
        parameters.down_bias = static_cast<const T*>(p.down.bias);
        parameters.norm[0] = {p.norm.weight};
        parameters.norm[1] = {p.norm.bias};
        parameters.eps = p.norm.eps;
        parameters.m = p.m;
        parameters.c = p.c;
        parameters.hidden = p.hidden;
        parameters.row_tiles = row_tiles;
        parameters.add_residual = p.add_residual;
      });
    }
  };
};

}  // namespace torchops::cuda::gemm
