#pragma once

// What the warps of triangle/streamed_out_kernel.cuh do, and how they share its tiles. A tile of 128 columns has two
// products, of x with the gate's weight and then of o with the projection's. The gates are complete before the product
// of o begins, and wait for it as 16 bits each: so one product at a time has registers for its sums.
//
//   load warps    one loads half of each tile of the weights, for both CTAs of a cluster; another loads blocks of 64
//                 features of x, then of 64 channels of o
//   measure       two warps measure o as it arrives
//   warpgroups    a product each, in turn, so that the epilogue of one overlaps the matrix instructions of the other
//
// A CTA computes up to three tiles of columns, called 0 to 2 below, at a time. In turn, the warpgroups compute:
//
//   tiles         first warpgroup    second warpgroup
//   three         x0                 x1
//                 x2                 o1
//                 o2                 o0
//   two           x0                 x1
//                 o0                 o1
//   one           the same as of two, but with the tiles of columns replaced by tiles of positions
//
// So x and o are read once for all columns. Of three tiles, they stay in shared memory, where the gates of tile 0 also
// pass from one warpgroup to the other. Long products of two tiles take turns several times each.

#include <cutlass/fast_math.h>

#include "cuda/gemm/sm90/triangle/streamed.cuh"

namespace torchops::cuda::gemm {

template <class Element_, class Gate, Tiling tiling>
struct StreamedPairOutKernel {
  using Element = Element_;
  static constexpr TilingSpec kTiling = kSpec<tiling>;
  static constexpr int kM = kTiling.tile_m, kN = 128, kK = 64, kCluster = kTiling.cluster_m;
  static constexpr int kTiles = kTiling.tile_n / kN, kRowTiles = kTiles == 1 ? 2 : 1;
  static constexpr int kWarpgroups = 2, kBlocks = kM / kPairRows;
  static constexpr int kJobs = kTiles == 3 ? 3 : 2;  // products of a warpgroup
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr Exactness kExactness = kExactnessOf<Element>;
  static_assert(kM == 128 && kTiling.tile_n == kTiles * kN && kTiles <= 3 && kCluster == 2 && kTiling.cluster_n == 1 &&
                kTiling.schedule == Schedule::kPingPong);

  // A gate waits as a half, times this, so that those that are nearly closed are not denormal. At most 1 times this is
  // finite.
  static constexpr float kOfGates = 32768.f;

  static constexpr int kABlocks = kTiles == 3 ? 6 : 8, kStages = 5;
  using AStages = Ring<kABlocks, /*releases=*/kWarpgroups + kBlocks>;  // and the warps that measure
  using WStages = Ring<kStages, /*releases=*/kCluster>;
  using AState = typename AStages::At;
  using WState = typename WStages::At;
  static constexpr int kABytes = kM * kK * kSize, kWBytes = kN * kK * kSize;

  using Shape = cute::Shape<cute::Int<kPairRows>, cute::Int<kN>, cute::Int<kK>>;
  using OfRows = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape, cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  using OfChannels = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape, cute::GMMA::Major::MN, cute::GMMA::Major::K>()));

  struct Gates {
    uint4 of[kM * kN / 2 / 4 / 128][128];  // of each thread
  };
  struct None {};
  struct Shared {
    cute::array_aligned<Element, kM * kK, 1024> a[kABlocks];  // rows of positions of x, or of channels of o
    cute::array_aligned<Element, kN * kK, 1024> w[kStages];
    std::conditional_t<kTiles == 3, Gates, None> gates;
    alignas(16) ColumnTerms terms[kWarpgroups][2][kN];  // of a product, and of the next
    ScaleAndShift of_o[kRowTiles][kM];
    AStages a_ring;
    WStages w_ring;
    Barrier<32 * kBlocks> measured[kRowTiles];
    Barrier<128 * kWarpgroups / kRowTiles> measure[kRowTiles];
    Turns<kWarpgroups> turns;

    CUTLASS_DEVICE void init() { init_barriers(a_ring, w_ring, measured, measure, turns); }
  };

  struct Parameters {
    PlaneMap<cute::SM90_TMA_LOAD, Element, kM, kK> x;
    PlaneMap<cute::SM90_TMA_LOAD, Element, kK, kM> o;
    TileMap<cute::SM90_TMA_LOAD_MULTICAST, Element, kN / kCluster, kK> w[2];  // the gate, the projection
    const ColumnTerms* terms[2];
    const ScaleAndShift* of_x;
    int64_t of_x_row_stride, of_x_stride;
    Element* out;
    int64_t out_plane_stride, out_position_stride;
    float eps_o;
    int n, c, d;
    int steps[2], in_turn[2];  // of each product; at most so many in a turn
    int units;                 // for each cluster of rows and each group of kTiles tiles of columns
    // Divide by the tiles in a row of positions, and by these groups. An epilogue would wait for a true division.
    cutlass::FastDivmod by_row, by_groups;

    /// Whether x, or o, stays in shared memory for all columns of a unit.
    CUTLASS_HOST_DEVICE static bool stays(int steps) { return kTiles < 3 || steps <= kABlocks; }
    /// How often it is loaded, or how many tiles of positions of it.
    CUTLASS_DEVICE int passes(int product) const { return kTiles == 1 || !stays(steps[product]) ? 2 : 1; }
    CUTLASS_HOST_DEVICE static int most_in_turn(int steps) {
      if (kTiles == 1 || (kTiles == 3 && stays(steps))) return steps;
      const int turns = (steps + kABlocks - 3) / (kABlocks - 2);
      return (steps + turns - 1) / turns;
    }
  };

  CUTLASS_DEVICE static int rank() { return static_cast<int>(cute::block_rank_in_cluster()); }

  /// What a CTA computes at a time: kTiles tiles of columns of kRowTiles tiles of positions. Past the last of these
  /// there is a nonexistent plane, which is read as zeros and not written.
  struct Unit {
    int row, column;

    CUTLASS_DEVICE Unit(const Parameters& p, int unit) {
      p.by_groups(row, column, unit);
      row = (row * kCluster + rank()) * kRowTiles;
      column *= kTiles;
    }
    CUTLASS_DEVICE int plane(const Parameters& p, int i) const { return p.by_row.div(row + i); }
    CUTLASS_DEVICE int place(const Parameters& p, int i) const { return row + i - plane(p, i) * p.by_row.divisor; }
  };
  /// The index of a CTA's `count`th unit.
  CUTLASS_DEVICE static int unit_at(int count) {
    return static_cast<int>(blockIdx.x / kCluster) + count * static_cast<int>(gridDim.x / kCluster);
  }
  template <class F>
  CUTLASS_DEVICE static void for_each_unit(const Parameters& p, const F& f) {
    for (int count = 0; unit_at(count) < p.units; ++count) f(Unit(p, unit_at(count)));
  }

  CUTLASS_DEVICE static void load_a(const Parameters& p, Shared& shared) {
    AState at;
    for_each_unit(p, [&](const Unit& unit) {
      for (int product = 0; product < 2; ++product) {
        for (int pass = 0; pass < p.passes(product); ++pass) {
          const int plane = unit.plane(p, pass % kRowTiles), place = unit.place(p, pass % kRowTiles);
          for (int step = 0; step < p.steps[product]; ++step, ++at) {
            auto& loaded = shared.a_ring.fill(at, kABytes);
            if (product == 0) {
              p.x.load(shared.a[at.index()].data(), place, step, plane, loaded);
            } else {
              p.o.load(shared.a[at.index()].data(), step, place, plane, loaded);
            }
          }
        }
      }
    });
  }

  CUTLASS_DEVICE static void load_w(const Parameters& p, Shared& shared) {
    const int rank = StreamedPairOutKernel::rank();
    WState at;
    for_each_unit(p, [&](const Unit& unit) {
      const auto load = [&](int product, int tile, int begin, int end) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = begin; step < end; ++step, ++at) {
          auto& loaded = shared.w_ring.fill(at, kWBytes);
          p.w[product].load(shared.w[at.index()].data() + rank * (kN / kCluster) * kK,
                            (unit.column + tile) * kCluster + rank, step, loaded, (1 << kCluster) - 1);
        }
      };
      CUTLASS_PRAGMA_NO_UNROLL
      for (int product = 0; product < 2; ++product) {
        const int steps = p.steps[product];
        if (kTiles == 3 && product == 1) load(product, 1, 0, steps);
        for (int begin = 0; begin < steps; begin += p.in_turn[product]) {
          const int end = min(begin + p.in_turn[product], steps);
          load(product, kTiles == 3 && product == 1 ? 2 : 0, begin, end);
          load(product, kTiles == 1 || (kTiles == 3 && product == 1) ? 0 : 1, begin, end);
        }
        if (kTiles == 3 && product == 0) load(product, 2, 0, steps);
      }
    });
  }

  /// A warp has 64 positions, two of each thread. Sums have no origin: see triangle/norms.cuh.
  CUTLASS_DEVICE static void measure(const Parameters& p, Shared& shared, int warp) {
    const cutlass::NumericArrayConverter<float, Element, 2> widen;
    const int lane = threadIdx.x % 32, position = warp * kPairRows + lane * 2;
    AState at;
    uint32_t count = 0;
    // f calls finish_reads() if it reads.
    const auto each_block = [&](int product, const auto& f) {
      for (int step = 0; step < p.steps[product]; ++step, ++at) {
        shared.a_ring.wait_until_loaded(at);
        f(shared.a[at.index()].data() + warp * (kPairRows * kK));
        __syncwarp();
        if (lane == 0) shared.a_ring.free[at.index()].arrive();
      }
    };
    const auto skip = [](const Element*) {};
    for_each_unit(p, [&](const Unit&) {
      for (int pass = 0; pass < p.passes(0); ++pass) each_block(0, skip);
      for (int i = 0; i < kRowTiles; ++i) {
        float sums[2] = {}, squares[2] = {};
        each_block(1, [&](const Element* block) {
          // Every eighth channel has its pieces in the same order. Loads of several channels at once hide each other's
          // latency.
          CUTLASS_PRAGMA_NO_UNROLL
          for (int channel = 0; channel < 8; ++channel) {
            const Element* const first = block + swizzled_piece<kK>(channel, lane / 4 * 8) + lane % 4 * 2;
            cutlass::Array<Element, 2> pairs[kK / 8];
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < kK / 8; ++j) {
              pairs[j] = *reinterpret_cast<const cutlass::Array<Element, 2>*>(first + j * (8 * kPairRows));
            }
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < kK / 8; ++j) {
              const auto values = widen(pairs[j]);
              CUTLASS_PRAGMA_UNROLL
              for (int v = 0; v < 2; ++v) {
                sums[v] += values[v];
                squares[v] = fmaf(values[v], values[v], squares[v]);
              }
            }
          }
          finish_reads();
        });
        shared.measure[i].wait((count & 1) ^ 1);
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          auto moments = ScaleAndShift::of(0.f, sums[v], squares[v], p.d, p.eps_o);
          moments.scale *= 1.f / kOfGates;
          shared.of_o[i][position + v] = moments;
        }
        shared.measured[i].arrive();
      }
      for (int pass = kRowTiles; pass < p.passes(1); ++pass) each_block(1, skip);
      ++count;
    });
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 232, compute>,
                            Warps<40, OneThread<load_w>, OneThread<load_a>, WholeWarp<measure, 2>>>;

 private:
  // The same, but the compiler doesn't know: what is computed from it takes no registers before.
  CUTLASS_DEVICE static int opaque_to_compiler(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  // Doesn't keep what was read before.
  CUTLASS_DEVICE static float4 read_again(const ColumnTerms* two) {
    float4 terms;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(terms.x), "=f"(terms.y), "=f"(terms.z), "=f"(terms.w)
                 : "r"(cute::cast_smem_ptr_to_uint(two)));
    return terms;
  }
  template <class Sums, class Pairs>
  CUTLASS_DEVICE static void make_gates(const ColumnTerms* terms, const ScaleAndShift (&of_x)[kBlocks][2],
                                        const Sums& sums, Pairs& pairs, int thread);
  template <class Sums, class Pairs>
  CUTLASS_DEVICE static void write(const Parameters& p, const ColumnTerms* terms, const ScaleAndShift (&of_o)[kM],
                                   const Sums& sums, const Pairs& pairs, int plane, int position, int column,
                                   int thread);
};

}  // namespace torchops::cuda::gemm
