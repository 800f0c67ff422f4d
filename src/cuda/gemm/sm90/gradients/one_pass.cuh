#pragma once

// All gradients of y = F(x @ w.T + bias) in one pass over the rows, for few columns.
//
// With one pass for dz and two GEMMs, backward would read or write m rows seven times: grad, y and dz, dz and dx, dz
// and x. With so few columns, this takes all of its time. Here a CTA keeps w in shared memory and its sums of dw in
// registers, so that a tile of rows passes through once: grad, y and x in, dx out.
//
//   load warp    grad, y, x -> a stage of shared memory, by TMA, several stages ahead
//   consumers    dz, written over grad;  dx = dz @ w, written over y (over x where k > n);
//                dw += dz.T @ x;  dbias += dz
//   store warp   dx -> device memory, by TMA; then the stage is free
//
// At the end each CTA writes its dw and dbias, and a second kernel adds them in the order of the CTAs. TMA reads zeros
// beyond the matrices, and does not store there.

#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>

#include "cuda/gemm/sm90/gradients/cotangent_tile.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"
#include "cuda/gemm/sm90/weight_sums.cuh"

namespace torchops::cuda::gemm {

/// Compile-time parameters of the kernel. F is an activation whose backward needs only its output.
template <class F_, class Element_, GradientTiling tiling>
struct OnePassKernel {
  using F = F_;
  using Element = Element_;
  static constexpr int kRows = 64, kN = kSpec<tiling>.most_n, kK = kSpec<tiling>.most_k;
  static constexpr int kWarpgroups = kSpec<tiling>.consumers;
  static constexpr int kConsumers = 128 * kWarpgroups;
  // The sums of dw need more registers than a thread gets by default; whole warpgroups give and take them.
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160, kOtherRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kStageBytes = kRows * (2 * kN + kK) * static_cast<int>(sizeof(Element));
  static constexpr int kWeightBytes = kN * kK * static_cast<int>(sizeof(Element));
  static constexpr int kStages = (kMostSharedBytes - 1024 - kWeightBytes) / kStageBytes;
  static constexpr bool kResultOverY = kK <= kN;
  using Stages = Ring<kStages, /*releases=*/1>;

  template <int rows, int columns>
  using Rows = SwizzledRows<Element, rows, columns>;
  template <int rows, int columns>
  using Transposed = SwizzledTransposed<Element, rows, columns>;

  /// The warpgroups divide dx by its columns and dw by its rows.
  template <int m, int n, int k, cute::GMMA::Major major_a>
  using Product = decltype(cute::GMMA::ss_op_selector<Element, Element, float,
                                                      cute::Shape<cute::Int<m>, cute::Int<n>, cute::Int<k>>, major_a,
                                                      cute::GMMA::Major::MN>());
  using Division = cute::Int<kWarpgroups>;
  using ProductX = decltype(cute::make_tiled_mma(Product<kRows, kK / kWarpgroups, kN, cute::GMMA::Major::K>{},
                                                 cute::Layout<cute::Shape<cute::_1, Division, cute::_1>>{}));
  using ProductW = decltype(cute::make_tiled_mma(Product<kN, kK, kRows, cute::GMMA::Major::MN>{},
                                                 cute::Layout<cute::Shape<Division, cute::_1, cute::_1>>{}));

  using Cotangent = CotangentTile<F, Element, kRows, kN, kConsumers>;
  static constexpr int kVector = Cotangent::kVector;

  struct Shared {
    struct Stage {
      cute::array_aligned<Element, kRows * kN, 1024> grad, y;
      cute::array_aligned<Element, kRows * kK, 1024> x;
    };
    cute::array_aligned<Element, kN * kK, 1024> w;
    Stage stages[kStages];
    LoadBarrier<> w_loaded;
    Stages ring;
    Barrier<kConsumers> computed[kStages];

    CUTLASS_DEVICE void init() { init_barriers(w_loaded, ring, computed); }
  };
  static_assert(kStages >= 2);

  template <int rows, int columns>
  using Load = TileMap<cute::SM90_TMA_LOAD, Element, rows, columns>;
  struct Parameters {
    Load<kRows, kN> grad, y;
    Load<kRows, kK> x;
    Load<kN, kK> w;
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kK> dx;
    float* partial;
    int m, n, k;

    CUTLASS_DEVICE int tiles() const { return divided(m, kRows); }
  };

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    const int tiles = p.tiles();
    shared.w_loaded.arrive_and_expect_tx(kWeightBytes);
    p.w.load(shared.w.data(), 0, 0, shared.w_loaded);
    typename Stages::At at;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++at) {
      auto& stage = shared.stages[at.index()];
      auto& loaded = shared.ring.fill(at, kStageBytes);
      p.grad.load(stage.grad.data(), tile, 0, loaded);
      p.y.load(stage.y.data(), tile, 0, loaded);
      p.x.load(stage.x.data(), tile, 0, loaded);
    }
  }

  CUTLASS_DEVICE static void store(const Parameters& p, Shared& shared) {
    const int tiles = p.tiles();
    typename Stages::At at;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++at) {
      auto& stage = shared.stages[at.index()];
      shared.computed[at.index()].wait(at.phase());
      p.dx.store(kResultOverY ? stage.y.data() : stage.x.data(), tile, 0);
      cute::tma_store_wait<0>();
      shared.ring.free[at.index()].arrive();
    }
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared);

  static constexpr int kCluster = 1;
  using Roles = gemm::Roles<Warpgroups<kWarpgroups, kConsumerRegisters, compute>,
                            Warps<kOtherRegisters, OneThread<load>, OneThread<store>>>;
};

/// Writes the sums of dbias of all consumers, added in the order of their rows, to `to`. scratch has room
/// for kVector floats per consumer.
template <class Tiling>
CUTLASS_DEVICE void write_bias_sums(const float (&sums)[Tiling::kVector], float* scratch, float* to, int n,
                                    int thread) {
  constexpr int count = Tiling::kVector, height = Tiling::kConsumers * count / Tiling::kN;
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < count; ++v) scratch[thread * count + v] = sums[v];
  cutlass::arch::NamedBarrier::sync(Tiling::kConsumers, 1);
  if (thread >= n) return;
  float sum = 0.f;
  for (int row = 0; row < height; ++row) sum += scratch[row * Tiling::kN + thread];
  to[thread] = sum;
}

template <class F, class Element, GradientTiling tiling>
CUTLASS_DEVICE void OnePassKernel<F, Element, tiling>::compute(const Parameters& p, Shared& shared) {
  using namespace cute;
  constexpr int rows = kRows, n = kN, k = kK;
  const int thread = threadIdx.x, tiles = p.tiles();
  // The same for all of a warpgroup, as descriptors must be; the shuffle tells the compiler.
  const int leader = __shfl_sync(~0u, thread / 128, 0) * 128;

  ProductX product_x;
  ProductW product_w;
  const auto slice_x = product_x.get_slice(leader);
  const auto slice_w = product_w.get_slice(leader);
  Tensor sums_x = partition_fragment_C(product_x, Shape<Int<rows>, Int<k>>{});
  Tensor sums_w = partition_fragment_C(product_w, Shape<Int<n>, Int<k>>{});
  const Tensor weight = make_tensor(make_smem_ptr(shared.w.data()), Transposed<n, k>{});  // (k, n)
  const Tensor b_x = slice_x.make_fragment_B(slice_x.partition_B(weight));
  const auto write_result = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_x);
  const auto write_slice = write_result.get_slice(thread);
  clear(sums_w);
  float sums_b[kVector] = {};

  shared.w_loaded.wait(0);
  typename Stages::At at;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++at) {
    auto& stage = shared.stages[at.index()];
    shared.ring.wait_until_loaded(at);
    Cotangent::make(stage.grad.data(), stage.y.data(), sums_b, thread);
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kConsumers, 0);

    const auto dz = make_smem_ptr(stage.grad.data());
    const Tensor a_x = slice_x.make_fragment_A(slice_x.partition_A(make_tensor(dz, Rows<rows, n>{})));
    const Tensor a_w = slice_w.make_fragment_A(slice_w.partition_A(make_tensor(dz, Transposed<rows, n>{})));
    const Tensor b_w =
        slice_w.make_fragment_B(slice_w.partition_B(make_tensor(make_smem_ptr(stage.x.data()), Transposed<rows, k>{})));
    warpgroup_fence_operand(sums_x);
    warpgroup_fence_operand(sums_w);
    warpgroup_arrive();
    product_x.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(a_x); ++block) {
      cute::gemm(product_x, a_x(_, _, block), b_x(_, _, block), sums_x);
      product_x.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(a_w); ++block) {
      cute::gemm(product_w, a_w(_, _, block), b_w(_, _, block), sums_w);
    }
    warpgroup_commit_batch();

    if constexpr (kResultOverY) {
      warpgroup_wait<1>();  // dx is stored while the products of dw run
      warpgroup_fence_operand(sums_x);
    } else {
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums_x);
      cutlass::arch::NamedBarrier::sync(kConsumers, 0);  // until all warpgroups are done with x
    }
    Tensor result = make_tensor_like<Element>(sums_x);
    const cutlass::NumericArrayConverter<Element, float, decltype(size(sums_x))::value> round;
    recast<cutlass::Array<Element, decltype(size(sums_x))::value>>(result)(0) =
        round(recast<cutlass::Array<float, decltype(size(sums_x))::value>>(sums_x)(0));
    const Tensor to = make_tensor(make_smem_ptr(kResultOverY ? stage.y.data() : stage.x.data()), Rows<rows, k>{});
    copy(write_result, write_slice.retile_S(result),
         write_slice.partition_D(as_position_independent_swizzle_tensor(to)));
    cutlass::arch::fence_view_async_shared();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums_w);
    shared.computed[at.index()].arrive();
  }

  float* const partial = p.partial + int64_t{blockIdx.x} * (p.n * p.k + p.n);
  const Tensor places = product_w.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<n>, Int<k>>{}));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(sums_w); i += 2) {  // a thread has pairs of neighbouring columns
    const auto [row, column] = places(i);
    if (row < p.n && column < p.k) {
      *reinterpret_cast<float2*>(partial + row * p.k + column) = make_float2(sums_w(i), sums_w(i + 1));
    }
  }
  // Once all consumers are here, no product reads w any more.
  cutlass::arch::NamedBarrier::sync(kConsumers, 0);
  write_bias_sums<OnePassKernel>(sums_b, reinterpret_cast<float*>(shared.w.data()), partial + p.n * p.k, p.n, thread);
}

/// dx = dz @ w, dw = dz.T @ x, and dbias = dz summed over the rows before it is rounded, where dz =
/// F::backward(grad, y), rounded to the type of the arguments. Sums are in float32; the same arguments give the same
/// bits on the same kind of device.
template <class F>
struct OnePass {
  template <Element element, GradientTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = OnePassKernel<F, T, tiling>;
    using Launch = Persistent<Kernel>;

    static Status prepare(const GradientProblem& p, int64_t& workspace_bytes) {
      if (p.n > kSpec<tiling>.most_n || p.k > kSpec<tiling>.most_k) return Status::not_for_me();
      int count = 0;
      const cudaError_t error = Launch::resident(divided(p.m, Kernel::kRows), count);
      workspace_bytes = int64_t{4} * count * columns_of_sums(p);
      return Status::of(error);
    }

    static Status run(const GradientProblem& p, cudaStream_t stream) {
      int count = 0;
      const auto fill = [&](auto& parameters, TileMaps& maps, int blocks) {
        maps(parameters.grad, p.grad, p.m, p.n);
        maps(parameters.y, p.y, p.m, p.n);
        maps(parameters.x, p.x, p.m, p.k);
        maps(parameters.w, p.w, p.n, p.k);
        maps(parameters.dx, {p.dx, p.k}, p.m, p.k);
        parameters.partial = static_cast<float*>(p.workspace);
        parameters.m = p.m;
        parameters.n = p.n;
        parameters.k = p.k;
        count = blocks;
      };
      const Status status = Launch::run(divided(p.m, Kernel::kRows), stream, fill);
      return status.done() ? add_up<T, 1>(p, count, stream) : status;
    }
  };
};

}  // namespace torchops::cuda::gemm
