#pragma once

// The kernel of triangle/streamed_out.cuh: what the computing warpgroups of triangle/streamed_out_tiles.cuh do.

#include <cutlass/arch/memory.h>

#include <cute/arch/copy_sm80.hpp>

#include "cuda/gemm/sm90/triangle/streamed_out_tiles.cuh"

namespace torchops::cuda::gemm {

template <class Element, class Gate, Tiling tiling>
CUTLASS_DEVICE void StreamedPairOutKernel<Element, Gate, tiling>::compute(const Parameters& p, Shared& shared,
                                                                          int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128;
  OfRows of_rows;
  OfChannels of_channels;
  const auto slice_x = of_rows.get_slice(thread);
  const auto slice_o = of_channels.get_slice(thread);
  Tensor sums = partition_fragment_C(of_rows, cute::Shape<Int<kM>, Int<kN>>{});
  Tensor gates = make_tensor_like<cutlass::half_t>(sums);
  // Of pairs of neighbouring columns of the accumulators, alternating between two rows.
  Tensor pairs = recast<cutlass::Array<cutlass::half_t, 2>>(gates);
  Tensor pieces = recast<uint4>(gates);

  AState a_at;
  WState w_at;
  uint32_t round = 0;
  // Some steps of a product, in one turn.
  const auto run = [&](auto& product, const auto& slice, auto layout_of_a, int steps, bool begins, int arrivals,
                       const auto& begun) {
    // Of the last step before the current one.
    const auto release = [&] {
      const int block = a_at.index() == 0 ? kABlocks - 1 : a_at.index() - 1;
      const int stage = w_at.index() == 0 ? kStages - 1 : w_at.index() - 1;
      if (thread < arrivals) shared.a_ring.free[block].arrive();
      if (thread < kCluster) shared.w_ring.free[stage].arrive(thread);
    };
    shared.turns.wait(warpgroup, round++);  // until the other one has seen all of its stages
    begun();
    product.accumulate_ = begins ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    warpgroup_fence_operand(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < steps; ++step, ++a_at, ++w_at) {
      shared.a_ring.wait_until_loaded(a_at);
      shared.w_ring.wait_until_loaded(w_at);
      if (step == steps - 1) shared.turns.pass_on(warpgroup);
      const Tensor rows = slice.make_fragment_A(
          slice.partition_A(make_tensor(make_smem_ptr(shared.a[a_at.index()].data()), layout_of_a)));
      const Tensor w = slice.make_fragment_B(slice.partition_B(
          make_tensor(make_smem_ptr(shared.w[w_at.index()].data()), SwizzledRows<Element, kN, kK>{})));
      start_products(product, rows, w, sums);
      if (step > 0) {
        warpgroup_wait<1>();
        release();
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release();
  };

  // A product of this warpgroup, into `sums`. The other one computes one of the same length, unless they are `alone`:
  // then the first one's is of x, the second one's of o.
  const auto multiply = [&](auto& product, const auto& slice, auto layout_of_a, int i, bool alone, const auto& begun) {
    const int steps = p.steps[i], in_turn = alone ? steps : p.in_turn[i];
    const bool stays = kTiles == 3 && alone == (i == 1) && Parameters::stays(steps);  // for the next product
    // A block is free when both warpgroups have arrived, or the only one that reads it has twice.
    const bool reads_again = kTiles == 3 && Parameters::stays(steps) && (i == 0 ? !alone && warpgroup == 0 : alone);
    const int arrivals = reads_again ? 0 : kTiles == 1 || (alone && !Parameters::stays(steps)) ? 2 : 1;
    if (warpgroup > 0 && (kTiles == 1 || alone)) a_at.advance(p.steps[alone ? 0 : i]);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int begin = 0; begin < steps; begin += in_turn) {
      const int some = min(in_turn, steps - begin);
      if (warpgroup > 0) w_at.advance(alone ? p.steps[0] : some);
      run(product, slice, layout_of_a, some, begin == 0, arrivals, begun);
      if (warpgroup == 0) w_at.advance(alone ? p.steps[1] : some);
    }
    if (stays) {
      const int first = a_at.index() - steps;
      a_at = AState(first < 0 ? first + kABlocks : first, first < 0 ? a_at.phase() ^ 1 : a_at.phase(), 0);
    }
    if (warpgroup == 0 && kTiles == 1) a_at.advance(steps);
    if (warpgroup == 0 && alone && !Parameters::stays(p.steps[1])) a_at.advance(p.steps[1]);
  };

  const int row_tile = kRowTiles == 2 ? warpgroup : 0;
  for (int count = 0; unit_at(count) < p.units; ++count) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int job = 0; job < kJobs; ++job) {
      const bool alone = kTiles == 3 && job == 1;
      const auto tile = [&] {
        return kTiles == 1 ? 0 : kTiles == 2 || job == 0 ? warpgroup : warpgroup == 0 ? 2 : 2 - job;
      };
      const auto terms = [&] { return shared.terms[warpgroup][(count * kJobs + job) % 2]; };
      const auto read_terms = [&](const ColumnTerms* from) {
        if (thread >= kN / 2) return;
        SM80_CP_ASYNC_CACHEALWAYS<uint128_t>::copy(
            *reinterpret_cast<const uint128_t*>(from + (Unit(p, unit_at(count)).column + tile()) * kN + thread * 2),
            *reinterpret_cast<uint128_t*>(terms() + thread * 2));
      };
      // Until all threads have read their terms of the last product but one, and these are here.
      const auto share = [&] {
        cp_async_wait<0>();
        cutlass::arch::NamedBarrier::sync(128, warpgroup);
      };
      if (job + (kTiles == 3 ? warpgroup : 1) < 2) {
        read_terms(p.terms[0]);
        const Unit unit(p, unit_at(count));
        const int plane = unit.plane(p, row_tile), position = unit.place(p, row_tile) * kM;
        ScaleAndShift moments[kBlocks][2];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kBlocks; ++i) {
          const int at = position + row_of_sums(thread, i / 2, i % 2);
          moments[i / 2][i % 2] = plane < p.n && at < p.n ? p.of_x[plane * p.of_x_row_stride + at * p.of_x_stride]
                                                          : ScaleAndShift{0.f, 0.f};
        }
        multiply(of_rows, slice_x, SwizzledRows<Element, kM, kK>{}, 0, alone, [] {});
        share();
        make_gates(terms(), moments, sums, pairs, thread);
        if constexpr (kTiles == 3) {
          if (tile() != 0) continue;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < size(pieces); ++i) shared.gates.of[i][thread] = pieces(i);
        }
      } else {
        // Turns order this with the other warpgroup's writes: it has had turns since, and its next writes are after
        // this turn.
        const auto take_gates = [&] {
          if constexpr (kTiles == 3) {
            if (tile() != 0) return;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < size(pieces); ++i) pieces(i) = shared.gates.of[i][thread];
          }
        };
        read_terms(p.terms[1]);
        multiply(of_channels, slice_o, SwizzledTransposed<Element, kK, kM>{}, 1, alone, take_gates);
        share();
        shared.measured[row_tile].wait(count & 1);
        const Unit unit(p, unit_at(opaque_to_compiler(count)));
        write(p, terms(), shared.of_o[row_tile], sums, pairs, unit.plane(p, row_tile), unit.place(p, row_tile) * kM,
              (unit.column + tile()) * kN, opaque_to_compiler(thread));
        if (job == kJobs - 1) shared.measure[row_tile].arrive();
      }
    }
  }
}

template <class Element, class Gate, Tiling tiling>
template <class Sums, class Pairs>
CUTLASS_DEVICE void StreamedPairOutKernel<Element, Gate, tiling>::make_gates(const ColumnTerms* terms,
                                                                             const ScaleAndShift (&of_x)[kBlocks][2],
                                                                             const Sums& sums, Pairs& pairs,
                                                                             int thread) {
  using cute::make_coord;
  CUTLASS_PRAGMA_UNROLL
  for (int block = 0; block < kN / 8; ++block) {
    const float4 both = read_again(terms + block * 8 + thread % 4 * 2);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const ScaleAndShift by = of_x[i / 2][i % 2];
      cutlass::Array<float, 2> values;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 2; ++v) {
        const float t = fmaf(Gate::kScale * by.scale, sums(make_coord(make_coord(v, i % 2, block), i / 2, 0)),
                             fmaf(by.shift, v == 0 ? both.x : both.z, v == 0 ? both.y : both.w));
        values[v] = kOfGates * Gate::template of_scaled<kExactness>(t);
      }
      pairs(make_coord(make_coord(0, i % 2, block), i / 2, 0)) =
          cutlass::NumericArrayConverter<cutlass::half_t, float, 2>::convert(values);
    }
  }
}

template <class Element, class Gate, Tiling tiling>
template <class Sums, class Pairs>
CUTLASS_DEVICE void StreamedPairOutKernel<Element, Gate, tiling>::write(const Parameters& p, const ColumnTerms* terms,
                                                                        const ScaleAndShift (&of_o)[kM],
                                                                        const Sums& sums, const Pairs& pairs, int plane,
                                                                        int position, int column, int thread) {
  using cute::make_coord;
  column += thread % 4 * 8;
  position += row_of_sums(thread, 0, 0);
  Element* const out = p.out + plane * p.out_plane_stride + position * p.out_position_stride + column;
  const int left = plane < p.n ? p.n - position : 0, columns = p.c - column;  // that exist, from this thread's on
  CUTLASS_PRAGMA_UNROLL
  for (int m = 0; m < kBlocks; ++m) {
    ScaleAndShift of_rows[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      of_rows[r].scale = *const_cast<const volatile float*>(&of_o[row_of_sums(thread, m, r)].scale);
      of_rows[r].shift = *const_cast<const volatile float*>(&of_o[row_of_sums(thread, m, r)].shift);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kN / 32; ++group) {
      uint32_t pieces[2][4];
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < 4; ++part) {
        const int block = group * 4 + part;
        const float4 both = read_again(terms + block * 8 + thread % 4 * 2);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const ScaleAndShift by = of_rows[r];
          const auto gate = cutlass::NumericArrayConverter<float, cutlass::half_t, 2>::convert(
              pairs(make_coord(make_coord(0, r, block), m, 0)));
          cutlass::Array<float, 2> values;
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 2; ++v) {
            values[v] = gate[v] * fmaf(by.scale, sums(make_coord(make_coord(v, r, block), m, 0)),
                                       fmaf(by.shift, v == 0 ? both.x : both.z, v == 0 ? both.y : both.w));
          }
          const auto both_rounded = cutlass::NumericArrayConverter<Element, float, 2>::convert(values);
          pieces[r][part] = reinterpret_cast<const uint32_t&>(both_rounded);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = m * kPairRows + r * 8;
        cutlass::arch::global_store<uint4, 16>(make_uint4(pieces[r][0], pieces[r][1], pieces[r][2], pieces[r][3]),
                                               out + row * p.out_position_stride + group * 32,
                                               row < left && group * 32 < columns);
      }
    }
  }
}

}  // namespace torchops::cuda::gemm
