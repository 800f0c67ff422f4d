#pragma once

// The kernel of triangle/streamed_in.cuh. A CTA keeps its rows of x in shared memory for all columns of the weights,
// which stream through and are shared by the two CTAs of a cluster: of 64 features, for 512 cycles of matrix
// instructions, it reads 8 KB from the second-level cache, where 24 KB would be needed if x streamed as well. Only rows
// that do not fit are read again for each tile of columns.
//
//   load warps    one loads half of each tile of the weights, for both CTAs; another loads x
//   warpgroups    two compute a tile of columns each, in turn, so that the epilogue of one overlaps the matrix
//                 instructions of the other; a third measures the moments of rows as they arrive
//
// What is left above the time of the matrix instructions are the stores. Pieces of 256 bytes, and stores from
// registers, are slower.

#include "cuda/gemm/sm90/triangle/streamed.cuh"

namespace torchops::cuda::gemm {

template <class Gate, class Tile_>
struct StreamedPairInKernel {
  using Tile = Tile_;
  using Element = typename Tile::Element;
  using Product = typename Tile::Product;
  static constexpr int kM = Tile::kM, kN = Tile::kN, kK = Tile::kK, kColumns = Tile::kColumns, kCluster = 2;
  static constexpr int kWarpgroups = Tile::kWarpgroups;
  static constexpr int kBlocks = kM / kPairRows;
  static_assert(Tile::kPingPong && Tile::kProducts == kCluster && Tile::kCluster == kCluster && kM == 128);
  static_assert(kColumns == 128, "a thread reads the terms of one column of one product");

  // As many as fit: with fewer, the matrix instructions wait for loads.
  static constexpr int kXBlocks = 6, kStages = 5;
  using XStages = Ring<kXBlocks, /*releases=*/kWarpgroups + 4>;  // and the warps that measure
  using WStages = Ring<kStages, /*releases=*/kCluster>;
  using XState = typename XStages::At;
  using WState = typename WStages::At;
  static constexpr int kXBytes = kM * kK * Tile::kSize, kWBytes = kColumns * kK * Tile::kSize;

  struct Epilogue {
    cute::array_aligned<Element, kN * kPairRows, 1024> results[kBlocks];
    alignas(16) ColumnTerms terms[2][kN];
  };
  struct Shared {
    cute::array_aligned<Element, kM * kK, 1024> x[kXBlocks];
    cute::array_aligned<Element, kColumns * kK, 1024> w[kStages];
    Epilogue epilogue[kWarpgroups];
    ScaleAndShift moments[2][kM];  // of the rows of a unit, and of the next
    XStages x_ring;
    WStages w_ring;
    Barrier<128> measured[2];
    Barrier<128 * kWarpgroups> measure[2];
    Turns<kWarpgroups> turns;

    CUTLASS_DEVICE void init() { init_barriers(x_ring, w_ring, measured, measure, turns); }
  };

  struct Parameters {
    PlaneMap<cute::SM90_TMA_LOAD, Element, kM, kK> x;
    TileMap<cute::SM90_TMA_LOAD_MULTICAST, Element, kN, kK> w[2];  // of all values, and of all gates
    PlaneMap<cute::SM90_TMA_STORE, Element, kN, kPairRows> channels[2];
    const ColumnTerms* terms[2];
    ScaleAndShift* moments;
    int64_t moments_row_stride, moments_stride;
    const Element* mask;
    int64_t mask_row_stride, mask_stride;
    float scale[2], eps;
    int n, c, in_row, steps;  // positions, features; tiles of rows in a row of positions, of features
    int parts, columns;       // tiles of columns in a side, and in both
    int units;                // first so many with all columns; then some with groups of so many tiles of columns
    int whole, groups, of_group;

    /// Whether x stays in shared memory for all columns of a unit.
    CUTLASS_DEVICE bool stays() const { return steps <= kXBlocks; }
  };

  CUTLASS_DEVICE static int rank() { return static_cast<int>(cute::block_rank_in_cluster()); }

  /// What a CTA computes at a time: some tiles of columns, an even number, of one tile of rows. Past the last row of
  /// tiles there is a nonexistent plane, which is read as zeros and not written.
  struct Unit {
    int plane, place, column, columns;

    CUTLASS_DEVICE Unit(const Parameters& p, int unit) {
      const int part = max(unit - p.whole, 0);
      const int row = (min(unit, p.whole) + part / p.groups) * kCluster + rank();
      plane = row / p.in_row;
      place = row % p.in_row;
      column = part % p.groups * p.of_group;
      columns = unit < p.whole ? p.columns : min(p.of_group, p.columns - column);
    }
  };
  template <class F>
  CUTLASS_DEVICE static void for_each_unit(const Parameters& p, const F& f) {
    for (int unit = static_cast<int>(blockIdx.x) / kCluster; unit < p.units;
         unit += static_cast<int>(gridDim.x) / kCluster) {
      f(Unit(p, unit));
    }
  }

  CUTLASS_DEVICE static void load_x(const Parameters& p, Shared& shared) {
    XState at;
    for_each_unit(p, [&](const Unit& unit) {
      for (int tile = 0; tile < (p.stays() ? 1 : unit.columns); ++tile) {
        for (int step = 0; step < p.steps; ++step, ++at) {
          auto& loaded = shared.x_ring.fill(at, kXBytes);
          p.x.load(shared.x[at.index()].data(), unit.place, step, unit.plane, loaded);
        }
      }
    });
  }

  CUTLASS_DEVICE static void load_w(const Parameters& p, Shared& shared) {
    const int rank = StreamedPairInKernel::rank();
    WState at;
    for_each_unit(p, [&](const Unit& unit) {
      for (int tile = 0; tile < unit.columns; ++tile) {
        for (int step = 0; step < p.steps; ++step, ++at) {
          auto& loaded = shared.w_ring.fill(at, kWBytes);
          p.w[rank].load(shared.w[at.index()].data() + rank * kN * kK, unit.column + tile, step, loaded,
                         (1 << kCluster) - 1);
        }
      }
    });
  }

  /// A thread has a row. The pieces of neighbouring rows are permuted, so that they have no bank conflicts. Sums are of
  /// differences to the first element.
  CUTLASS_DEVICE static void measure(const Parameters& p, Shared& shared) {
    const int row = threadIdx.x % 128;
    const cutlass::NumericArrayConverter<float, Element, 8> widen;
    XState at;
    uint32_t count = 0;
    const auto release = [&] {
      finish_reads();
      __syncwarp();
      if (row % 32 == 0) shared.x_ring.free[at.index()].arrive();
    };
    for_each_unit(p, [&](const Unit& unit) {
      float origin = 0.f, sums[2] = {}, squares[2] = {};
      for (int step = 0; step < p.steps; ++step, ++at) {
        shared.x_ring.wait_until_loaded(at);
        const Element* const block = shared.x[at.index()].data();
        if (step == 0) origin = static_cast<float>(block[swizzled_piece<kM>(row, 0)]);
        CUTLASS_PRAGMA_UNROLL
        for (int column = 0; column < kK; column += 8) {
          if (step * kK + column >= p.c) break;
          const auto values =
              widen(*reinterpret_cast<const cutlass::Array<Element, 8>*>(block + swizzled_piece<kM>(row, column)));
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 8; ++v) {
            const float difference = values[v] - origin;
            sums[v % 2] += difference;
            squares[v % 2] = fmaf(difference, difference, squares[v % 2]);
          }
        }
        release();
      }
      const int position = unit.place * kM + row, buffer = count % 2;
      const bool exists = unit.plane < p.n && position < p.n;
      const auto moments = exists ? ScaleAndShift::of(origin, sums[0] + sums[1], squares[0] + squares[1], p.c, p.eps)
                                  : ScaleAndShift{0.f, 0.f};
      shared.measure[buffer].wait((count / 2 & 1) ^ 1);
      shared.moments[buffer][row] = moments;
      shared.measured[buffer].arrive();
      if (exists && unit.column == 0) {
        p.moments[unit.plane * p.moments_row_stride + position * p.moments_stride] = moments;
      }
      ++count;
      if (p.stays()) return;
      for (int step = p.steps; step < unit.columns * p.steps; ++step, ++at) {
        shared.x_ring.wait_until_loaded(at);
        release();
      }
    });
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 216, compute>, Warps<40, OneThread<load_w>, OneThread<load_x>>,
                            Warpgroups<1, 40, measure>>;

 private:
  /// The parts of its rows that a thread's epilogues need.
  struct Rows {
    ScaleAndShift moments[2 * kBlocks];
    float halves[2 * kBlocks];  // half of the mask; 0 past the last position, where zeros add nothing to later products
  };

  template <class Sums>
  CUTLASS_DEVICE static void write(const Parameters& p, Epilogue& shared, const Rows& rows, float scale,
                                   const Sums& sums, int thread);
};

template <class Gate, class Tile>
CUTLASS_DEVICE void StreamedPairInKernel<Gate, Tile>::compute(const Parameters& p, Shared& shared, int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128;
  Epilogue& epilogue = shared.epilogue[warpgroup];
  Product product;
  const auto slice = product.get_slice(thread);
  Tensor sums = partition_fragment_C(product, Shape<Int<kM>, Int<kColumns>>{});
  const bool stays = p.stays();

  XState x_of_unit;
  WState w_at;
  if (warpgroup > 0) w_at.advance(p.steps);
  uint32_t round = 0, count = 0;
  for_each_unit(p, [&](const Unit& unit) {
    Rows rows;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int position = unit.place * kM + row_of_sums(thread, i / 2, i % 2);
      rows.halves[i] = unit.plane < p.n && position < p.n ? 0.5f : 0.f;
      if (p.mask != nullptr && rows.halves[i] != 0.f) {
        rows.halves[i] *= static_cast<float>(p.mask[unit.plane * p.mask_row_stride + position * p.mask_stride]);
      }
    }
    for (int tile = warpgroup; tile < unit.columns; tile += kWarpgroups, ++round) {
      const int column = unit.column + tile, side = column < p.parts ? 0 : 1;
      const ColumnTerms terms = p.terms[thread / kN][column * kN + thread % kN];
      XState x_at = x_of_unit;
      if (!stays) x_at.advance(tile * p.steps);
      // A block of x that stays is released by the last tile of each warpgroup, another by the only one.
      const int releases = stays ? tile + kWarpgroups < unit.columns ? 0 : 1 : kWarpgroups;
      const auto release = [&](int x, int w) {
        if (thread < releases) shared.x_ring.free[x].arrive();
        if (thread < kCluster) shared.w_ring.free[w].arrive(thread);
      };
      shared.turns.wait(warpgroup, round);  // until the other one has seen all of its stages
      int former_x = 0, former_w = 0;
      product.accumulate_ = GMMA::ScaleOut::Zero;
      warpgroup_fence_operand(sums);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < p.steps; ++step, ++x_at, ++w_at) {
        shared.x_ring.wait_until_loaded(x_at);
        shared.w_ring.wait_until_loaded(w_at);
        if (step == p.steps - 1) shared.turns.pass_on(warpgroup);
        const Tensor a = slice.make_fragment_A(slice.partition_A(
            make_tensor(make_smem_ptr(shared.x[x_at.index()].data()), SwizzledRows<Element, kM, kK>{})));
        const Tensor w = slice.make_fragment_B(slice.partition_B(
            make_tensor(make_smem_ptr(shared.w[w_at.index()].data()), SwizzledRows<Element, kColumns, kK>{})));
        start_products(product, a, w, sums);
        if (step > 0) {
          warpgroup_wait<1>();
          release(former_x, former_w);
        }
        former_x = x_at.index();
        former_w = w_at.index();
      }
      epilogue.terms[thread / kN][thread % kN] = terms;
      if (thread == 0) tma_store_wait<0>();  // the stores of the previous results
      if (tile == warpgroup) {
        shared.measured[count % 2].wait(count / 2 & 1);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kBlocks; ++i)
          rows.moments[i] = shared.moments[count % 2][row_of_sums(thread, i / 2, i % 2)];
        shared.measure[count % 2].arrive();
      }
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      release(former_x, former_w);
      w_at.advance(p.steps);

      write(p, epilogue, rows, p.scale[side], sums, thread);
      cutlass::arch::fence_view_async_shared();
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
      if (thread == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kBlocks; ++m) {
          p.channels[side].store(epilogue.results[m].data(), column - side * p.parts, unit.place * kBlocks + m,
                                 unit.plane);
        }
      }
    }
    x_of_unit.advance(stays ? p.steps : unit.columns * p.steps);
    ++count;
  });
  if (thread == 0) tma_store_wait<0>();
}

template <class Gate, class Tile>
template <class Sums>
CUTLASS_DEVICE void StreamedPairInKernel<Gate, Tile>::write(const Parameters& p, Epilogue& shared, const Rows& rows,
                                                            float scale, const Sums& sums, int thread) {
  using namespace cute;
  using Block = Shape<Int<kPairRows>, Int<kN>>;
  const typename Tile::Result result_of;
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U16x8_STSM_T, Element>{}, result_of);
  const auto write_slice = write.get_slice(thread);
  const Tensor places = result_of.get_slice(thread).partition_C(make_identity_tensor(Block{}));
  const cutlass::NumericArrayConverter<Element, float, 2> converted;
  CUTLASS_PRAGMA_UNROLL
  for (int m = 0; m < kBlocks; ++m) {
    Tensor result = make_tensor_like<Element>(partition_fragment_C(result_of, Block{}));
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kN / 8; ++block) {  // a thread has pairs of neighbouring columns, in two rows of 16
      const int column = get<1>(places(make_coord(make_coord(0, 0, block), 0, 0)));
      const float4 values = *reinterpret_cast<const float4*>(&shared.terms[0][column]);
      const float4 gates = *reinterpret_cast<const float4*>(&shared.terms[1][column]);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const ScaleAndShift by = rows.moments[2 * m + r];
        const float half = scale * rows.halves[2 * m + r], gate_scale = Gate::kTanhScale * by.scale;
        cutlass::Array<float, 2> both;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float z = sums(make_coord(make_coord(v, r, block), m, 0));
          const float t = sums(make_coord(make_coord(v, r, block + kN / 8), m, 0));
          const float value =
              fmaf(by.scale, z, fmaf(by.shift, v == 0 ? values.x : values.z, v == 0 ? values.y : values.w));
          const float gate =
              fmaf(gate_scale, t, fmaf(by.shift, v == 0 ? gates.x : gates.z, v == 0 ? gates.y : gates.w));
          // What a nearly closed gate lets through is lost in the sum that follows.
          both[v] = Gate::from_tanh(half * value, tanh_approximate(gate));
        }
        pairs(make_coord(make_coord(0, r, block), 0, 0)) = converted(both);
      }
    }
    copy(write, write_slice.retile_S(result),
         write_slice.partition_D(as_position_independent_swizzle_tensor(
             make_tensor(make_smem_ptr(shared.results[m].data()), SwizzledTransposed<Element, kN, kPairRows>{}))));
  }
}

}  // namespace torchops::cuda::gemm
