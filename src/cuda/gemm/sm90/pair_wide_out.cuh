#pragma once

// The output step of a triangle update with more than 128 features or channels: computes what pair_out.cuh does, with
// products like those of wide.cuh. A tile has two products, of x and then of o, each with its weight:
//
//   load warp     64 features of x with as many of the gate's weight, then 64 channels of o with as many of the
//                 projection's -> a stage of shared memory, by TMA, several ahead
//   warpgroups    half of a tile's positions each
//
// The gates are complete before the product of o begins, and wait for it as 16 bits each: so one product at a time has
// registers for its sums, and a tile has up to 256 columns. With 128, the traffic from the second-level cache limited
// the products. While they run, the threads that started them measure o in the same stages.
//
// The CTAs of a cluster have the same columns. Each loads a part of a weight that both need.

#include <cute/arch/copy_sm80.hpp>

#include "cuda/gemm/sm90/pair_wide.cuh"

namespace torchops::cuda::gemm {

/// Sums over channels, of which each warp of a warpgroup has a quarter, for 64 positions: two of each thread.
struct ChannelSums {
  using Partial = float2[4][kPairRows];  // of the warps
  float sums[2] = {}, squares[2] = {};

  /// Adds kChannels rows of positions; without an origin: see pair_norms.cuh.
  template <int kChannels, class Element>
  CUTLASS_DEVICE void add(const Element* tile, int thread) {
    const cutlass::NumericArrayConverter<float, Element, 2> widen;
    const int lane = thread % 32, first = swizzled_piece<kChannels>(thread / 32, lane / 4 * 8) + lane % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kChannels / 4; ++i) {  // of a warp, every fourth, so that two swizzles occur
      const Element* const at = tile + i * (4 * kPairRows) + (first ^ i % 2 * 32);
      const auto values = widen(*reinterpret_cast<const cutlass::Array<Element, 2>*>(at));
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 2; ++v) {
        sums[v] += values[v];
        squares[v] = fmaf(values[v], values[v], squares[v]);
      }
    }
  }
  CUTLASS_DEVICE void share(Partial& partial, int thread) const {
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 2; ++v) partial[thread / 32][thread % 32 * 2 + v] = make_float2(sums[v], squares[v]);
  }
  CUTLASS_DEVICE static ScaleAndShift moments(const Partial& partial, int position, int channels, float eps) {
    float2 sum = partial[0][position];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < 4; ++i) {
      sum.x += partial[i][position].x;
      sum.y += partial[i][position].y;
    }
    return ScaleAndShift::of(0.f, sum.x, sum.y, channels, eps);
  }
};

template <class Element_, class Gate, Tiling tiling>
struct WidePairOutKernel {
  using Element = Element_;
  static constexpr TilingSpec kTiling = kSpec<tiling>;
  static constexpr int kM = kTiling.tile_m, kN = kTiling.tile_n, kK = 64, kCluster = kTiling.cluster_m;
  static constexpr int kWarpgroups = 2, kRows = kPairRows, kProducts = 2, kRowsOfW = kN / kCluster;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr bool kPingPong = false;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kStageBytes = (kM + kN) * kK * kSize;
  static constexpr Exactness kExactness =
      std::is_same_v<Element, cutlass::bfloat16_t> ? Exactness::kCoarse : Exactness::kFast;
  static_assert(kM == kWarpgroups * kRows && kN % 64 == 0 && kTiling.cluster_n == 1 &&
                kTiling.schedule == Schedule::kCooperative);

  // A gate waits as a half, times this, so that those that are nearly closed are not denormal. At most 1 times this is
  // finite.
  static constexpr float kOfGates = 32768.f;

  struct Epilogue {
    struct Shared {
      alignas(16) ColumnTerms terms[kProducts][kN];
      ChannelSums::Partial partial;
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
    PlaneMap<cute::SM90_TMA_LOAD, Element, kM, kK> a;  // x
    PlaneMap<cute::SM90_TMA_LOAD, Element, kK, kM> o;
    TileMap<cute::SM90_TMA_LOAD_MULTICAST, Element, kRowsOfW, kK> w[kProducts];  // the gate, the projection
    const ColumnTerms* terms[kProducts];
    const ScaleAndShift* of_x;
    int64_t of_x_row_stride, of_x_stride;
    Element* out;
    int64_t out_row_stride, out_stride;
    float eps_o;
    int n, c, d, in_row, steps[kProducts];
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

  /// Where this CTA's tile is. A cluster takes the columns of a row one after another, so that x and o are read from
  /// memory only once; but the last rows, if they are too few for all clusters, are shared. Past the last row of tiles
  /// there is a nonexistent plane, which is read as zeros and not written.
  struct Place {
    int plane, place, column;

    CUTLASS_DEVICE Place(const Parameters& p, int tile) {
      const int in_group = clusters() * p.columns, first = tile / in_group * clusters(), at = tile % in_group;
      const int height = min(clusters(), p.rows - first), row = (first + at % height) * kCluster + rank();
      plane = row / p.in_row;
      place = row % p.in_row;
      column = at / height;
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
            p.a.load(stage.a.data(), place.place, step, place.plane, loaded);
          } else {
            p.o.load(stage.a.data(), step, place.place, place.plane, loaded);
          }
          p.w[product].load(stage.w.data() + rank * kRowsOfW * kK, place.column * kCluster + rank, step, loaded,
                            (1 << kCluster) - 1);
        }
      }
    }
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);
};

template <class Element, class Gate, Tiling tiling>
CUTLASS_DEVICE void WidePairOutKernel<Element, Gate, tiling>::compute(const Parameters& p, Shared& shared,
                                                                      int warpgroup) {
  using namespace cute;
  using Tile = cute::Shape<Int<kRows>, Int<kN>>;
  using Piece = cutlass::AlignedArray<Element, 8>;
  const int thread = threadIdx.x % 128;
  auto& epilogue = shared.epilogue[warpgroup];
  OfChannels of_channels;
  OfRows of_rows;
  const auto slice_o = of_channels.get_slice(thread);
  const auto slice_x = of_rows.get_slice(thread);
  Tensor sums = partition_fragment_C(of_rows, Tile{});
  Tensor gates = make_tensor_like<cutlass::half_t>(sums);
  // Of pairs of neighbouring columns of the accumulators, alternating between two rows.
  Tensor pairs_of_gates = recast<cutlass::Array<cutlass::half_t, 2>>(gates);
  const auto read_terms = [&](int product, int column) {
    if (thread >= kN / 2) return;
    SM80_CP_ASYNC_CACHEALWAYS<uint128_t>::copy(
        *reinterpret_cast<const uint128_t*>(p.terms[product] + column + thread * 2),
        *reinterpret_cast<uint128_t*>(&epilogue.terms[product][thread * 2]));
  };
  const auto terms_at = [&](int product, int block) {
    return *reinterpret_cast<const float4*>(&epilogue.terms[product][block * 8 + thread % 4 * 2]);
  };
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };
  // Signals all CTAs that load for this one; one thread for each.
  const auto release = [&](int stage) {
    if (thread < kCluster) shared.free[stage].arrive(thread);
  };

  PipelineState at;
  // One of the products, into `sums`. While they run: calls `begun`, and adds its stages to `measured`, unless that is
  // null.
  const auto multiply = [&](auto& product, const auto& slice, int i, auto layout_of_a, const auto& begun,
                            auto measured) {
    constexpr bool measures = std::is_same_v<decltype(measured), ChannelSums*>;
    int former = 0;
    product.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < p.steps[i]; ++step, ++at) {
      Stage& stage = shared.stages[at.index()];
      shared.loaded[at.index()].wait(at.phase());
      Element* const rows = stage.a.data() + warpgroup * kRows * kK;
      const Tensor a = slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(rows), layout_of_a)));
      const Tensor w = slice.make_fragment_B(
          slice.partition_B(make_tensor(make_smem_ptr(stage.w.data()), SwizzledRows<Element, kN, kK>{})));
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(a); ++block) {
        cute::gemm(product, a(_, _, block), w(_, _, block), sums);
        product.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      if (step == 0) {
        begun();
      } else {
        warpgroup_wait<1>();
        if constexpr (measures) sync();  // until all threads have read the stage
        release(former);
      }
      if constexpr (measures) measured->template add<kK>(rows, thread);
      former = at.index();
    }
    if constexpr (measures) measured->share(epilogue.partial, thread);
    cp_async_wait<0>();
    sync();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release(former);
  };

  for (int tile = first(); tile < p.rows * p.columns; tile += clusters()) {
    int plane = 0, position = 0, column = 0;  // of this thread's first row, and 8 positions after it another
    ScaleAndShift of_x[2] = {};
    // What one product shares with all threads, they have read before the other one's sync.
    const auto begin_tile = [&] {
      const Place place(p, tile);
      plane = place.plane;
      position = place.place * kM + warpgroup * kRows + thread / 32 * 16 + thread % 32 / 4;
      column = place.column * kN;
      read_terms(0, column);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (plane >= p.n || position + 8 * r >= p.n) continue;
        of_x[r] = p.of_x[plane * p.of_x_row_stride + (position + 8 * r) * p.of_x_stride];
      }
    };
    multiply(of_rows, slice_x, 0, SwizzledRows<Element, kRows, kK>{}, begin_tile, nullptr);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kN / 8; ++block) {
      const float4 terms = terms_at(0, block);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const ScaleAndShift by = of_x[r];
        const int i = block * 4 + r * 2;
        cutlass::Array<float, 2> values;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float t = fmaf(Gate::kScale * by.scale, sums(i + v),
                               fmaf(by.shift, v == 0 ? terms.x : terms.z, v == 0 ? terms.y : terms.w));
          values[v] = kOfGates * Gate::template of_scaled<kExactness>(t);
        }
        pairs_of_gates(i / 2) = cutlass::NumericArrayConverter<cutlass::half_t, float, 2>::convert(values);
      }
    }

    ChannelSums of_tile;
    multiply(
        of_channels, slice_o, 1, SwizzledTransposed<Element, kK, kRows>{}, [&] { read_terms(1, column); }, &of_tile);
    ScaleAndShift of_o[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      of_o[r] = ChannelSums::moments(epilogue.partial, position % kRows + 8 * r, p.d, p.eps_o);
    }
    column += thread % 4 * 8;
    Element* const out = p.out + plane * p.out_row_stride + position * p.out_stride + column;
    int left[2];  // columns of the two rows that exist, from `column` on
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) left[r] = plane < p.n && position + 8 * r < p.n ? p.c - column : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kN / 32; ++group) {
      Piece pieces[2];
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < 4; ++part) {
        const int block = group * 4 + part;
        const float4 terms = terms_at(1, block);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const ScaleAndShift by = of_o[r];
          const int i = block * 4 + r * 2;
          const auto gate = cutlass::NumericArrayConverter<float, cutlass::half_t, 2>::convert(pairs_of_gates(i / 2));
          cutlass::Array<float, 2> values;
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 2; ++v) {
            values[v] = gate[v] * fmaf(by.scale * (1.f / kOfGates), sums(i + v),
                                       fmaf(by.shift, v == 0 ? terms.x : terms.z, v == 0 ? terms.y : terms.w));
          }
          reinterpret_cast<cutlass::Array<Element, 2>*>(&pieces[r])[part] =
              cutlass::NumericArrayConverter<Element, float, 2>::convert(values);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (group * 32 < left[r]) *reinterpret_cast<Piece*>(out + r * (8 * p.out_stride) + group * 32) = pieces[r];
      }
    }
  }
}

/// The same as PairOut, for any c and d, but not in place of x. Reads the moments of x.
template <class Gate>
struct WidePairOut {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = WidePairOutKernel<T, Gate, tiling>;
    using Launch = WideLaunch<Kernel>;

    static int padded_features(const PairProblem& p) { return Launch::divided(p.c, Kernel::kN) * Kernel::kN; }

    // The gate and the projection, and their terms.
    struct Scratch {
      T* weights[2];
      ColumnTerms* terms[2];
      Scratch(Workspace& workspace, const PairProblem& p)
          : weights{workspace.take<T>(int64_t{padded_features(p)} * p.c),
                    workspace.take<T>(int64_t{padded_features(p)} * p.d)},
            terms{workspace.take<ColumnTerms>(padded_features(p)), workspace.take<ColumnTerms>(padded_features(p))} {}
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
        const Layer& layer = i == 0 ? p.gate[0] : p.value[0];
        const Norm& norm = i == 0 ? p.norm_x : p.norm_o;
        all.of[i] = {static_cast<const T*>(layer.weight.data),
                     static_cast<const T*>(layer.bias),
                     static_cast<const T*>(norm.weight),
                     static_cast<const T*>(norm.bias),
                     layer.weight.row_stride,
                     p.c,
                     padded_features(p),
                     i == 0 ? p.c : p.d,
                     i == 0 ? Gate::kScale : 1.f / Kernel::kOfGates,
                     scratch.weights[i],
                     scratch.terms[i],
                     /*in_blocks=*/true};
      }
      const Operand o{p.channels[0], p.row_stride, p.channel_stride}, out{p.out, p.out_row_stride, p.out_stride};
      bool encoded =
          are_encodable<T>(p.x, o, out, Operand{scratch.weights[0], p.c, 0}, Operand{scratch.weights[1], p.d, 0});
      typename Launch::Parameters parameters{};
      parameters.a = decltype(parameters.a)::of(p.x.data, p.x.row_stride, p.x.batch_stride, p.n, p.c, p.n);
      parameters.o = decltype(parameters.o)::of(o.data, p.channel_stride, p.row_stride, p.d, p.n, p.n);
      for (int i = 0; i < 2; ++i) {
        const auto& f = all.of[i];
        parameters.w[i] = std::remove_reference_t<decltype(parameters.w[0])>::of(f.to, f.k, f.padded, f.k);
        parameters.terms[i] = f.terms;
        parameters.steps[i] = Launch::divided(f.k, Kernel::kK);
        encoded = encoded && are_encoded(parameters.w[i].map);
      }
      if (!encoded || !are_encoded(parameters.a.map, parameters.o.map)) return Status::of(cudaErrorInvalidValue);
      parameters.of_x = static_cast<const ScaleAndShift*>(p.moments);
      parameters.of_x_row_stride = p.moments_row_stride;
      parameters.of_x_stride = p.moments_stride;
      parameters.out = static_cast<T*>(p.out);
      parameters.out_row_stride = p.out_row_stride;
      parameters.out_stride = p.out_stride;
      parameters.eps_o = p.norm_o.eps;
      parameters.n = p.n;
      parameters.c = p.c;
      parameters.d = p.d;
      parameters.in_row = Launch::divided(p.n, Kernel::kM);
      parameters.rows = Launch::divided(p.n * parameters.in_row, Kernel::kCluster);
      parameters.columns = Launch::divided(p.c, Kernel::kN);
      launch_fold_weights(all, stream);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
      return Status::of(Launch::run(parameters, stream));
    }
  };
};

}  // namespace torchops::cuda::gemm
