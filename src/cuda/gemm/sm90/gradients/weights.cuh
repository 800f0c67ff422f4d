#pragma once

// The cotangents of both products of a gated linear unit, and the gradients of its weights and biases, in one pass over
// the rows, for weights that don't fit gradients/gated.cuh. dx is left to a product of the cotangents.
//
// The sums of dw and dw2 are larger than the registers of a multiprocessor, so a cluster shares them: each of its CTAs
// has 64 columns of both products, with their weights in shared memory and their sums of dw in registers for all rows.
// All CTAs need the same rows of x; each loads a part, and TMA delivers it to all.
//
//   load warp      x, grad -> a stage of shared memory, some ahead
//   2 warpgroups   32 columns of both products each, transposed, in one matrix instruction: w @ x.T, of whose 64 rows
//                  w and w2 alternately have 8, so that a thread has a column of both products; then the rule's dz.T,
//                  in registers as dw += dz.T @ x reads it; for device memory it is transposed on the way
//
// The warpgroups don't wait for each other, so that the rule of one overlaps the products of the other.

#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/cluster_sm90.hpp>

#include "cuda/base/quads.cuh"
#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm90/pointwise.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"
#include "cuda/gemm/sm90/weight_sums.cuh"

namespace torchops::cuda::gemm {

template <class Rule_, class Element_, GradientTiling tiling>
struct WeightGradientsKernel {
  using Rule = Rule_;
  using Element = Element_;
  static constexpr int kRows = 64, kBox = 64, kN = kSpec<tiling>.most_n, kK = kSpec<tiling>.most_k;
  static constexpr int kWarpgroups = kSpec<tiling>.consumers, kCluster = kN / kBox, kBoxes = kK / kBox;
  static constexpr int kColumns = kBox / kWarpgroups;  // of each product, per warpgroup
  static constexpr int kTurn = GradientProblem::kTurn;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kStageBytes = kRows * (kK + kBox) * kSize, kWeightBytes = 2 * kBox * kK * kSize;
  static constexpr int kRoom = kMostSharedBytes - 2048 - kWeightBytes - kWarpgroups * kRows * kBox * kSize;
  static constexpr int kStages = std::min(kRoom / kStageBytes, 6);
  static constexpr Exactness kExactness = kExactnessOf<Element>;
  static_assert(Rule::kProducts == 2 && kWarpgroups == 2 && kStages >= 3 && kCluster <= 8 && kTurn == 8);
  using Stages = Ring<kStages, /*releases=*/kCluster * kWarpgroups>;

  struct Shared {
    struct Stage {
      cute::array_aligned<Element, kRows * kK, 1024> x;
      cute::array_aligned<Element, kRows * kBox, 1024> grad;
    };
    cute::array_aligned<Element, kBox * kK, 1024> w[kWarpgroups];  // alternately kTurn rows of w and of w2
    Stage stages[kStages];
    cute::array_aligned<Element, kRows * kBox, 1024> dz[kWarpgroups];  // columns alternate in the same way
    LoadBarrier<> w_loaded;
    Stages ring;

    CUTLASS_DEVICE void init() { init_barriers(w_loaded, ring); }
  };

  struct Parameters {
    TileMap<cute::SM90_TMA_LOAD_MULTICAST, Element, kRows, kBox> x;
    TileMap<cute::SM90_TMA_LOAD, Element, kRows, kBox> grad;
    TileMap<cute::SM90_TMA_LOAD, Element, kTurn, kBox> w[2];
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kBox> dz;  // both cotangents
    const Element* bias[2];
    float* partial;  // for each cluster and product: dw (n x k), dbias (n)
    int m, n, k;
    bool writes_dz;

    CUTLASS_DEVICE int tiles() const { return divided(m, kRows); }
    CUTLASS_DEVICE static int rank() { return static_cast<int>(cute::block_rank_in_cluster()); }
    CUTLASS_DEVICE static int first() { return static_cast<int>(blockIdx.x) / kCluster; }
    CUTLASS_DEVICE static int step() { return static_cast<int>(gridDim.x) / kCluster; }
  };

  using Major = cute::GMMA::Major;
  using ProductZ = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kRows>, cute::Int<kK>>,
                                 Major::K, Major::K>()));
  using ProductW = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kK>, cute::Int<kRows>>,
                                 Major::K, Major::MN>()));

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    const int rank = p.rank();
    shared.w_loaded.arrive_and_expect_tx(kWeightBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBox / kTurn; ++i) {
        const int turn = (rank * kWarpgroups + warpgroup) * (kColumns / kTurn) + i / 2;
        CUTLASS_PRAGMA_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          p.w[i % 2].load(shared.w[warpgroup].data() + (box * kBox + i * kTurn) * kBox, turn, box, shared.w_loaded);
        }
      }
    }
    typename Stages::At at;
    for (int tile = p.first(); tile < p.tiles(); tile += p.step(), ++at) {
      auto& stage = shared.stages[at.index()];
      // Free in all CTAs. Data of another CTA may arrive before the bytes are announced here.
      auto& loaded = shared.ring.fill(at, kStageBytes);
      for (int box = rank; box < kBoxes; box += kCluster) {
        p.x.load(stage.x.data() + box * kRows * kBox, tile, box, loaded, (1 << kCluster) - 1);
      }
      p.grad.load(stage.grad.data(), tile, rank, loaded);
    }
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 232, compute>, Warps<40, OneThread<load>>>;
};

template <class Rule, class Element, GradientTiling tiling>
CUTLASS_DEVICE void WeightGradientsKernel<Rule, Element, tiling>::compute(const Parameters& p, Shared& shared,
                                                                          int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  const auto release = [&](int stage) {  // signals all CTAs that load for this one
    if (thread < kCluster) shared.ring.free[stage].arrive(thread);
  };
  // A warp has kTurn columns of both products; a thread has one of these, and pairs of rows.
  const int first = p.rank() * kBox + warpgroup * kColumns, column = first + warp * kTurn + lane / 4;
  float bias[2], sums_b[2] = {};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const bool present = p.bias[i] != nullptr && column < p.n;
    bias[i] = present ? Rule::scale(i) * static_cast<float>(p.bias[i][column]) : 0.f;
  }
  ProductZ product_z;
  ProductW product_w;
  const auto slice_z = product_z.get_slice(thread);
  const auto slice_w = product_w.get_slice(thread);
  Tensor sums = partition_fragment_C(product_z, Shape<_64, Int<kRows>>{});
  Tensor sums_w = partition_fragment_C(product_w, Shape<_64, Int<kK>>{});
  Tensor dz = make_tensor<Element>(RegisterOperand<kRows>{});
  Tensor pairs = recast<cutlass::Array<Element, 2>>(dz);
  Tensor words = recast<uint32_t>(dz);
  clear(sums_w);
  clear(dz);
  Element* const result = shared.dz[warpgroup].data();
  const Tensor w = slice_z.make_fragment_A(
      slice_z.partition_A(make_tensor(make_smem_ptr(shared.w[warpgroup].data()), SwizzledRows<Element, kBox, kK>{})));
  const cutlass::NumericArrayConverter<Element, float, 2> round;
  const cutlass::NumericArrayConverter<float, Element, 2> widen;
  // 8 columns of a row of a tile of kBox columns.
  const auto piece = [](Element* tile, int row, int of_row) -> uint128_t& {
    return *reinterpret_cast<uint128_t*>(tile + row * kBox + (of_row ^ (row % 8)) * 8);
  };

  shared.w_loaded.wait(0);
  typename Stages::At at;
  int former = -1;  // the stage that products of dw may still be reading
  for (int tile = p.first(); tile < p.tiles(); tile += p.step(), ++at) {
    auto& stage = shared.stages[at.index()];
    shared.ring.wait_until_loaded(at);
    const Tensor x = slice_z.make_fragment_B(
        slice_z.partition_B(make_tensor(make_smem_ptr(stage.x.data()), SwizzledRows<Element, kRows, kK>{})));
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
    product_z.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(x); ++block) {
      cute::gemm(product_z, w(_, _, block), x(_, _, block), sums);
      product_z.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    uint32_t grad[kRows / 8];  // pairs of rows of the thread's column
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows / 32; ++i) {
      SM75_U16x8_LDSM_T::copy(piece(stage.grad.data(), 32 * i + lane, warpgroup * (kColumns / kTurn) + warp),
                              grad[4 * i], grad[4 * i + 1], grad[4 * i + 2], grad[4 * i + 3]);
    }
    warpgroup_wait<1>();
    warpgroup_fence_operand(sums_w);
    warpgroup_fence_operand(dz);
    if (former >= 0) release(former);
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);

    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows / 8; ++i) {
      const auto g = widen(reinterpret_cast<const cutlass::Array<Element, 2>&>(grad[i]));
      cutlass::Array<float, 2> of_first, of_second;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 2; ++v) {
        const float z = fmaf(Rule::scale(0), sums(4 * i + v), bias[0]);
        const float t = fmaf(Rule::scale(1), sums(4 * i + 2 + v), bias[1]);
        Rule::template backward<kExactness>(g[v], z, t, 0.f, /*is_y=*/false, of_first[v], of_second[v]);
        sums_b[0] += of_first[v];
        sums_b[1] += of_second[v];
      }
      pairs(2 * i) = round(of_first);
      pairs(2 * i + 1) = round(of_second);
    }
    const Tensor x_w = slice_w.make_fragment_B(
        slice_w.partition_B(make_tensor(make_smem_ptr(stage.x.data()), SwizzledTransposed<Element, kRows, kK>{})));
    warpgroup_fence_operand(sums_w);
    warpgroup_fence_operand(dz);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(dz); ++block) {
      cute::gemm(product_w, dz(_, _, block), x_w(_, _, block), sums_w);
    }
    warpgroup_commit_batch();
    former = at.index();
    if (!p.writes_dz) {
      finish_reads();
      sync();  // until all have read their part of grad; then its stage is released
      continue;
    }
    if (thread == 0) tma_store_wait<0>();
    sync();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows / 16; ++i) {
      SM90_U16x8_STSM_T::copy(words(4 * i), words(4 * i + 1), words(4 * i + 2), words(4 * i + 3),
                              piece(result, 16 * i + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
    }
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread == 0) p.dz.store(result, tile, p.rank() * kWarpgroups + warpgroup);
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums_w);
  if (thread == 0) tma_store_wait<0>();

  const int64_t weights = int64_t{p.n} * p.k, of_product = weights + p.n;
  float* const partial = p.partial + p.first() * (2 * of_product);
  const Tensor places = slice_w.partition_C(make_identity_tensor(Shape<_64, Int<kK>>{}));
  if (column >= p.n) return;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(sums_w); i += 2) {  // alternately two features for each product
    const int feature = get<1>(places(i));
    if (feature < p.k) {
      *reinterpret_cast<float2*>(partial + i / 2 % 2 * of_product + int64_t{column} * p.k + feature) =
          make_float2(sums_w(i), sums_w(i + 1));
    }
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float sum = sum_of_quad(sums_b[i]);
    if (lane % 4 == 0) partial[i * of_product + weights + column] = sum;
  }
}

/// From grad, x and both weights: dw, dw2, dbias and dbias2, each of which may be null; and dz, if it is not null, with
/// both cotangents alternating, an m x 2 n matrix.
template <class Rule>
struct WeightGradients {
  template <Element element, GradientTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = WeightGradientsKernel<Rule, T, tiling>;
    using Launch = Persistent<Kernel>;

    static Status prepare(const GradientProblem& p, int64_t& workspace_bytes) {
      if (p.n > Kernel::kN || p.k > Kernel::kK) return Status::not_for_me();
      int count = 0;
      const cudaError_t error = Launch::resident(divided(p.m, Kernel::kRows), count);
      workspace_bytes = int64_t{4} * count * 2 * columns_of_sums(p);
      return error == cudaSuccess && count == 0 ? Status::not_for_me() : Status::of(error);
    }

    static Status run(const GradientProblem& p, cudaStream_t stream) {
      const bool writes_dz = p.dz.data != nullptr;
      int count = 0;
      const auto fill = [&](auto& parameters, TileMaps& maps, int clusters) {
        maps(parameters.x, p.x, p.m, p.k);
        maps(parameters.grad, p.grad, p.m, p.n);
        maps(parameters.w, p.w, p.w2, p.n, p.k);
        maps(parameters.dz, writes_dz ? p.dz : p.grad, p.m, writes_dz ? 2 * p.n : p.n);
        parameters.writes_dz = writes_dz;
        parameters.bias[0] = static_cast<const T*>(p.bias);
        parameters.bias[1] = static_cast<const T*>(p.bias2);
        parameters.partial = static_cast<float*>(p.workspace);
        parameters.m = p.m;
        parameters.n = p.n;
        parameters.k = p.k;
        count = clusters;
      };
      const Status status = Launch::run(divided(p.m, Kernel::kRows), stream, fill);
      if (!status.done()) return status;
      return p.has_float32_sums ? add_up<float, 2>(p, count, stream) : add_up<T, 2>(p, count, stream);
    }
  };
};

}  // namespace torchops::cuda::gemm
