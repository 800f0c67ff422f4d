#pragma once

// dx, dz and the gradient of the bias of y = F(x @ w.T + bias) in one pass over grad and y, for any number of output
// features. dw is left to a product of dz and x.
//
// The sums of dw would be larger than the registers of a multiprocessor, but those of dx for a tile of rows fit: dz
// goes to memory, but nothing reads it from there for dx. A CTA has the sums of its rows in registers, while the
// columns of grad and y pass through in boxes of 64, with as many rows of w.
//
//   load warp      grad, y -> a stage of shared memory, by TMA, some ahead
//   weight warp    rows of w -> a stage of their own
//   2 warpgroups   of 64 rows each: dz, written over grad;  dx += dz @ w;  dbias += dz
//   store warp     dz -> device memory, by TMA
//
// TMA reads zeros beyond the matrices, and does not store there.

#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>

#include "cuda/base/column_sum.cuh"
#include "cuda/gemm/sm90/gradients/cotangent_tile.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"

namespace torchops::cuda::gemm {

template <class F, class Element_, GradientTiling tiling>
struct InputGradientsKernel {
  using Element = Element_;
  static constexpr int kRows = 64, kBox = 64, kK = kSpec<tiling>.most_k, kWarpgroups = kSpec<tiling>.consumers;
  static constexpr int kHeight = kRows * kWarpgroups;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kStageBytes = 2 * kHeight * kBox * kSize, kWeightBytes = kBox * kK * kSize;
  static constexpr int kWeightStages = 3, kResultBytes = kHeight * kBox * kSize;
  static constexpr int kStages =
      std::min((kMostSharedBytes - 2048 - kWeightStages * kWeightBytes - kResultBytes) / kStageBytes, 5);
  using Stages = Ring<kStages, /*releases=*/kWarpgroups + 1>;  // products, and the store
  using WeightStages = Ring<kWeightStages, /*releases=*/kWarpgroups>;
  using Cotangent = CotangentTile<F, Element, kRows, kBox, 128>;

  struct Shared {
    struct Stage {
      cute::array_aligned<Element, kHeight * kBox, 1024> grad, y;
    };
    Stage stages[kStages];
    cute::array_aligned<Element, kBox * kK, 1024> w[kWeightStages];
    /// A warpgroup's part of dx on its way to device memory; until then, sums of dbias of two boxes.
    union Result {
      cute::array_aligned<Element, kRows * kBox, 1024> dx;
      float sums[2][Cotangent::kHeight][kBox];
    } results[kWarpgroups];
    Stages ring;
    WeightStages w_ring;
    Barrier<kWarpgroups> computed[kStages];

    CUTLASS_DEVICE void init() { init_barriers(ring, computed, w_ring); }
  };
  static_assert(kStages >= 3);
  static_assert(sizeof(typename Shared::Result) == kRows * kBox * kSize);

  struct Parameters {
    TileMap<cute::SM90_TMA_LOAD, Element, kHeight, kBox> grad, y;
    TileMap<cute::SM90_TMA_LOAD, Element, kBox, kK> w;
    TileMap<cute::SM90_TMA_STORE, Element, kHeight, kBox> dz;
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kBox> dx;
    float* partial;  // of dbias, n columns for each warpgroup; or null
    int m, n, k;

    CUTLASS_DEVICE int tiles() const { return divided(m, kHeight); }
    CUTLASS_DEVICE int boxes() const { return divided(n, kBox); }
  };

  using Product = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kK>, cute::Int<kBox>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

  /// Calls f(tile, box) for all boxes of all tiles of this CTA.
  template <class Function>
  CUTLASS_DEVICE static void for_boxes(const Parameters& p, const Function& f) {
    const int tiles = p.tiles(), boxes = p.boxes();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      for (int box = 0; box < boxes; ++box) f(tile, box);
    }
  }

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    typename Stages::At at;
    for_boxes(p, [&](int tile, int box) {
      auto& stage = shared.stages[at.index()];
      auto& loaded = shared.ring.fill(at, kStageBytes);
      p.grad.load(stage.grad.data(), tile, box, loaded);
      p.y.load(stage.y.data(), tile, box, loaded);
      ++at;
    });
  }

  CUTLASS_DEVICE static void load_weights(const Parameters& p, Shared& shared) {
    typename WeightStages::At at;
    for_boxes(p, [&](int, int box) {
      p.w.load(shared.w[at.index()].data(), box, 0, shared.w_ring.fill(at, kWeightBytes));
      ++at;
    });
  }

  CUTLASS_DEVICE static void store(const Parameters& p, Shared& shared) {
    typename Stages::At at;
    for_boxes(p, [&](int tile, int box) {
      shared.computed[at.index()].wait(at.phase());
      p.dz.store(shared.stages[at.index()].grad.data(), tile, box);
      cute::tma_store_wait<0>();
      shared.ring.free[at.index()].arrive();
      ++at;
    });
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  static constexpr int kCluster = 1;
  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 232, compute>,
                            Warps<40, OneThread<load>, OneThread<load_weights>, OneThread<store>>>;
};

template <class F, class Element, GradientTiling tiling>
CUTLASS_DEVICE void InputGradientsKernel<F, Element, tiling>::compute(const Parameters& p, Shared& shared,
                                                                      int warpgroup) {
  using namespace cute;
  constexpr int kPart = kRows * kBox;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  auto& result = shared.results[warpgroup];
  float* const partial =
      p.partial == nullptr ? nullptr : p.partial + (int64_t{blockIdx.x} * kWarpgroups + warpgroup) * p.n;

  Product product;
  const auto slice = product.get_slice(thread);
  Tensor sums = partition_fragment_C(product, Shape<_64, Int<kK>>{});
  const cutlass::NumericArrayConverter<Element, float, 2> round;
  const auto word = [&](int i) {
    cutlass::Array<float, 2> pair;
    pair[0] = sums(2 * i);
    pair[1] = sums(2 * i + 1);
    const auto rounded = round(pair);
    return reinterpret_cast<const uint32_t&>(rounded);
  };

  typename Stages::At at;
  typename WeightStages::At w_at;
  const int tiles = p.tiles(), boxes = p.boxes();
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    product.accumulate_ = GMMA::ScaleOut::Zero;
    for (int box = 0; box < boxes; ++box, ++at, ++w_at) {
      auto& stage = shared.stages[at.index()];
      const int column = box * kBox + thread;
      const bool sums_column = partial != nullptr && thread < kBox && column < p.n;
      float sum = sums_column && tile != blockIdx.x ? partial[column] : 0.f;
      float of_thread[Cotangent::kVector] = {};
      Element* const dz = stage.grad.data() + warpgroup * kPart;
      shared.ring.wait_until_loaded(at);
      Cotangent::make(dz, stage.y.data() + warpgroup * kPart, of_thread, thread);
      if (partial != nullptr) {
        auto* const to = reinterpret_cast<float4*>(&result.sums[box % 2][0][0]) + 2 * thread;
        to[0] = make_float4(of_thread[0], of_thread[1], of_thread[2], of_thread[3]);
        to[1] = make_float4(of_thread[4], of_thread[5], of_thread[6], of_thread[7]);
      }
      finish_reads();  // and writes, which the products and the store read
      sync();
      if (thread == 0) shared.computed[at.index()].arrive();
      shared.w_ring.wait_until_loaded(w_at);
      const Tensor a = slice.make_fragment_A(
          slice.partition_A(make_tensor(make_smem_ptr(dz), SwizzledRows<Element, kRows, kBox>{})));
      const Tensor b = slice.make_fragment_B(slice.partition_B(
          make_tensor(make_smem_ptr(shared.w[w_at.index()].data()), SwizzledTransposed<Element, kBox, kK>{})));
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(a); ++block) {
        cute::gemm(product, a(_, _, block), b(_, _, block), sums);
        product.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      if (sums_column) {
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < Cotangent::kHeight; ++row) sum += result.sums[box % 2][row][thread];
        partial[column] = sum;
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      if (thread == 0) {
        shared.ring.free[at.index()].arrive();
        shared.w_ring.free[w_at.index()].arrive();
      }
    }

    // 64 columns of dx at a time. Of a matrix of 8 x 8, a lane has a pair in a row, as SM90_U32x4_STSM_N writes it.
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < kK / kBox; ++box) {
      if (box * kBox >= p.k) break;
      if (thread == 0) tma_store_wait<0>();
      sync();
      const int row = warp * 16 + lane % 16;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBox / 16; ++i) {
        const int first = (box * kBox / 16 + i) * 4, piece = (2 * i + lane / 16) ^ (row % 8);
        SM90_U32x4_STSM_N::copy(word(first), word(first + 1), word(first + 2), word(first + 3),
                                *reinterpret_cast<uint128_t*>(result.dx.data() + row * kBox + piece * 8));
      }
      cutlass::arch::fence_view_async_shared();
      sync();
      if (thread == 0) p.dx.store(result.dx.data(), tile * kWarpgroups + warpgroup, box);
    }
    if (thread == 0) tma_store_wait<0>();
    sync();
  }
}

/// dz = F::backward(grad, y), dx = dz @ w, and dbias, dz summed over the rows before it is rounded, or null. Sums are
/// in float32; the same arguments give the same bits on the same kind of device.
template <class F>
struct InputGradients {
  template <Element element, GradientTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = InputGradientsKernel<F, T, tiling>;
    using Launch = Persistent<Kernel>;

    static Status prepare(const GradientProblem& p, int64_t& workspace_bytes) {
      if (p.k > Kernel::kK) return Status::not_for_me();
      int count = 0;
      const cudaError_t error = Launch::resident(divided(p.m, Kernel::kHeight), count);
      workspace_bytes = p.dbias == nullptr ? 0 : int64_t{4} * count * Kernel::kWarpgroups * p.n;
      return Status::of(error);
    }

    static Status run(const GradientProblem& p, cudaStream_t stream) {
      auto* const partial = p.dbias == nullptr ? nullptr : static_cast<float*>(p.workspace);
      int64_t sums = 0;
      const auto fill = [&](auto& parameters, TileMaps& maps, int blocks) {
        maps(parameters.grad, p.grad, p.m, p.n);
        maps(parameters.y, p.y, p.m, p.n);
        maps(parameters.w, p.w, p.n, p.k);
        maps(parameters.dz, p.dz, p.m, p.n);
        maps(parameters.dx, {p.dx, p.k}, p.m, p.k);
        parameters.partial = partial;
        parameters.m = p.m;
        parameters.n = p.n;
        parameters.k = p.k;
        sums = int64_t{blocks} * Kernel::kWarpgroups;
      };
      const Status status = Launch::run(divided(p.m, Kernel::kHeight), stream, fill);
      if (!status.done() || p.dbias == nullptr) return status;
      launch_column_sum<T, float, 1, 32, 32>(partial, static_cast<T*>(p.dbias), nullptr, sums, p.n, p.n, p.n, stream);
      return Status::of(cudaGetLastError());
    }
  };
};

}  // namespace torchops::cuda::gemm
