#pragma once

// Two products of the same rows, joined by a rule in registers, for sums of any length (narrow.cuh: few features).
//
// A tile of both weights lies in shared memory as one operand: tile_n rows of b, and behind them the same rows of b2.
// One matrix instruction makes both products, and a thread has column j of the one and column j of the other, so
// nothing but the result leaves the CTA:
//
//   load warp     tiles of a, b and b2, 64 columns of each -> a stage of shared memory, by TMA, several ahead
//   warpgroups    kCooperative: half of a tile's rows each; kPingPong: a tile each, in turn, so that while one computes
//                 its rule, the matrix instructions of the other run
//
// The CTAs of a cluster lie side by side. Each loads a part of the rows that all of them need, and TMA delivers it to
// all of them.

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "cuda/gemm/sm90/rules.cuh"
#include "cuda/gemm/sm90/tma.cuh"
#include "cuda/per_device.h"

namespace torchops::cuda::gemm {

/// What the kernel needs at compile time.
template <class Rule_, class Element_, Tiling tiling>
struct WideKernel {
  using Rule = Rule_;
  using Element = Element_;
  static constexpr TilingSpec kTiling = kSpec<tiling>;
  static constexpr bool kPingPong = kTiling.schedule == Schedule::kPingPong;
  static constexpr int kM = kTiling.tile_m, kN = kTiling.tile_n, kK = 64, kCluster = kTiling.cluster_n;
  static constexpr int kWarpgroups = 2, kThreads = 128 * (kWarpgroups + 1);  // of the last warpgroup, one thread works
  static constexpr int kRows = kPingPong ? kM : kM / kWarpgroups;            // of a warpgroup
  static constexpr int kRowsOfA = kM / kCluster;                             // that a CTA loads for its cluster
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kStageBytes = (kM + 2 * kN) * kK * kSize;
  static constexpr int kRoom = 226 * 1024 - kWarpgroups * kN * (kRows * kSize + 2 * static_cast<int>(sizeof(float)));
  static constexpr int kStages = kRoom / kStageBytes;
  static constexpr Exactness kExactness =
      std::is_same_v<Element, cutlass::bfloat16_t> ? Exactness::kCoarse : Exactness::kFast;
  static_assert(Rule::kProducts == 2 && !Rule::kReadsC && kSize == 2 && kRows % 64 == 0 && kN % 64 == 0);
  static_assert(kRows * kN <= 64 * 128, "the sums of both products are 128 registers of a thread");
  static_assert(kTiling.cluster_m == 1 && kTiling.epilogue_n == kN && kTiling.resident_k == 0 && kTiling.stages == 0);
  using PipelineState = cutlass::PipelineState<kStages>;
  using Barrier = cutlass::arch::ClusterBarrier;
  using LoadBarrier = cutlass::arch::ClusterTransactionBarrier;

  struct Stage {
    cute::array_aligned<Element, kM * kK, 1024> a;
    cute::array_aligned<Element, 2 * kN * kK, 1024> w;
  };
  struct Shared {
    Stage stages[kStages];
    cute::array_aligned<Element, kRows * kN, 1024> result[kWarpgroups];
    alignas(16) float bias[kWarpgroups][2][kN];  // scaled as the rule wants it
    LoadBarrier loaded[kStages];
    Barrier free[kStages], turn[kWarpgroups];
  };
  static_assert(sizeof(Shared) <= 227 * 1024);

  using LoadOfA = std::conditional_t<(kCluster > 1), cute::SM90_TMA_LOAD_MULTICAST, cute::SM90_TMA_LOAD>;
  struct Parameters {
    TileMap<LoadOfA, Element, kRowsOfA, kK> a;
    TileMap<cute::SM90_TMA_LOAD, Element, kN, kK> w[2];
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kN> d;
    const Element* bias[2];
    int n, steps;
    int rows, columns;  // of the grid of the tiles of clusters
  };

  CUTLASS_DEVICE static int rank() { return kCluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0; }
  CUTLASS_DEVICE static int first() { return static_cast<int>(blockIdx.x) / kCluster; }
  CUTLASS_DEVICE static int clusters() { return static_cast<int>(gridDim.x) / kCluster; }

  /// In the grid of the tiles of CTAs.
  struct Place {
    int row, column;
  };

  /// Where this CTA's part of a cluster's tile is. Clusters take tiles in groups of rows, column after column, so that
  /// those that run at once share rows and columns in L2. With kPingPong, groups of 4096 rows are up to 2% faster than
  /// groups of 2048 (H100).
  CUTLASS_DEVICE static Place place(const Parameters& p, int tile) {
    constexpr int group = (kPingPong ? 4096 : 2048) / kM;
    const int in_group = group * p.columns, first = tile / in_group * group, at = tile % in_group;
    const int height = min(group, p.rows - first);
    return {first + at % height, at / height * kCluster + rank()};
  }

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    const int rank = WideKernel::rank();
    PipelineState at;
    for (int tile = first(); tile < p.rows * p.columns; tile += clusters()) {
      const Place place = WideKernel::place(p, tile);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < p.steps; ++step, ++at) {
        Stage& stage = shared.stages[at.index()];
        LoadBarrier& loaded = shared.loaded[at.index()];
        shared.free[at.index()].wait(at.phase() ^ 1);  // at once in the first round
        loaded.arrive_and_expect_tx(kStageBytes);
        p.a.load(stage.a.data() + rank * kRowsOfA * kK, place.row * kCluster + rank, step, loaded, (1 << kCluster) - 1);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) p.w[i].load(stage.w.data() + i * kN * kK, place.column, step, loaded);
      }
    }
  }

  template <int n>
  using ProductOf = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<n>, cute::Int<kK>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  using Product = ProductOf<2 * kN>;
  using Result = ProductOf<kN>;  // has a result's place in the thread that has its two sums

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);
};

template <class Rule, class Element, Tiling tiling>
CUTLASS_DEVICE void WideKernel<Rule, Element, tiling>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128;
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  // To all that load for this CTA, by a thread for each.
  const auto release = [&](int stage) {
    if constexpr (kCluster == 1) {
      if (thread == 0) shared.free[stage].arrive();
    } else {
      if (thread < kCluster) shared.free[stage].arrive(thread);
    }
  };
  Product product;
  const auto slice = product.get_slice(thread);
  Tensor sums = partition_fragment_C(product, Shape<Int<kRows>, Int<2 * kN>>{});
  const Result result_of;
  const Tensor places = result_of.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<kN>>{}));
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, result_of);
  const auto write_slice = write.get_slice(thread);
  auto& bias = shared.bias[warpgroup];

  PipelineState at;
  if (kPingPong && warpgroup > 0) at.advance(p.steps);
  uint32_t round = 0;
  for (int tile = first() + (kPingPong ? warpgroup : 0) * clusters(); tile < p.rows * p.columns;
       tile += (kPingPong ? kWarpgroups : 1) * clusters(), ++round) {
    const Place place = WideKernel::place(p, tile);
    float column_bias[2] = {0.f, 0.f};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int column = place.column * kN + thread;
      if (p.bias[i] != nullptr && thread < kN && column < p.n) {
        column_bias[i] = Rule::scale(i) * static_cast<float>(p.bias[i][column]);
      }
    }
    if constexpr (kPingPong) {
      // A barrier tells phases by their parity: who looks at a stage must have seen the phase before. The other
      // warpgroup has seen all of its stages when it passes the turn. The first waits for the other's former round.
      if (warpgroup > 0 || round > 0) shared.turn[warpgroup].wait((warpgroup > 0 ? round : round - 1) & 1);
    }
    int former = 0;
    product.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < p.steps; ++step, ++at) {
      Stage& stage = shared.stages[at.index()];
      shared.loaded[at.index()].wait(at.phase());
      if constexpr (kPingPong) {
        if (step == p.steps - 1 && thread == 0) shared.turn[1 - warpgroup].arrive();
      }
      const Tensor a = slice.make_fragment_A(
          slice.partition_A(make_tensor(make_smem_ptr(stage.a.data() + (kPingPong ? 0 : warpgroup) * kRows * kK),
                                        SwizzledRows<Element, kRows, kK>{})));
      const Tensor w = slice.make_fragment_B(
          slice.partition_B(make_tensor(make_smem_ptr(stage.w.data()), SwizzledRows<Element, 2 * kN, kK>{})));
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(a); ++block) {
        cute::gemm(product, a(_, _, block), w(_, _, block), sums);
        product.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      if (step > 0) {
        warpgroup_wait<1>();
        release(former);
      }
      former = at.index();
    }
    if (thread < kN) {
      bias[0][thread] = column_bias[0];
      bias[1][thread] = column_bias[1];
    }
    if (thread == 0) tma_store_wait<0>();  // of the former result
    sync();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release(former);
    if constexpr (kPingPong) at.advance(p.steps);

    Tensor result = make_tensor_like<Element>(partition_fragment_C(result_of, Shape<Int<kRows>, Int<kN>>{}));
    const cutlass::NumericArrayConverter<Element, float, 2> converted;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kN / 8; ++block) {  // a thread has pairs of neighbouring columns, of two rows in 16
      const int column = get<1>(places(make_coord(make_coord(0, 0, block), 0, 0)));
      const float2 value_bias = *reinterpret_cast<const float2*>(&bias[0][column]);
      const float2 gate_bias = *reinterpret_cast<const float2*>(&bias[1][column]);
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kRows / 64; ++m) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          cutlass::Array<float, 2> values;
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 2; ++v) {
            const float z = sums(make_coord(make_coord(v, r, block), m, 0));
            const float t = sums(make_coord(make_coord(v, r, block + kN / 8), m, 0));
            values[v] =
                Rule::template value<kExactness>(fmaf(Rule::scale(0), z, v == 0 ? value_bias.x : value_bias.y),
                                                 fmaf(Rule::scale(1), t, v == 0 ? gate_bias.x : gate_bias.y), 0.f);
          }
          pairs(make_coord(make_coord(0, r, block), m, 0)) = converted(values);
        }
      }
    }
    const Tensor to = as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(shared.result[warpgroup].data()), SwizzledRows<Element, kRows, kN>{}));
    copy(write, write_slice.retile_S(result), write_slice.partition_D(to));
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread == 0) {
      const int row = kPingPong ? place.row : place.row * kWarpgroups + warpgroup;
      p.d.store(shared.result[warpgroup].data(), row, place.column);
    }
  }
  if (thread == 0) tma_store_wait<0>();
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    wide_kernel(const __grid_constant__ typename Kernel::Parameters p) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(bytes);
  constexpr bool clustered = Kernel::kCluster > 1;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Kernel::kStages; ++stage) {
      shared.loaded[stage].init(1);
      shared.free[stage].init(Kernel::kCluster * (Kernel::kPingPong ? 1 : Kernel::kWarpgroups));
    }
    for (int warpgroup = 0; warpgroup < Kernel::kWarpgroups; ++warpgroup) shared.turn[warpgroup].init(1);
    cutlass::arch::fence_barrier_init();
  }
  clustered ? cute::cluster_sync() : __syncthreads();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= 4 * Kernel::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 4 * Kernel::kWarpgroups && cute::elect_one_sync()) Kernel::load(p, shared);
    __syncwarp();
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    Kernel::compute(p, shared, warp / 4);
  }
  if constexpr (clustered) cute::cluster_sync();  // the others may still write to this CTA's barriers
}

/// d = the rule's value of a @ b.T and a @ b2.T.
template <class Rule>
struct Wide {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = WideKernel<Rule, T, tiling>;

    static int divided(int size, int tile) { return size / tile + (size % tile != 0); }

    static cudaLaunchConfig_t config(int clusters, cudaStream_t stream, cudaLaunchAttribute& attribute) {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {Kernel::kCluster, 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(clusters * Kernel::kCluster);
      config.blockDim = dim3(Kernel::kThreads);
      config.dynamicSmemBytes = sizeof(typename Kernel::Shared);
      config.stream = stream;
      config.attrs = &attribute;
      config.numAttrs = 1;
      return config;
    }

    // As many clusters as run at once.
    static cudaError_t resident_clusters(int& clusters) {
      static PerDevice cache;
      return cache.get(clusters, [](int& answer) {
        const cudaError_t error =
            cudaFuncSetAttribute(reinterpret_cast<const void*>(wide_kernel<Kernel>),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(typename Kernel::Shared));
        if (error != cudaSuccess) return error;
        cudaLaunchAttribute attribute;
        const cudaLaunchConfig_t one = config(1, nullptr, attribute);
        return cudaOccupancyMaxActiveClusters(&answer, wide_kernel<Kernel>, &one);
      });
    }

    static Status prepare(const Problem& p, int64_t& workspace_bytes) {
      workspace_bytes = 0;
      int clusters = 0;
      if (p.batch > 1 || p.k == 0) return Status::not_for_me();
      if (const cudaError_t error = resident_clusters(clusters); error != cudaSuccess) return Status::of(error);
      return clusters > 0 ? Status{} : Status::not_for_me();
    }

    static Status run(const Problem& p, cudaStream_t stream) {
      using Parameters = typename Kernel::Parameters;
      if (!are_encodable<T>(p.a, p.b, p.b2, p.d)) return Status::of(cudaErrorInvalidValue);
      int clusters = 0;
      if (const cudaError_t error = resident_clusters(clusters); error != cudaSuccess) return Status::of(error);
      Parameters parameters{};
      parameters.a = decltype(Parameters::a)::of(p.a.data, p.a.row_stride, p.m, p.k);
      for (int i = 0; i < 2; ++i) {
        const Operand& b = i == 0 ? p.b : p.b2;
        parameters.w[i] = std::remove_reference_t<decltype(parameters.w[0])>::of(b.data, b.row_stride, p.n, p.k);
      }
      parameters.d = decltype(Parameters::d)::of(p.d.data, p.d.row_stride, p.m, p.n);
      parameters.bias[0] = static_cast<const T*>(p.bias);
      parameters.bias[1] = static_cast<const T*>(p.bias2);
      parameters.n = p.n;
      parameters.steps = divided(p.k, Kernel::kK);
      parameters.rows = divided(p.m, Kernel::kM);
      parameters.columns = divided(p.n, Kernel::kN * Kernel::kCluster);
      if (!are_encoded(parameters.a.map, parameters.w[0].map, parameters.w[1].map, parameters.d.map)) {
        return Status::of(cudaErrorInvalidValue);
      }
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t launch =
          config(std::min(clusters, parameters.rows * parameters.columns), stream, attribute);
      return Status::of(cudaLaunchKernelEx(&launch, wide_kernel<Kernel>, parameters));
    }
  };
};

}  // namespace torchops::cuda::gemm
