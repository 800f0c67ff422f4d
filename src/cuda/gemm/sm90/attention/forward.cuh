#pragma once

// The core of attention with a bias that rows share: no score is ever in memory, not even in shared memory.
//
//   load warp     queries of a tile -> a stage of shared memory; then keys, values, bias and mask, 64 keys at a time,
//                 through a ring of stages
//   warpgroups    64 queries of one row each: scores by a matrix instruction; bias, maximum and exponentials in
//                 registers, where the probabilities are the operand of the product with the values
//
// The bound is the special-function unit: 16 exponentials per clock and multiprocessor, 4 x d flops each. While one
// warpgroup waits for its products, the others' exponentials run. A CTA takes several rows of the same queries, because
// these share the tile of the bias: at d = 32, a score of `rows` = 2 needs 2 bytes from the second-level cache, of
// which 1 is bias; with one row in a CTA of 128 queries it would be 3.

#include <cutlass/fast_math.h>
#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>

#include "cuda/base/exponential.cuh"
#include "cuda/gemm/sm90/attention/heads.cuh"
#include "cuda/gemm/sm90/pointwise.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"

namespace torchops::cuda::gemm {

template <class Element_, AttentionTiling tiling, bool masked>
struct AttentionKernel {
  using Element = Element_;
  static constexpr AttentionSpec kTiling = kSpec<tiling>;
  static constexpr int kRows = kTiling.rows, kD = kTiling.d, kKeys = kTiling.keys;
  static constexpr int kWarpgroups = kTiling.warpgroups, kQueryBlocks = kWarpgroups / kRows, kQueries = 64;
  static constexpr int kStages = kTiling.stages, kTiles = 2, kCluster = 1;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kHeadBytes = kQueries * kD * kSize, kKeyBytes = kKeys * kD * kSize;
  static constexpr int kBiasBytes = kQueryBlocks * kQueries * kKeys * kSize, kMaskBytes = kKeys * 4;
  static constexpr int kStageBytes = 2 * kRows * kKeyBytes + kBiasBytes;
  static_assert(kKeys == 64 && kQueryBlocks * kRows == kWarpgroups);
  using Stages = Ring<kStages, /*releases=*/4 * kWarpgroups>;  // a warp each, which has read its part of the bias
  using Tiles = Ring<kTiles, /*releases=*/kWarpgroups>;
  using Step = typename Stages::At;
  using Tile = typename Tiles::At;

  struct Shared {
    cute::array_aligned<Element, kQueries * kD, 1024> q[kWarpgroups][kTiles];  // later the results
    cute::array_aligned<Element, kKeys * kD, 1024> k[kRows][kStages], v[kRows][kStages];
    cute::array_aligned<Element, kQueries * kKeys, 1024> bias[kStages][kQueryBlocks];
    alignas(16) float mask[kStages][kRows][kKeys];
    Tiles q_ring;
    Stages ring;

    CUTLASS_DEVICE void init() { init_barriers(q_ring, ring); }
  };

  struct Parameters {
    HeadMap<cute::SM90_TMA_LOAD, Element, kQueries, kD> q;
    HeadMap<cute::SM90_TMA_LOAD, Element, kKeys, kD> k, v;
    HeadMap<cute::SM90_TMA_LOAD, Element, kQueryBlocks * kQueries, kKeys> bias;
    HeadMap<cute::SM90_TMA_STORE, Element, kQueries, kD> out;
    const float* mask;
    float* logsumexp;
    float scale, unit;
    int rows, queries, steps, width, tiles;
    cutlass::FastDivmod query_tiles, row_tiles, heads;
  };

  /// A tile of the grid: all queries of one group of rows follow each other, since they share keys and values.
  struct Place {
    int batch, head, row, query_tile;

    CUTLASS_DEVICE Place(const Parameters& p, int tile) {
      p.query_tiles(tile, query_tile, tile);
      p.row_tiles(tile, row, tile);
      p.heads(batch, head, tile);
      row *= kRows;
    }
  };

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    constexpr int bytes = kStageBytes + (masked ? kRows * kMaskBytes : 0);
    Tile tile_at;
    Step at;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, ++tile_at) {
      const Place place(p, tile);
      auto& q_loaded = shared.q_ring.fill(tile_at, kWarpgroups * kHeadBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWarpgroups; ++i) {
        p.q.load(shared.q[i][tile_at.index()].data(), place.query_tile * kQueryBlocks + i % kQueryBlocks, 0, place.head,
                 place.row + i / kQueryBlocks, place.batch, q_loaded);
      }
      for (int step = 0; step < p.steps; ++step, ++at) {
        auto& loaded = shared.ring.fill(at, bytes);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRows; ++i) {
          p.k.load(shared.k[i][at.index()].data(), step, 0, place.head, place.row + i, place.batch, loaded);
        }
        p.bias.load(shared.bias[at.index()][0].data(), place.query_tile, step, place.head, 0, place.batch, loaded);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRows; ++i) {
          p.v.load(shared.v[i][at.index()].data(), step, 0, place.head, place.row + i, place.batch, loaded);
          if constexpr (masked) {
            // A row that does not exist takes the mask of the last one.
            const int64_t row = int64_t{place.batch} * p.rows + min(place.row + i, p.rows - 1);
            cute::SM90_BULK_COPY_G2S::copy(p.mask + row * p.width + step * kKeys, reinterpret_cast<uint64_t*>(&loaded),
                                           shared.mask[at.index()][i], kMaskBytes);
          }
        }
      }
    }
  }

  using Scores = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::Int<kQueries>, cute::Int<kKeys>, cute::Int<kD>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  using Values = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::Int<kQueries>, cute::Int<kD>, cute::Int<kKeys>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  // As many as the launch gives to the CTA, but for the few of the load warp.
  static constexpr int kRegisters = kWarpgroups == 4 ? 112 : 160;
  using Roles = gemm::Roles<Warpgroups<kWarpgroups, kRegisters, compute>, Warps<24, OneThread<load>>>;
};

/// Two numbers of 16 bits.
template <class Element>
CUTLASS_DEVICE float2 unpacked(uint32_t bits) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
  }
}

template <class Element, AttentionTiling tiling, bool masked>
CUTLASS_DEVICE void AttentionKernel<Element, tiling, masked>::compute(const Parameters& p, Shared& shared,
                                                                      int warpgroup) {
  using namespace cute;
  // Exponentials are relative to the largest score of the first keys. Only if those of later keys sum up to more than
  // this, they are computed again, relative to a larger one. So most steps look for no maximum, and scale no sums.
  constexpr float kMostSum = 1024;
  // A larger score is off by more than 2^1 when it is rounded. Exponents relative to it, of unrounded scores, might all
  // be far below 0.
  constexpr float kMostExact = 1 << 24;
  constexpr int kCount = kQueries * kKeys / 128, kOut = kQueries * kD / 128;
  const int thread = threadIdx.x % 128, row = warpgroup / kQueryBlocks, query_block = warpgroup % kQueryBlocks;
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(128, warpgroup); };

  // The compiler would compute this address anew at each barrier, from a register that takes long to read.
  uint32_t address = cast_smem_ptr_to_uint(&shared);
  asm volatile("" : "+r"(address));
  Shared& known = *static_cast<Shared*>(__cvta_shared_to_generic(address));

  Scores scores;
  Values values;
  const auto scores_slice = scores.get_slice(thread);
  const auto values_slice = values.get_slice(thread);
  Tensor s = partition_fragment_C(scores, Shape<Int<kQueries>, Int<kKeys>>{});
  Tensor out = partition_fragment_C(values, Shape<Int<kQueries>, Int<kD>>{});
  Tensor probabilities = make_tensor<Element>(RegisterOperand<kKeys>{});
  const float factor = p.scale * p.unit;
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, values);
  // Where this thread's part of the bias begins in a swizzled tile; 16 keys further are 32 bytes, but for the swizzle.
  const int bias_row = thread / 32 * 16 + thread % 16;
  const int bias_place = bias_row * 128 + ((thread % 32 / 16 ^ bias_row % 8) << 4);
  const auto write_slice = write.get_slice(thread);
  using Head = typename SwizzledHeads<Element, kQueries, kD>::Rows;

  const Tensor q_operand = scores_slice.make_fragment_A(scores_slice.partition_A(make_tensor(
      make_smem_ptr(shared.q[warpgroup][0].data()), typename SwizzledHeads<Element, kQueries, kD, kTiles>::Rows{})));
  const Tensor k_operand = scores_slice.make_fragment_B(scores_slice.partition_B(make_tensor(
      make_smem_ptr(shared.k[row][0].data()), typename SwizzledHeads<Element, kKeys, kD, kStages>::Rows{})));
  const Tensor v_operand = values_slice.make_fragment_B(values_slice.partition_B(make_tensor(
      make_smem_ptr(shared.v[row][0].data()), typename SwizzledHeads<Element, kKeys, kD, kStages>::Transposed{})));

  Tile tile_at;
  Step at, previous;
  // The mask is read by loads of C++, which the barrier's instruction does not keep from moving before it.
  const auto wait_until_loaded = [&] {
    known.ring.wait_until_loaded(at);
    asm volatile("" ::: "memory");
  };
  const auto start_scores = [&] {
    scores.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(k_operand); ++block) {
      cute::gemm(scores, q_operand(_, _, block, tile_at.index()), k_operand(_, _, block, at.index()), s);
      scores.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  uint32_t bias[kCount / 2];  // pairs
  const auto load_bias = [&](const Step& step) {
    const char* const tile = reinterpret_cast<const char*>(known.bias[step.index()][query_block].data());
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const uint128_t*>(tile + (bias_place ^ i << 5)), bias[4 * i],
                              bias[4 * i + 1], bias[4 * i + 2], bias[4 * i + 3]);
    }
  };
  const auto start_values = [&](const Step& step) {
    values.accumulate_ = GMMA::ScaleOut::One;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(v_operand); ++block) {
      cute::gemm(values, probabilities(_, _, block), v_operand(_, _, block, step.index()), out);
    }
    warpgroup_commit_batch();
  };
  // Bias and mask need no fence: what follows from them are operands of the product that has ended.
  const auto release = [&](const Step& step) {
    if (thread % 32 == 0) known.ring.free[step.index()].arrive();
  };
  const auto begin = [&] {
    warpgroup_fence_operand(s);
    warpgroup_fence_operand(out);
    warpgroup_fence_operand(probabilities);
    warpgroup_arrive();
  };

  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, ++tile_at) {
    const Place place(p, tile);
    // Of the two queries in which a thread has scores: the number that exponents are relative to, and the sum of its
    // own exponentials.
    float top[2] = {-1e30f, -1e30f}, sum[2] = {0, 0};
    bool is_exact = false;  // before the first keys, too
    clear(out);
    wait_until_loaded();
    known.q_ring.wait_until_loaded(tile_at);
    begin();
    start_scores();
    for (int step = 0; step < p.steps; ++step) {
      load_bias(at);
      // What the mask adds to the scores of two keys. Most masks leave out keys at the end, so few tiles need it, and
      // those of which it leaves out all keys add nothing.
      const float* const mask = known.mask[at.index()][row];
      const auto mask_of = [&](int i) { return *reinterpret_cast<const float2*>(mask + i / 4 * 8 + thread % 4 * 2); };
      bool is_masked = false, is_empty = false;
      if constexpr (masked) {
        const float first = mask[thread % 32], second = mask[thread % 32 + 32];
        is_masked = __any_sync(~0u, first != 0 || second != 0);
        is_empty = is_masked && __all_sync(~0u, fmaxf(first, second) == -INFINITY);
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      warpgroup_fence_operand(out);
      warpgroup_fence_operand(probabilities);
      if (step > 0) release(previous);
      previous = at;
      ++at;
      if (is_empty) {
        if (step + 1 < p.steps) {
          begin();
          wait_until_loaded();
          start_scores();
        }
        continue;
      }
      float sum_of_step[2];
      const auto score = [&](int i, float b, float m) { return fmaf(s(i), factor, fmaf(b, p.unit, m)); };
      const auto exponentials = [&]<bool with_mask>(std::bool_constant<with_mask>, const auto& exponent) {
        const cutlass::NumericArrayConverter<Element, float, 2> round;
        Tensor rounded = recast<cutlass::Array<Element, 2>>(probabilities);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; i += 4) {
          const float2 m = with_mask ? mask_of(i) : float2{0, 0};
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            const float2 b = unpacked<Element>(bias[i / 2 + r]);
            const int pair = i + 2 * r;
            const float first = exp2_approximate(exponent(pair, b.x, m.x, top[r]));
            const float second = exp2_approximate(exponent(pair + 1, b.y, m.y, top[r]));
            sum_of_step[r] = i == 0 ? first + second : sum_of_step[r] + first + second;
            rounded(i / 2 + r) = round(cutlass::Array<float, 2>{first, second});
          }
        }
      };
      bool too_large = !is_exact;
      if (!too_large) {
        const auto exponent = [&](int i, float b, float m, float top) { return score(i, b, m - top); };
        if (is_masked) {
          exponentials(std::bool_constant<masked>{}, exponent);
        } else {
          exponentials(std::false_type{}, exponent);
        }
        too_large = __any_sync(~0u, !(fmaxf(sum_of_step[0], sum_of_step[1]) <= kMostSum));
      }
      if (too_large) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          float most = top[r];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 2 * r; i < kCount; i += 4) {
            const float2 b = unpacked<Element>(bias[i / 2]), m = masked ? mask_of(i) : float2{0, 0};
            most = fmaxf(most, fmaxf(score(i, b.x, m.x), score(i + 1, b.y, m.y)));
          }
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
          const float shrink = exp2_approximate(top[r] - most);
          top[r] = most;
          sum[r] *= shrink;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 2 * r; i < kOut; i += 4) {
            out(i) *= shrink;
            out(i + 1) *= shrink;
          }
        }
        is_exact = !__any_sync(~0u, fmaxf(fabsf(top[0]), fabsf(top[1])) > kMostExact);
        // 0 for the largest, which is rounded as here.
        exponentials(std::bool_constant<masked>{},
                     [&](int i, float b, float m, float top) { return score(i, b, m) - top; });
      }
      sum[0] += sum_of_step[0];
      sum[1] += sum_of_step[1];
      begin();
      start_values(previous);
      if (step + 1 < p.steps) {
        wait_until_loaded();
        start_scores();
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(out);
    release(previous);

    float inverse[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      inverse[r] = 1 / sum[r];
    }
    const int first_query = (place.query_tile * kQueryBlocks + query_block) * kQueries, in_rows = place.row + row;
    if (thread % 4 < 2 && in_rows < p.rows) {
      const int r = thread % 4, query = first_query + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
      const float lse = (r == 0 ? top[0] + log2f(sum[0]) : top[1] + log2f(sum[1])) * kLn2;
      if (query < p.queries) {
        p.logsumexp[((int64_t{place.batch} * p.rows + in_rows) * p.heads.divisor + place.head) * p.queries + query] =
            lse;
      }
    }
    Tensor result = make_tensor_like<Element>(out);
    const cutlass::NumericArrayConverter<Element, float, 2> round;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOut; i += 2) {
      const float reciprocal = inverse[i / 2 % 2];
      pairs(i / 2) = round(cutlass::Array<float, 2>{out(i) * reciprocal, out(i + 1) * reciprocal});
    }
    // The products have read the queries, so the results can take their place.
    Element* const to = shared.q[warpgroup][tile_at.index()].data();
    sync();
    copy(write, write_slice.retile_S(result),
         write_slice.partition_D(as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(to), Head{}))));
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread == 0) {
      p.out.store(to, place.query_tile * kQueryBlocks + query_block, 0, place.head, in_rows, place.batch);
      tma_store_wait<0>();
      shared.q_ring.free[tile_at.index()].arrive();
    }
  }
}

/// With or without a mask.
template <bool masked>
struct AttentionForward {
  template <Element element, AttentionTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = AttentionKernel<T, tiling, masked>;

    static int64_t tiles(const AttentionProblem& p) {
      return int64_t{p.batch} * p.heads * divided(p.rows, Kernel::kRows) *
             divided(p.queries, Kernel::kQueries * Kernel::kQueryBlocks);
    }

    static Status prepare(const AttentionProblem& p, int64_t&) {
      // So that the number of a tile has room for that of the next one of a CTA.
      constexpr int64_t most_tiles = INT_MAX / 2;
      return p.d > Kernel::kD || tiles(p) > most_tiles ? Status::not_for_me() : Persistent<Kernel>::prepare();
    }

    static Status run(const AttentionProblem& p, cudaStream_t stream) {
      return Persistent<Kernel>::run(tiles(p), stream, [&](auto& parameters, TileMaps& maps, int) {
        const int outer[] = {p.heads, p.rows, p.batch}, of_bias[] = {p.heads, 1, p.batch};
        maps(parameters.q, p.q, p.queries, p.d, outer);
        maps(parameters.k, p.k, p.keys, p.d, outer);
        maps(parameters.v, p.v, p.keys, p.d, outer);
        maps(parameters.bias, p.bias, p.queries, p.width, of_bias);
        maps(parameters.out, p.out, p.queries, p.d, outer);
        parameters.mask = p.mask;
        parameters.logsumexp = p.logsumexp;
        parameters.scale = p.scale;
        parameters.unit = p.unit;
        parameters.rows = p.rows;
        parameters.queries = p.queries;
        parameters.steps = divided(p.keys, Kernel::kKeys);
        parameters.width = p.width;
        parameters.tiles = static_cast<int>(tiles(p));
        parameters.query_tiles = cutlass::FastDivmod(divided(p.queries, Kernel::kQueries * Kernel::kQueryBlocks));
        parameters.row_tiles = cutlass::FastDivmod(divided(p.rows, Kernel::kRows));
        parameters.heads = cutlass::FastDivmod(p.heads);
      });
    }
  };
};

}  // namespace torchops::cuda::gemm
