#pragma once

// Products of float32 numbers that keep their digits, by matrix instructions of TF32. Each number is the sum of two of
// TF32 (split_tf32.cuh), and a product is low * high + high * low + high * high; that of both low parts, at most 2^-22
// of the result's terms, is left out. The instructions cut their sums off instead of rounding them, so each step of 32
// columns is summed from 0, small products first, and added to the former steps by float additions, which round. After
// H. Ootomo and R. Yokota, Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
// peak performance, 2022 (https://arxiv.org/abs/2203.03341).
//
//   load warp      tiles of a and of the weights, 32 columns of each -> a stage of shared memory, by TMA
//   split warps    the weights of a stage -> their high parts in place, and the low parts beside them
//   warpgroups     64 rows each: split a in registers and multiply; while one adds and splits, the other multiplies
//
// The tiles of two weights are one operand: rows of b, followed by the same rows of b2, so a thread has a column of
// both products.

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/copy_sm75.hpp>

#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"
#include "cuda/gemm/sm90/skeleton/turns.cuh"
#include "cuda/gemm/split_tf32.cuh"

namespace torchops::cuda::gemm {

template <class Rule_, Tiling tiling>
struct SplitFloat32Kernel {
  using Rule = Rule_;
  static constexpr TilingSpec kTiling = kSpec<tiling>;
  static constexpr int kProducts = Rule::kProducts, kColumns = kTiling.tile_n, kN = kColumns / kProducts;
  static constexpr int kM = kTiling.tile_m, kK = 32, kWarpgroups = kM / 64, kSplitWarps = 3, kCluster = 1;
  static_assert(kM % 64 == 0 && kN % 8 == 0 && kColumns <= 128, "sums and those of a step are 128 registers");

  struct Stage {
    cute::array_aligned<float, kM * kK, 1024> a;
    cute::array_aligned<float, kColumns * kK, 1024> w, low;
  };
  static constexpr int kLoadedBytes = (kM + kColumns) * kK * static_cast<int>(sizeof(float));
  static constexpr int kStages = std::min<int>(6, (kMostSharedBytes - 1024) / sizeof(Stage));
  static_assert(kStages >= 3);
  // Each warp says by itself that it has read its rows of a.
  using Stages = Ring<kStages, /*releases=*/kWarpgroups * 4>;

  struct Shared {
    Stage stages[kStages];
    Stages ring;
    Barrier<kSplitWarps> split[kStages];
    Turns<kWarpgroups> turns;

    CUTLASS_DEVICE void init() { init_barriers(ring, split, turns); }
  };

  struct Parameters {
    TileMap<cute::SM90_TMA_LOAD, float, kM, kK> a_tiles;
    TileMap<cute::SM90_TMA_LOAD, float, kN, kK> w_tiles[kProducts];
    Operand a, w[kProducts], c;
    float* d;
    int64_t d_stride;
    const float* bias[kProducts];
    int m, n, k, steps;
    int rows, columns;  // of the grid of tiles
  };

  CUTLASS_DEVICE static GridPlace place(const Parameters& p, int tile) {
    return place_in_groups(tile, p.rows, p.columns, 2048 / kM);
  }

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    typename Stages::At at;
    for (int tile = blockIdx.x; tile < p.rows * p.columns; tile += gridDim.x) {
      const GridPlace place = SplitFloat32Kernel::place(p, tile);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < p.steps; ++step, ++at) {
        Stage& stage = shared.stages[at.index()];
        auto& loaded = shared.ring.fill(at, kLoadedBytes);
        p.a_tiles.load(stage.a.data(), place.row, step, loaded);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kProducts; ++i) p.w_tiles[i].load(stage.w.data() + i * kN * kK, place.column, step, loaded);
      }
    }
  }

  CUTLASS_DEVICE static void split(const Parameters& p, Shared& shared, int warp) {
    const int lane = cutlass::canonical_lane_idx(), thread = warp * 32 + lane;
    typename Stages::At place;
    for (int tile = blockIdx.x; tile < p.rows * p.columns; tile += gridDim.x) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < p.steps; ++step, ++place) {
        Stage& stage = shared.stages[place.index()];
        shared.ring.wait_until_loaded(place);
        auto* const w = reinterpret_cast<uint4*>(stage.w.data());
        auto* const low = reinterpret_cast<uint4*>(stage.low.data());
        constexpr int vectors = kColumns * kK / 4, threads = kSplitWarps * 32, together = 6;
        CUTLASS_PRAGMA_UNROLL
        for (int first = 0; first < vectors; first += together * threads) {
          uint4 four[together];  // read before the writes, which the compiler cannot tell apart
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < together; ++i) {
            if (const int at = first + i * threads + thread; at < vectors) four[i] = w[at];
          }
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < together; ++i) {
            const int at = first + i * threads + thread;
            if (at >= vectors) continue;
            SplitTF32<4> parts;
            parts.set({four[i].x, four[i].y, four[i].z, four[i].w});
            w[at] = make_uint4(parts.high[0], parts.high[1], parts.high[2], parts.high[3]);
            low[at] = make_uint4(parts.low[0], parts.low[1], parts.low[2], parts.low[3]);
          }
        }
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (lane == 0) shared.split[place.index()].arrive();
      }
    }
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  using Roles =
      gemm::Roles<Warpgroups<kWarpgroups, 224, compute>, Warps<56, OneThread<load>, WholeWarp<split, kSplitWarps>>>;

 private:
  using Number = cute::tfloat32_t;
  using Product = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Number, Number, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kK>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  static constexpr int kBlocks = kK / 8;  // columns of an instruction

  /// A warp's rows of a step of a, as four words for each instruction.
  using Words = uint32_t[kBlocks][4];
  CUTLASS_DEVICE static void read(Words& words, const float* a, int row, int lane) {
    const auto* const pieces = reinterpret_cast<const cute::uint128_t*>(a);
    const int of_lane = row + lane % 16;  // rows of 128 bytes, whose pieces TMA has permuted
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const int piece = (2 * block + lane / 16) ^ (of_lane % 8);
      cute::SM75_U32x4_LDSM_N::copy(pieces[of_lane * 8 + piece], words[block][0], words[block][1], words[block][2],
                                    words[block][3]);
    }
  }

  /// The sums that are not finite, again, by FFMAs: infinities have no parts.
  struct Sums {
    float at[kColumns / 2];
  };
  CUTLASS_DEVICE static int row_of(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
  CUTLASS_DEVICE static int column_of(int lane, int i) { return i / 4 % (kN / 8) * 8 + lane % 4 * 2 + i % 2; }
  __device__ __noinline__ static void sum_again(Sums& sums, const Parameters& p, int row, int column) {
    const int lane = cutlass::canonical_lane_idx();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kColumns / 2; ++i) {
      const int of_row = row + row_of(lane, i), of_column = column + column_of(lane, i);
      if (isfinite(sums.at[i]) || of_row >= p.m || of_column >= p.n) continue;
      const Operand& weight = p.w[i / (kN / 2)];
      const float* const a = static_cast<const float*>(p.a.data) + of_row * p.a.row_stride;
      const float* const w = static_cast<const float*>(weight.data) + of_column * weight.row_stride;
      float sum = 0.f;
      for (int k = 0; k < p.k && !isnan(sum); ++k) sum = fmaf(a[k], w[k], sum);
      sums.at[i] = sum;
    }
  }

  CUTLASS_DEVICE static void finish(const Parameters& p, const Sums& sums, int row, int column) {
    constexpr Exactness exact = Exactness::kExact;
    const int lane = cutlass::canonical_lane_idx();
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kN / 8; ++block) {
      const int to = column + column_of(lane, 4 * block), left = p.n - to;
      if (left <= 0) continue;
      float bias[kProducts][2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kProducts; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) bias[i][v] = p.bias[i] != nullptr && v < left ? p.bias[i][to + v] : 0.f;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int64_t at = row + row_of(lane, 2 * r);
        if (at >= p.m) continue;
        float2 c = make_float2(0.f, 0.f), result;
        if constexpr (Rule::kReadsC) {
          const float* const from = static_cast<const float*>(p.c.data) + at * p.c.row_stride + to;
          if (left > 1) {
            c = *reinterpret_cast<const float2*>(from);
          } else {
            c.x = *from;
          }
        }
        const auto value = [&](int v, float c) {
          const auto z = [&](int product) {
            return sums.at[(product * (kN / 8) + block) * 4 + 2 * r + v] + bias[product][v];
          };
          return Rule::template value<exact>(z(0), z(kProducts - 1), c);
        };
        result.x = value(0, c.x);
        result.y = value(1, c.y);
        float* const d = p.d + at * p.d_stride + to;
        if (left > 1) {
          *reinterpret_cast<float2*>(d) = result;
        } else {
          *d = result.x;
        }
      }
    }
  }
};

template <class Rule, Tiling tiling>
CUTLASS_DEVICE void SplitFloat32Kernel<Rule, tiling>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128, lane = cutlass::canonical_lane_idx();
  const int row_in_tile = warpgroup * 64 + thread / 32 * 16;
  Product product;
  const auto slice = product.get_slice(thread);
  Tensor step_sums = partition_fragment_C(product, Shape<_64, Int<kColumns>>{});
  static_assert(size(step_sums) == kColumns / 2);
  using Rows = Layout<Shape<Shape<_2, _2>, _1, Int<kBlocks>>>;
  Tensor high = make_tensor<Number>(Rows{}), low = make_tensor<Number>(Rows{});
  typename Stages::At at;
  uint32_t round = 0;
  for (int tile = blockIdx.x; tile < p.rows * p.columns; tile += gridDim.x) {
    const GridPlace place = SplitFloat32Kernel::place(p, tile);
    Sums sums{};
    Words words;
    shared.ring.wait_until_loaded(at);
    read(words, shared.stages[at.index()].a.data(), row_in_tile, lane);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < p.steps; ++step, ++round) {
      Stage& stage = shared.stages[at.index()];
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        SplitTF32<4> parts;
        parts.set(words[block]);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          high(block * 4 + i) = Number::bitcast(parts.high[i]);
          low(block * 4 + i) = Number::bitcast(parts.low[i]);
        }
      }
      const auto weights = [&](float* data) {
        return slice.make_fragment_B(slice.partition_B(
            make_tensor(make_smem_ptr(reinterpret_cast<Number*>(data)), SwizzledRows<Number, kColumns, kK>{})));
      };
      const Tensor w = weights(stage.w.data()), w_low = weights(stage.low.data());
      shared.split[at.index()].wait(at.phase());
      shared.turns.wait(warpgroup, round);
      product.accumulate_ = GMMA::ScaleOut::Zero;
      warpgroup_fence_operand(step_sums);
      warpgroup_fence_operand(high);
      warpgroup_fence_operand(low);
      warpgroup_arrive();
      const auto multiply = [&](const auto& a, const auto& b) {
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          cute::gemm(product, a(_, _, block), b(_, _, block), step_sums);
          product.accumulate_ = GMMA::ScaleOut::One;
        }
      };
      multiply(low, w);
      multiply(high, w_low);
      warpgroup_commit_batch();
      multiply(high, w);
      warpgroup_commit_batch();
      // The other warpgroup's instructions begin as the last of these end.
      warpgroup_wait<1>();
      shared.turns.pass_on(warpgroup);
      const int former = at.index();
      ++at;
      if (step + 1 < p.steps) {
        shared.ring.wait_until_loaded(at);
        read(words, shared.stages[at.index()].a.data(), row_in_tile, lane);
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(step_sums);
      finish_reads();
      __syncwarp();
      if (lane == 0) shared.ring.free[former].arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns / 2; ++i) sums.at[i] += step_sums(i);
    }
    const int row = place.row * kM + row_in_tile, column = place.column * kN;
    float zero = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (const float sum : sums.at) zero = fmaf(sum, 0.f, zero);
    if (zero != 0.f) {
      Sums again = sums;
      sum_again(again, p, row, column);
      sums = again;
    }
    // d may be a, of which all threads of the warp may have read rows again.
    __syncwarp();
    finish(p, sums, row, column);
  }
}

/// d = the rule's value for a @ b.T and, if it has them, for a @ b2.T and c, in float32. d may be c, or a if a row of
/// the result has one tile.
template <class Rule>
struct SplitFloat32 {
  template <Element element, Tiling tiling>
  struct With {
    using Kernel = SplitFloat32Kernel<Rule, tiling>;
    using Launch = Persistent<Kernel>;

    static Status prepare(const Problem& p, int64_t&) {
      const bool reads_overwritten_rows = p.a.data == p.d.data && p.n > Kernel::kN;
      return p.batch > 1 || p.k == 0 || reads_overwritten_rows ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const Problem& p, cudaStream_t stream) {
      const int rows = divided(p.m, Kernel::kM), columns = divided(p.n, Kernel::kN);
      return Launch::run(int64_t{rows} * columns, stream, [&](auto& parameters, TileMaps& maps, int) {
        maps(parameters.a_tiles, p.a, p.m, p.k);
        maps(parameters.w_tiles, p.b, p.b2, p.n, p.k);
        parameters.a = p.a;
        for (int i = 0; i < Rule::kProducts; ++i) {
          parameters.w[i] = i == 0 ? p.b : p.b2;
          parameters.bias[i] = static_cast<const float*>(i == 0 ? p.bias : p.bias2);
        }
        parameters.c = p.c;
        parameters.d = static_cast<float*>(const_cast<void*>(p.d.data));
        parameters.d_stride = p.d.row_stride;
        parameters.m = p.m;
        parameters.n = p.n;
        parameters.k = p.k;
        parameters.steps = divided(p.k, Kernel::kK);
        parameters.rows = rows;
        parameters.columns = columns;
      });
    }
  };
};

}  // namespace torchops::cuda::gemm
