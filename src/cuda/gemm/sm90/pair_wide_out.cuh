#pragma once

// The output step of a triangle update with more than 128 features or channels: computes what pair_out.cuh does, with
// products like those of wide.cuh. A tile has two sums, of o and then of x, each with its weight:
//
//   load warp     64 channels of o with 64 columns of the projection, then 64 features of x with as many of the
//                 gate -> a stage of shared memory, by TMA, several ahead
//   warpgroups    half of a tile's positions each
//
// The CTAs of a cluster have the same columns. Each loads a part of a weight that both need.

#include "cuda/gemm/sm90/pair_wide.cuh"

namespace torchops::cuda::gemm {

template <class Element_, class Gate>
struct WidePairOutKernel {
  using Element = Element_;
  static constexpr int kM = 2 * kPairRows, kN = 128, kK = 64, kRows = kPairRows, kCluster = 2, kWarpgroups = 2;
  static constexpr int kProducts = 2, kThreads = 128 * (kWarpgroups + 1), kRowsOfW = kN / kCluster;
  static constexpr bool kPingPong = false;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kStageBytes = (kM + kN) * kK * kSize;
  static constexpr Exactness kExactness =
      std::is_same_v<Element, cutlass::bfloat16_t> ? Exactness::kCoarse : Exactness::kFast;

  struct Epilogue {
    struct Shared {
      cute::array_aligned<Element, kRows * kN, 1024> results;
      alignas(16) ColumnTerms terms[kProducts][kN];
    };
    CUTLASS_DEVICE static void init(Shared&) {}
  };
  static constexpr int kEpilogueBytes = static_cast<int>(sizeof(typename Epilogue::Shared));
  static constexpr int kStages = (226 * 1024 - kWarpgroups * kEpilogueBytes) / kStageBytes;
  using PipelineState = cutlass::PipelineState<kStages>;

  struct Stage {
    cute::array_aligned<Element, kM * kK, 1024> a;  // rows of positions of x, or of channels of o
    cute::array_aligned<Element, kN * kK, 1024> w;
  };
  struct Shared {
    Stage stages[kStages];
    typename Epilogue::Shared epilogue[kWarpgroups];
    cutlass::arch::ClusterTransactionBarrier loaded[kStages];
    cutlass::arch::ClusterBarrier free[kStages];
  };
  static_assert(sizeof(Shared) <= 227 * 1024);

  struct Parameters {
    PlaneMap<cute::SM90_TMA_LOAD, Element, kM, kK> a;
    PlaneMap<cute::SM90_TMA_LOAD, Element, kK, kM> o;
    PlaneMap<cute::SM90_TMA_STORE, Element, kRows, kN> out;
    TileMap<cute::SM90_TMA_LOAD_MULTICAST, Element, kRowsOfW, kK> w[kProducts];  // the projection, the gate
    const ColumnTerms* terms[kProducts];
    const ScaleAndShift *of_o, *of_x;
    int64_t of_x_row_stride, of_x_stride;
    int n, in_row, steps[kProducts];
    int rows, columns;  // of the grid of cluster tiles
  };

  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kN>, cute::Int<kK>>;
  using OfChannels = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape, cute::GMMA::Major::MN, cute::GMMA::Major::K>()));
  using OfRows = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape, cute::GMMA::Major::K, cute::GMMA::Major::K>()));

  CUTLASS_DEVICE static int rank() { return static_cast<int>(cute::block_rank_in_cluster()); }
  CUTLASS_DEVICE static int first() { return static_cast<int>(blockIdx.x) / kCluster; }
  CUTLASS_DEVICE static int clusters() { return static_cast<int>(gridDim.x) / kCluster; }

  /// Where this CTA's tile is. The columns of a row are consecutive, so that x and o are read from memory only once.
  /// Past the last row of tiles there is a nonexistent plane, which is read as zeros and not written.
  struct Place {
    int plane, place, column;

    CUTLASS_DEVICE Place(const Parameters& p, int tile) {
      const int row = tile / p.columns * kCluster + rank();
      plane = row / p.in_row;
      place = row % p.in_row;
      column = tile % p.columns;
    }
  };

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    const int rank = WidePairOutKernel::rank();
    PipelineState at;
    for (int tile = first(); tile < p.rows * p.columns; tile += clusters()) {
      const Place place(p, tile);
      for (int product = 0; product < kProducts; ++product) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = 0; step < p.steps[product]; ++step, ++at) {
          Stage& stage = shared.stages[at.index()];
          auto& loaded = shared.loaded[at.index()];
          shared.free[at.index()].wait(at.phase() ^ 1);  // doesn't block in the first round
          loaded.arrive_and_expect_tx(kStageBytes);
          if (product == 0) {
            p.o.load(stage.a.data(), step, place.place, place.plane, loaded);
          } else {
            p.a.load(stage.a.data(), place.place, step, place.plane, loaded);
          }
          p.w[product].load(stage.w.data() + rank * kRowsOfW * kK, place.column * kCluster + rank, step, loaded,
                            (1 << kCluster) - 1);
        }
      }
    }
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);
};

template <class Element, class Gate>
CUTLASS_DEVICE void WidePairOutKernel<Element, Gate>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  using Tile = cute::Shape<Int<kRows>, Int<kN>>;
  const int thread = threadIdx.x % 128;
  auto& epilogue = shared.epilogue[warpgroup];
  OfChannels of_channels;
  OfRows of_rows;
  const auto slice_o = of_channels.get_slice(thread);
  const auto slice_x = of_rows.get_slice(thread);
  Tensor y = partition_fragment_C(of_channels, Tile{});
  Tensor t = make_fragment_like(y);
  const Tensor places = slice_x.partition_C(make_identity_tensor(Tile{}));
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, of_rows);
  const auto write_slice = write.get_slice(thread);
  Tensor to_results = write_slice.partition_D(as_position_independent_swizzle_tensor(
      make_tensor(make_smem_ptr(epilogue.results.data()), SwizzledRows<Element, kRows, kN>{})));
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  // Signals all CTAs that load for this one; one thread for each.
  const auto release = [&](int stage) {
    if (thread < kCluster) shared.free[stage].arrive(thread);
  };

  PipelineState at;
  for (int tile = first(); tile < p.rows * p.columns; tile += clusters()) {
    const Place place(p, tile);
    ColumnTerms terms[kProducts];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kProducts; ++i) terms[i] = p.terms[i][place.column * kN + thread];
    ScaleAndShift of_o[2], of_x[2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int position = place.place * kM + warpgroup * kRows + thread / 32 * 16 + thread % 32 / 4 + i * 8;
      of_o[i] = of_x[i] = {0.f, 0.f};
      if (place.plane >= p.n || position >= p.n) continue;
      of_o[i] = p.of_o[int64_t{place.plane} * p.n + position];
      of_x[i] = p.of_x[place.plane * p.of_x_row_stride + position * p.of_x_stride];
    }

    int former = -1;
    const auto multiply = [&](auto& product, const auto& slice, auto& sums, int steps, auto layout_of_a) {
      product.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < steps; ++step, ++at) {
        Stage& stage = shared.stages[at.index()];
        shared.loaded[at.index()].wait(at.phase());
        const Tensor a = slice.make_fragment_A(
            slice.partition_A(make_tensor(make_smem_ptr(stage.a.data() + warpgroup * kRows * kK), layout_of_a)));
        const Tensor w = slice.make_fragment_B(
            slice.partition_B(make_tensor(make_smem_ptr(stage.w.data()), SwizzledRows<Element, kN, kK>{})));
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < size<2>(a); ++block) {
          cute::gemm(product, a(_, _, block), w(_, _, block), sums);
          product.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        if (former >= 0) {
          warpgroup_wait<1>();
          release(former);
        }
        former = at.index();
      }
    };
    warpgroup_fence_operand(y);
    warpgroup_fence_operand(t);
    multiply(of_channels, slice_o, y, p.steps[0], SwizzledTransposed<Element, kK, kRows>{});
    multiply(of_rows, slice_x, t, p.steps[1], SwizzledRows<Element, kRows, kK>{});
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kProducts; ++i) epilogue.terms[i][thread] = terms[i];
    if (thread == 0) tma_store_wait<0>();  // the store of the previous results
    sync();
    warpgroup_wait<0>();
    warpgroup_fence_operand(y);
    warpgroup_fence_operand(t);
    release(former);

    Tensor result = make_tensor_like<Element>(y);
    const cutlass::NumericArrayConverter<Element, float, 2> to_element;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(y); i += 2) {  // pairs of neighbouring columns, alternating between two rows
      const int column = get<1>(places(i)), of_thread = i / 2 % 2;
      const float4 projected = *reinterpret_cast<const float4*>(&epilogue.terms[0][column]);
      const float4 gates = *reinterpret_cast<const float4*>(&epilogue.terms[1][column]);
      const ScaleAndShift by_o = of_o[of_thread], by_x = of_x[of_thread];
      cutlass::Array<float, 2> values;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 2; ++v) {
        const float value =
            fmaf(by_o.scale, y(i + v),
                 fmaf(by_o.shift, v == 0 ? projected.x : projected.z, v == 0 ? projected.y : projected.w));
        const float gate = fmaf(Gate::kScale * by_x.scale, t(i + v),
                                fmaf(by_x.shift, v == 0 ? gates.x : gates.z, v == 0 ? gates.y : gates.w));
        values[v] = value * Gate::template of_scaled<kExactness>(gate);
      }
      pairs(i / 2) = to_element(values);
    }
    copy(write, write_slice.retile_S(result), to_results);
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread == 0) {
      p.out.store(epilogue.results.data(), place.place * kWarpgroups + warpgroup, place.column, place.plane);
    }
  }
  if (thread == 0) tma_store_wait<0>();
}

constexpr int kChannelGroups = 8;  // per block; they share its positions

/// The moments of n x n positions over d channels. A thread has 8 positions of a row, for the channels of its group.
template <class T>
__global__ void __launch_bounds__(32 * kChannelGroups)
    channel_moments_kernel(const T* o, int64_t channel_stride, int64_t row_stride, int n, int d, float eps,
                           ScaleAndShift* to) {
  using Piece = cutlass::AlignedArray<T, 8>;
  constexpr int positions = 32 * 8;
  __shared__ float2 partial[kChannelGroups][positions];
  __shared__ float origins[positions];
  const int lane = threadIdx.x, group = threadIdx.y, first = static_cast<int>(blockIdx.x) * positions;
  const cutlass::NumericArrayConverter<float, T, 8> widen;
  const T* const row = o + int64_t{blockIdx.y} * row_stride;
  float sums[8] = {}, squares[8] = {};
  const int at = first + lane * 8;
  if (at < n) {  // rows are padded to a multiple of 8
    const auto origin = widen(*reinterpret_cast<const Piece*>(row + at));
#pragma unroll 8
    for (int channel = group; channel < d; channel += kChannelGroups) {
      const auto values = widen(*reinterpret_cast<const Piece*>(row + channel * channel_stride + at));
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const float difference = values[v] - origin[v];
        sums[v] += difference;
        squares[v] = fmaf(difference, difference, squares[v]);
      }
    }
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      partial[group][v * 32 + lane] = make_float2(sums[v], squares[v]);
      if (group == 0) origins[v * 32 + lane] = origin[v];
    }
  }
  __syncthreads();
  const int thread = group * 32 + lane, position = first + thread, place = thread % 8 * 32 + thread / 8;
  if (position >= n) return;
  float sum = 0.f, square = 0.f;
#pragma unroll
  for (int i = 0; i < kChannelGroups; ++i) {
    sum += partial[i][place].x;
    square += partial[i][place].y;
  }
  to[int64_t{blockIdx.y} * n + position] = ScaleAndShift::of(origins[place], sum, square, d, eps);
}

/// The same as PairOut, for any c and d, but not in place of x. Reads the moments of x.
template <class Gate>
struct WidePairOut {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = WidePairOutKernel<T, Gate>;
    using Launch = WideLaunch<Kernel>;
    static_assert(kSpec<tiling>.tile_m == Kernel::kM && kSpec<tiling>.tile_n == Kernel::kN);

    static int padded_features(const PairProblem& p) { return Launch::divided(p.c, Kernel::kN) * Kernel::kN; }

    // The projection and the gate, their terms, and the moments of o.
    struct Scratch {
      T* weights[2];
      ColumnTerms* terms[2];
      ScaleAndShift* moments;
      Scratch(Workspace& workspace, const PairProblem& p)
          : weights{workspace.take<T>(int64_t{padded_features(p)} * p.d),
                    workspace.take<T>(int64_t{padded_features(p)} * p.c)},
            terms{workspace.take<ColumnTerms>(padded_features(p)), workspace.take<ColumnTerms>(padded_features(p))},
            moments(workspace.take<ScaleAndShift>(int64_t{p.n} * p.n)) {}
    };

    static Status prepare(const PairProblem& p, int64_t& workspace_bytes) {
      Workspace workspace(nullptr);
      const Scratch scratch(workspace, p);
      workspace_bytes = workspace.bytes();
      return p.moments == nullptr || p.adds ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const PairProblem& p, cudaStream_t stream) {
      Workspace workspace(p.workspace);
      const Scratch scratch(workspace, p);
      FoldedWeights<T, 2> all{};
      for (int i = 0; i < 2; ++i) {
        const Layer& layer = i == 0 ? p.value[0] : p.gate[0];
        const Norm& norm = i == 0 ? p.norm_o : p.norm_x;
        all.of[i] = {static_cast<const T*>(layer.weight.data),
                     static_cast<const T*>(layer.bias),
                     static_cast<const T*>(norm.weight),
                     static_cast<const T*>(norm.bias),
                     layer.weight.row_stride,
                     p.c,
                     padded_features(p),
                     i == 0 ? p.d : p.c,
                     i == 0 ? 1.f : Gate::kScale,
                     scratch.weights[i],
                     scratch.terms[i]};
      }
      const Operand o{p.channels[0], p.row_stride, p.channel_stride}, out{p.out, p.out_row_stride, p.out_stride};
      bool encoded =
          are_encodable<T>(p.x, o, out, Operand{scratch.weights[0], p.d, 0}, Operand{scratch.weights[1], p.c, 0});
      typename Launch::Parameters parameters{};
      parameters.a = decltype(parameters.a)::of(p.x.data, p.x.row_stride, p.x.batch_stride, p.n, p.c, p.n);
      parameters.o = decltype(parameters.o)::of(o.data, p.channel_stride, p.row_stride, p.d, p.n, p.n);
      parameters.out = decltype(parameters.out)::of(p.out, p.out_row_stride, p.out_stride, p.n, p.c, p.n);
      for (int i = 0; i < 2; ++i) {
        const auto& f = all.of[i];
        parameters.w[i] = std::remove_reference_t<decltype(parameters.w[0])>::of(f.to, f.k, f.padded, f.k);
        parameters.terms[i] = f.terms;
        parameters.steps[i] = Launch::divided(f.k, Kernel::kK);
      }
      if (!encoded || !are_encoded(parameters.o.map, parameters.out.map)) return Status::of(cudaErrorInvalidValue);
      parameters.of_o = scratch.moments;
      parameters.of_x = static_cast<const ScaleAndShift*>(p.moments);
      parameters.of_x_row_stride = p.moments_row_stride;
      parameters.of_x_stride = p.moments_stride;
      parameters.n = p.n;
      parameters.in_row = Launch::divided(p.n, Kernel::kM);
      parameters.rows = Launch::divided(p.n * parameters.in_row, Kernel::kCluster);
      parameters.columns = Launch::divided(p.c, Kernel::kN);
      const dim3 blocks(static_cast<unsigned>(Launch::divided(p.n, 32 * 8)), static_cast<unsigned>(p.n));
      channel_moments_kernel<T><<<blocks, dim3(32, kChannelGroups), 0, stream>>>(
          static_cast<const T*>(o.data), p.channel_stride, p.row_stride, p.n, p.d, p.norm_o.eps, scratch.moments);
      launch_fold_weights(all, stream);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
      return Status::of(Launch::run(parameters, stream));
    }
  };
};

}  // namespace torchops::cuda::gemm
