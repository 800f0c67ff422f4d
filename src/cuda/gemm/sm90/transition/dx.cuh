#pragma once

// The gradient of a transition's rows in one pass over them. Forward saves nothing: gate and up are recomputed. With
// xhat the normalised rows of x, and the norm's weight and bias folded into the matrices (transition/gradients.cuh),
// for the cotangent g of the layer
//
//   a = xhat @ gate.T + gate_bias;  u = xhat @ up.T + up_bias;  dh = g @ down
//   da = dh * u * F'(a);  du = dh * F(a);  dxhat = da @ gate + du @ up;  dx = dxhat through the norm
//
// As in transition/forward.cuh, the weights stream through a ring of stages, 64 hidden features at a time, half of them
// loaded by each CTA of a cluster; xhat, da and du stay in registers, where they are operands. While one warpgroup
// computes derivatives, the other's matrix instructions run.
//
//   load warps     0: weights; 1 and 2: rows of x and of g, for one warpgroup each (warps of the last warpgroup)
//   2 warpgroups   64 rows each: xhat, over x; then the products; dx, over xhat
//
// xhat also goes to memory, for the gradients of the weights.

#include <cute/arch/cluster_sm90.hpp>

#include "cuda/gemm/sm90/operand_norm.cuh"
#include "cuda/gemm/sm90/triangle/steps.cuh"

namespace torchops::cuda::gemm {

/// p = F(a) * u, and da and du for the cotangent g of p, given a scaled by kScale.
template <class F, class Element>
struct FeedForwardSlopes {
  // They only contribute to sums, so in bfloat16 one tanh is enough (base/activation.cuh).
  static constexpr bool kCoarse = std::is_same_v<Element, cutlass::bfloat16_t>;
  static constexpr float kScale = kCoarse ? Sigmoid::kTanhScale : F::kScale;

  CUTLASS_DEVICE static void of(float scaled_a, float u, float g, float& da, float& du, float& p) {
    float y, slope;
    if constexpr (kCoarse) {
      const float tanh = tanh_approximate(scaled_a), sigmoid = Sigmoid::from_tanh(0.5f, tanh);
      y = Sigmoid::from_tanh(scaled_a, tanh);
      slope = fmaf(y, Sigmoid::from_tanh(0.5f, -tanh), sigmoid);
    } else {
      y = F::template with_slope<Exactness::kFast>(scaled_a, slope);
    }
    p = y * u;
    du = g * y;
    da = g * u * slope;
  }
};

template <class Element_, class F, NarrowTiling tiling>
struct FeedForwardDxKernel {
  using Element = Element_;
  using Slopes = FeedForwardSlopes<F, Element>;
  static constexpr int kRows = kSpec<tiling>.rows, kC = kSpec<tiling>.most_k, kMostHidden = 512;
  static constexpr int kChunk = 64;  // hidden features at a time: the columns of a swizzled box
  static constexpr int kWarpgroups = 2, kCluster = 2;
  static constexpr int kFactorStages = 3, kDownStages = 2, kTiles = 2;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kTileBytes = kRows * kC * kSize, kFactorBytes = 2 * kChunk * kC * kSize;
  static constexpr int kDownBytes = kC * kChunk * kSize, kPiece = kChunk * kChunk;
  static_assert(kRows == 64 && kC == kCluster * kChunk && kSpec<tiling>.tile_n == kC);
  using FactorStages = Ring<kFactorStages, /*releases=*/kWarpgroups * kCluster>;
  using DownStages = Ring<kDownStages, /*releases=*/kWarpgroups * kCluster>;
  using Tiles = Ring<kTiles, /*releases=*/1>;
  using Grad = Ring<1, /*releases=*/1>;
  using FactorState = typename FactorStages::At;
  using DownState = typename DownStages::At;

  struct Shared {
    cute::array_aligned<Element, 2 * kChunk * kC, 1024> factors[kFactorStages];  // rows of gate, then of up
    cute::array_aligned<Element, kC * kChunk, 1024> down[kDownStages];
    cute::array_aligned<Element, kRows * kC, 1024> x[kTiles][kWarpgroups];  // then xhat, then dx
    cute::array_aligned<Element, kRows * kC, 1024> grad[kWarpgroups];
    Tiles x_ring[kWarpgroups];
    Grad grad_ring[kWarpgroups];
    FactorStages factor_ring;
    DownStages down_ring;

    CUTLASS_DEVICE void init() { init_barriers(factor_ring, down_ring, x_ring, grad_ring); }
  };

  struct Parameters {
    TileMap<cute::SM90_TMA_LOAD, Element, kRows, kC> x, grad;
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kC> xhat, dx;
    TileMap<cute::SM90_TMA_LOAD_MULTICAST, Element, kChunk, kChunk> gate, up, down;
    const float* bias;  // of gate, scaled, then of up: kMostHidden each
    float eps;
    int c, hidden, row_tiles;       // row_tiles: of the rows of a cluster
    bool keeps_xhat, add_residual;  // add_residual: also adds g

    CUTLASS_DEVICE int chunks() const { return (hidden + kChunk - 1) / kChunk; }
    CUTLASS_DEVICE int first() const { return blockIdx.x / kCluster; }
    CUTLASS_DEVICE int step() const { return gridDim.x / kCluster; }
    /// In units of kRows rows.
    CUTLASS_DEVICE int place(int tile, int warpgroup) const {
      return (tile * kCluster + static_cast<int>(cute::block_rank_in_cluster())) * kWarpgroups + warpgroup;
    }
  };

  using Major = cute::GMMA::Major;
  template <int n, int k, Major major_b>
  using FromRegisters = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::Int<kRows>, cute::Int<n>, cute::Int<k>>,
                                 Major::K, major_b>()));
  using ProductFactors = FromRegisters<2 * kChunk, kC, Major::K>;
  using ProductDown = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::Int<kRows>, cute::Int<kChunk>, cute::Int<kC>>, Major::K,
                                 Major::MN>()));
  using ProductX = FromRegisters<kC, 2 * kChunk, Major::MN>;

  CUTLASS_DEVICE static void load_weights(const Parameters& p, Shared& shared) {
    const int rank = static_cast<int>(cute::block_rank_in_cluster()), chunks = p.chunks();
    constexpr uint16_t both = (1 << kCluster) - 1;
    FactorState at;
    DownState down_at;
    for (int tile = p.first(); tile < p.row_tiles; tile += p.step()) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int chunk = 0; chunk < chunks; ++chunk, ++at, ++down_at) {
        // Waits until the stage is free in both CTAs. The other CTA's data may arrive before the bytes are announced
        // here, but not before the stage is free.
        Element* const factors = shared.factors[at.index()].data() + rank * 2 * kPiece;
        auto& factors_loaded = shared.factor_ring.fill(at, kFactorBytes);
        p.gate.load(factors, chunk, rank, factors_loaded, both);
        p.up.load(factors + kPiece, chunk, rank, factors_loaded, both);
        auto& down_loaded = shared.down_ring.fill(down_at, kDownBytes);
        p.down.load(shared.down[down_at.index()].data() + rank * kPiece, rank, chunk, down_loaded, both);
      }
    }
  }

  CUTLASS_DEVICE static void load_rows(const Parameters& p, Shared& shared, int warpgroup) {
    typename Tiles::At at;
    typename Grad::At grad_at;
    const auto load_x = [&](int tile) {
      auto& loaded = shared.x_ring[warpgroup].fill(at, kTileBytes);
      p.x.load(shared.x[at.index()][warpgroup].data(), p.place(tile, warpgroup), 0, loaded);
      ++at;
    };
    if (p.first() < p.row_tiles) load_x(p.first());
    for (int tile = p.first(); tile < p.row_tiles; tile += p.step(), ++grad_at) {
      auto& loaded = shared.grad_ring[warpgroup].fill(grad_at, kTileBytes);
      p.grad.load(shared.grad[warpgroup].data(), p.place(tile, warpgroup), 0, loaded);
      if (tile + p.step() < p.row_tiles) load_x(tile + p.step());
    }
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 240, compute>,
                            Warps<24, OneThread<load_weights>, OneThread<load_rows, kWarpgroups>>>;
};

template <class Element, class F, NarrowTiling tiling>
CUTLASS_DEVICE void FeedForwardDxKernel<Element, F, tiling>::compute(const Parameters& p, Shared& shared,
                                                                     int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128, in_quad = thread % 4 * 2, chunks = p.chunks();
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  const auto view = [](Element* data, auto layout) { return make_tensor(make_smem_ptr(data), layout); };
  using InRows = SwizzledRows<Element, kRows, kC>;
  const auto in_rows = [&](Element* data) { return as_position_independent_swizzle_tensor(view(data, InRows{})); };
  ProductFactors product_factors;
  ProductDown product_down;
  ProductX product_x;
  Tensor hidden = partition_fragment_C(product_factors, Shape<Int<kRows>, Int<2 * kChunk>>{});  // a, then u
  Tensor dh = partition_fragment_C(product_down, Shape<Int<kRows>, Int<kChunk>>{});
  Tensor dx = partition_fragment_C(product_x, Shape<Int<kRows>, Int<kC>>{});
  Tensor cotangents = make_tensor<Element>(RegisterOperand<2 * kChunk>{});  // da, then du
  clear(cotangents);
  Tensor xhat = make_tensor<Element>(RegisterOperand<kC>{});
  Tensor rows = make_tensor(xhat.data(), dx.layout());  // the same values, in the layout of sums
  clear(xhat);
  clear(dx);
  constexpr int count = decltype(size(dh))::value;
  const auto read = make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product_x);
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_x);
  const auto read_slice = read.get_slice(thread);
  const auto write_slice = write.get_slice(thread);
  // Each CTA writes to the stages of both, so both are signalled.
  const auto release = [&](const cutlass::arch::ClusterBarrier& free) { free.arrive(thread, thread < kCluster); };
  const cutlass::NumericArrayConverter<Element, float, 2> round;
  const cutlass::NumericArrayConverter<float, Element, 2> widen;

  // The registers of all products that follow must have their values here: if one is written while others run, the
  // compiler runs the products one after the other.
  const auto begin = [&] {
    warpgroup_fence_operand(hidden);
    warpgroup_fence_operand(dh);
    warpgroup_fence_operand(dx);
    warpgroup_fence_operand(cotangents);
    warpgroup_fence_operand(xhat);
  };
  const auto multiply = [&](auto& product, const auto& a, const auto& b, auto& sums) {
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(b); ++block) {
      cute::gemm(product, a(_, _, block), b(_, _, block), sums);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
  };
  const auto start_hidden = [&](const FactorState& at, const DownState& down_at) {
    const auto of_factors = product_factors.get_slice(0);
    const auto of_down = product_down.get_slice(0);
    shared.factor_ring.wait_until_loaded(at);
    shared.down_ring.wait_until_loaded(down_at);
    begin();
    warpgroup_arrive();
    multiply(product_factors, xhat,
             of_factors.make_fragment_B(of_factors.partition_B(
                 view(shared.factors[at.index()].data(), SwizzledRows<Element, 2 * kChunk, kC>{}))),
             hidden);
    multiply(product_down, of_down.make_fragment_A(of_down.partition_A(view(shared.grad[warpgroup].data(), InRows{}))),
             of_down.make_fragment_B(of_down.partition_B(
                 view(shared.down[down_at.index()].data(), SwizzledTransposed<Element, kC, kChunk>{}))),
             dh);
    warpgroup_commit_batch();
  };
  const auto start_dx = [&](const FactorState& at, bool first) {
    const auto slice = product_x.get_slice(0);
    const Tensor b = slice.make_fragment_B(
        slice.partition_B(view(shared.factors[at.index()].data(), SwizzledTransposed<Element, 2 * kChunk, kC>{})));
    warpgroup_arrive();
    product_x.accumulate_ = first ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(b); ++block) {
      cute::gemm(product_x, cotangents(_, _, block), b(_, _, block), dx);
      product_x.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  // A product's accumulators have the same layout in a thread as its next operand.
  const auto differentiate = [&](int chunk) {
    Tensor pairs = recast<cutlass::Array<Element, 2>>(cotangents);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < count; group += 4) {  // two columns of a row and of the other row
      const int column = chunk * kChunk + group / 4 * 8 + in_quad;
      const float2 gate = __ldg(reinterpret_cast<const float2*>(p.bias + column));
      const float2 up = __ldg(reinterpret_cast<const float2*>(p.bias + kMostHidden + column));
      CUTLASS_PRAGMA_UNROLL
      for (int i = group; i < group + 4; i += 2) {
        cutlass::Array<float, 2> da, du;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float a = fmaf(Slopes::kScale, hidden(i + v), v == 0 ? gate.x : gate.y);
          const float u = hidden(count + i + v) + (v == 0 ? up.x : up.y);
          float value;
          Slopes::of(a, u, dh(i + v), da[v], du[v], value);
        }
        pairs(i / 2) = round(da);
        pairs((count + i) / 2) = round(du);
      }
    }
  };

  typename Tiles::At tile_at;
  typename Grad::At grad_at;
  FactorState at;
  DownState down_at;
  int stored = -1;
  for (int tile = p.first(); tile < p.row_tiles; tile += p.step(), ++tile_at, ++grad_at) {
    Element* const x = shared.x[tile_at.index()][warpgroup].data();
    const int place = p.place(tile, warpgroup);
    float rstd[2];
    shared.x_ring[warpgroup].wait_until_loaded(tile_at);
    copy(read, read_slice.partition_S(in_rows(x)), read_slice.retile_D(rows));
    normalize_rows<Element>(rows, p.c, p.eps, rstd);
    copy(write, write_slice.retile_S(rows), write_slice.partition_D(in_rows(x)));
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread == 0) {
      if (stored >= 0) {
        tma_store_wait<0>();
        shared.x_ring[warpgroup].free[stored].arrive();
      }
      if (p.keeps_xhat) p.xhat.store(x, place, 0);
    }
    shared.grad_ring[warpgroup].wait_until_loaded(grad_at);

    for (int chunk = 0; chunk < chunks; ++chunk, ++at, ++down_at) {
      start_hidden(at, down_at);
      warpgroup_wait<0>();
      warpgroup_fence_operand(hidden);
      warpgroup_fence_operand(dh);
      release(shared.down_ring.free[down_at.index()]);
      if (chunk == chunks - 1 && !p.add_residual && thread == 0) shared.grad_ring[warpgroup].free[0].arrive();
      differentiate(chunk);
      begin();
      start_dx(at, chunk == 0);
      warpgroup_wait<0>();
      warpgroup_fence_operand(dx);
      release(shared.factor_ring.free[at.index()]);
    }

    through_norm<Element>(dx, rows, p.c, rstd);
    if (p.add_residual) {
      Tensor grad = make_tensor_like<Element>(dx);
      copy(read, read_slice.partition_S(in_rows(shared.grad[warpgroup].data())), read_slice.retile_D(grad));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(dx); ++i) dx(i) += static_cast<float>(grad(i));
    }
    Tensor result = make_tensor_like<Element>(dx);
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(dx); i += 2) pairs(i / 2) = round(cutlass::Array<float, 2>{dx(i), dx(i + 1)});
    if (thread == 0) tma_store_wait<0>();  // the store of xhat
    sync();
    copy(write, write_slice.retile_S(result), write_slice.partition_D(in_rows(x)));
    cutlass::arch::fence_view_async_shared();  // of these writes, and of reads of g
    sync();
    if (thread == 0) {
      if (p.add_residual) shared.grad_ring[warpgroup].free[0].arrive();
      p.dx.store(x, place, 0);
    }
    stored = tile_at.index();
  }
  if (thread == 0) tma_store_wait<0>();
}

}  // namespace torchops::cuda::gemm
