#pragma once

// The input step of a triangle update: layer norm, two gated linear units and the mask, from rows of features to
// channels of positions, in one pass over x.
//
// A CTA keeps all weights in shared memory, and tiles of 128 positions stream through it, in two halves. A computing
// warpgroup reads a half once and normalises it in registers, where it stays as the operand of all products: shared
// memory, which would otherwise deliver it to each product again, is as busy here as the matrix instructions. While
// these multiply one half, the warpgroup turns the sums of the other half into results. It stores them transposed, and
// TMA writes them to the channels. These writes limit the kernel; pieces of 256 bytes of a channel take less time than
// twice as many of 128.

#include "cuda/gemm/padded_positions.cuh"
#include "cuda/gemm/sm90/operand_norm.cuh"
#include "cuda/gemm/sm90/triangle/channels.cuh"
#include "cuda/gemm/sm90/triangle/steps.cuh"

namespace torchops::cuda::gemm {

template <class Element_, class Gate, NarrowTiling tiling, bool lines>
struct PairInKernel {
  using Element = Element_;
  static constexpr int kRows = kPairRows, kColumns = kPairColumns, kN = kSpec<tiling>.tile_n, kK = kSpec<tiling>.most_k;
  static constexpr int kParts = kN / kColumns, kProducts = 2, kWeights = 2 * kParts * kProducts, kSteps = 2 * kParts;
  static constexpr int kSize = static_cast<int>(sizeof(Element)), kComputing = 2, kHalves = 2, kRegisters = 240;
  static constexpr int kStageBytes = kRows * kK * kSize, kWeightBytes = kColumns * kK * kSize;
  static constexpr int kResults = kHalves * kRows * kColumns;
  static constexpr int kRoom =
      kMostSharedBytes - 512 - kWeights * (kWeightBytes + 4 * kColumns) - kComputing * kResults * kSize;
  // A half has the same stages in every round, so that the warpgroups need not wait for them in turn.
  static constexpr int kOfRound = kComputing * kHalves;
  static constexpr int kRounds = std::min(kSpec<tiling>.stages, kRoom / kStageBytes) / kOfRound;
  static constexpr int kStages = kRounds * kOfRound;
  // The scale of the gate's product; the biases of its columns have it too.
  static constexpr float kGateScale = Gate::kTanhScale;
  static_assert(kSpec<tiling>.rows == kRows && kRounds > 0);
  using Stages = Ring<kStages, /*releases=*/4>;  // the warps of the warpgroup

  struct Shared {
    cute::array_aligned<Element, kColumns * kK, 1024> w[2][kParts][kProducts];
    union {
      cute::array_aligned<Element, kResults, 1024> results[kComputing];
      NormVectors<kK> norm;  // until it is folded into the weights
    };
    cute::array_aligned<Element, kRows * kK, 1024> stages[kStages];
    alignas(16) float bias[2][kParts][kProducts][kColumns];  // including that of the norm
    LoadBarrier<> w_loaded;
    Stages ring;

    CUTLASS_DEVICE void init() { init_barriers(w_loaded, ring); }
  };

  using Weights = TileMap<cute::SM90_TMA_LOAD, Element, kColumns, kK>;
  using Channels = ChannelMap<Element, kColumns, lines>;
  struct Side {
    Weights w[kProducts];
    Channels channels;
    const Element* bias[kProducts];
    float scale;
  };
  struct Parameters {
    PlaneMap<cute::SM90_TMA_LOAD, Element, kRows, kK> x;
    Side sides[2];
    const Element* mask;
    NormValues<Element> norm[2];
    int64_t mask_row_stride, mask_stride;
    float eps;
    int c, d;
    PairTiles halves;

    CUTLASS_HOST_DEVICE static int64_t tiles(const PairTiles& halves) { return (halves.count() + 1) / kHalves; }
    CUTLASS_DEVICE int64_t tiles() const { return tiles(halves); }
    /// The halves of a tile follow each other in the order of all, so they may be in two rows. After the last one, TMA
    /// reads zeros and does not write.
    CUTLASS_DEVICE void boxes(int64_t tile, PositionBox (&boxes)[kHalves]) const {
      boxes[0] = {halves.row(kHalves * tile), halves.place_in_row(kHalves * tile)};
      boxes[1] = {boxes[0].row, boxes[0].place + 1};
      if (!lines && boxes[1].place == halves.in_row()) boxes[1] = {boxes[0].row + 1, 0};
    }
  };

  using Product = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kK>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    shared.w_loaded.arrive_and_expect_tx(kWeights * kWeightBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int side = 0; side < 2; ++side) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kProducts; ++i) {
          p.sides[side].w[i].load(shared.w[side][part][i].data(), part, 0, shared.w_loaded);
        }
      }
    }
    typename Stages::At at;
    for (int64_t tile = blockIdx.x; tile < p.tiles(); tile += gridDim.x) {
      PositionBox boxes[kHalves];
      p.boxes(tile, boxes);
      for (const PositionBox& box : boxes) {
        auto& loaded = shared.ring.fill(at, kStageBytes);
        p.x.load(shared.stages[at.index()].data(), box.place, 0, box.row, loaded);
        ++at;
      }
    }
  }

  // Called by the computing warpgroups while the first tiles are being loaded.
  CUTLASS_DEVICE static void fold_norms(const Parameters& p, Shared& shared) {
    constexpr int threads = 128 * kComputing;
    shared.norm.load(p.norm[0], p.norm[1], p.c, threads);
    sync_computing<kComputing>();
    shared.w_loaded.wait(0);
    // The same number of rows for each thread; why: fold_norms() of triangle/gradients_tiles.cuh.
    static_assert(kWeights * kColumns % threads == 0);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < kWeights * kColumns; first += threads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int side = i / (kWeights * kColumns / 2), part = i / (kProducts * kColumns) % kParts;
      const int product = i / kColumns % kProducts, row = i % kColumns, channel = part * kColumns + row;
      const Element* const bias = p.sides[side].bias[product];
      shared.bias[side][part][product][row] =
          fold_norm<kColumns>(shared.w[side][part][product].data(), row, shared.norm,
                              bias == nullptr || channel >= p.d ? nullptr : bias + channel,
                              product == 0 ? 1.f : kGateScale)
              .bias;
    }
    cutlass::arch::fence_view_async_shared();
    sync_computing<kComputing>();
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  static constexpr int kCluster = 1;
  using Roles = gemm::Roles<Warpgroups<kComputing, kRegisters, compute>, Warps<24, OneThread<load>>>;
};

template <class Element, class Gate, NarrowTiling tiling, bool lines>
CUTLASS_DEVICE void PairInKernel<Element, Gate, tiling, lines>::compute(const Parameters& p, Shared& shared,
                                                                        int warpgroup) {
  using namespace cute;
  const int thread = threadIdx.x % 128;
  Product product;
  const auto slice = product.get_slice(thread);
  // Of both halves of a tile, the operand, the sums of both products, and the factors of a thread's two positions.
  Tensor x0 = make_tensor<Element>(RegisterOperand<kK>{}), x1 = make_tensor<Element>(RegisterOperand<kK>{});
  Tensor z0 = partition_fragment_C(product, Shape<Int<kRows>, Int<kColumns>>{});
  Tensor t0 = make_fragment_like(z0), z1 = make_fragment_like(z0), t1 = make_fragment_like(z0);
  float factors[kHalves][2];
  const Tensor places = slice.partition_C(make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{}));
  const auto read = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product);
  const auto read_slice = read.get_slice(thread);
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U16x8_STSM_T, Element>{}, product);
  const auto write_slice = write.get_slice(thread);
  Element* const results = shared.results[warpgroup].data();

  // Waits for a stage, and normalises what it contains.
  const auto take = [&](auto& x, int stage, uint32_t phase) {
    shared.ring.loaded[stage].wait(phase);
    copy(read,
         read_slice.partition_S(as_position_independent_swizzle_tensor(
             make_tensor(make_smem_ptr(shared.stages[stage].data()), SwizzledRows<Element, kRows, kK>{}))),
         read_slice.retile_D(x));
    finish_reads();
    __syncwarp();
    if (thread % 32 == 0) shared.ring.free[stage].arrive();
    float rstd[2];
    normalize_rows<Element>(x, p.c, p.eps, rstd);
  };
  // Starts both products of a half.
  const auto multiply = [&](auto& x, auto& z, auto& t, int side, int part) {
    const auto weight = [&](int i) {
      return slice.make_fragment_B(slice.partition_B(
          make_tensor(make_smem_ptr(shared.w[side][part][i].data()), SwizzledRows<Element, kColumns, kK>{})));
    };
    warpgroup_fence_operand(z);
    warpgroup_fence_operand(t);
    warpgroup_fence_operand(x);
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(x); ++block) {
      cute::gemm(product, x(_, _, block), weight(0)(_, _, block), z);
      cute::gemm(product, x(_, _, block), weight(1)(_, _, block), t);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  // From the sums of finished products to results in shared memory; with the second half, TMA starts to write them.
  const auto finish = [&](auto& z, auto& t, auto half, int side, int part, const PositionBox(&boxes)[kHalves]) {
    warpgroup_fence_operand(z);
    warpgroup_fence_operand(t);
    Tensor result = make_tensor_like<Element>(z);
    const cutlass::NumericArrayConverter<Element, float, 2> to_element;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
    const float scale = 0.5f * p.sides[side].scale;
    const float halves[2] = {scale * factors[half][0], scale * factors[half][1]};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(z); i += 2) {  // pairs of neighbouring columns, alternating between two rows
      const int in_tile = get<1>(places(i)), of_thread = i / 2 % 2;
      const float2 bias = *reinterpret_cast<const float2*>(&shared.bias[side][part][0][in_tile]);
      const float2 gate_bias = *reinterpret_cast<const float2*>(&shared.bias[side][part][1][in_tile]);
      cutlass::Array<float, 2> values;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 2; ++v) {
        const float value = z(i + v) + (v == 0 ? bias.x : bias.y);
        const float gate = fmaf(kGateScale, t(i + v), v == 0 ? gate_bias.x : gate_bias.y);
        // What a nearly closed gate lets through is lost in the sum that follows.
        values[v] = Gate::from_tanh(halves[of_thread] * value, tanh_approximate(gate));
      }
      pairs(i / 2) = to_element(values);
    }
    if (half == 0) {
      if (thread == 0) tma_store_wait<0>();
      sync_warpgroup(warpgroup);  // until TMA has read the previous results
    }
    Tensor to_results = write_slice.partition_D(as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(results), typename Channels::Tile{}))(_, _, half));
    copy(write, write_slice.retile_S(result), to_results);
    if (half == 0) return;
    cutlass::arch::fence_view_async_shared();
    sync_warpgroup(warpgroup);
    if (thread == 0) p.sides[side].channels.store(results, part, boxes);
  };

  fold_norms(p, shared);
  uint32_t round = 0;
  for (int64_t tile = blockIdx.x + int64_t{warpgroup} * gridDim.x; tile < p.tiles();
       tile += int64_t{kComputing} * gridDim.x, ++round) {
    PositionBox boxes[kHalves];
    p.boxes(tile, boxes);
    // After the last position of a row there are zeros, which add nothing to products.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kHalves; ++i) {
      const PositionBox& box = boxes[i / 2];
      const int position = box.place * kRows + get<0>(places(2 * (i % 2)));
      const bool exists = position < p.halves.n && box.row < p.halves.rows;
      float& factor = factors[i / 2][i % 2];
      factor = exists ? 1.f : 0.f;
      if (p.mask != nullptr && exists) {
        factor = static_cast<float>(p.mask[box.row * p.mask_row_stride + position * p.mask_stride]);
      }
    }
    const int stage = static_cast<int>(round % kRounds) * kOfRound + kHalves * warpgroup;
    const uint32_t phase = round / kRounds & 1;
    take(x0, stage, phase);
    multiply(x0, z0, t0, 0, 0);
    take(x1, stage + 1, phase);
    // Unrolled, so that the compiler sees which sums are in flight.
    for_each(make_int_sequence<kSteps>{}, [&](auto step) {
      constexpr int side = step / kParts, part = step % kParts, next = step + 1;
      multiply(x1, z1, t1, side, part);
      warpgroup_wait<1>();
      finish(z0, t0, Int<0>{}, side, part, boxes);
      if constexpr (next < kSteps) {
        multiply(x0, z0, t0, next / kParts, next % kParts);
        warpgroup_wait<1>();
      } else {
        warpgroup_wait<0>();
      }
      finish(z1, t1, Int<1>{}, side, part, boxes);
    });
  }
  if (thread == 0) tma_store_wait<0>();
}

/// channels[s][h][i][k] = (z @ value[s].T + bias) * sigmoid(z @ gate[s].T + bias) * mask[i][k] * scale[s] for the h-th
/// column, where z is the layer norm of x[i][k]; 0 from the n-th k up to padded_positions(), and perhaps further if
/// p.owns_gaps.
template <class Gate>
struct PairIn {
  template <Element element, NarrowTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    template <bool lines>
    using Kernel = PairInKernel<T, Gate, tiling, lines>;

    static Status prepare(const PairProblem& p, int64_t&) {
      if (p.c > Kernel<true>::kK || p.d > Kernel<true>::kN) return Status::not_for_me();
      int blocks = 0;
      return Status::of(has_lines(p) ? blocks_of<Kernel<true>>(p, blocks) : blocks_of<Kernel<false>>(p, blocks));
    }

    static Status run(const PairProblem& p, cudaStream_t stream) {
      return has_lines(p) ? run<Kernel<true>>(p, stream) : run<Kernel<false>>(p, stream);
    }

   private:
    /// Whether rows of positions have an even number of boxes, and end with a whole one, or may be treated as such.
    static bool has_lines(const PairProblem& p) {
      return PairTiles{p.n, p.rows}.in_row() % 2 == 0 && p.row_stride % kPairRows == 0 &&
             (p.owns_gaps || padded_positions<T>(p.n) % kPairRows == 0);
    }

    template <class Kernel>
    static cudaError_t blocks_of(const PairProblem& p, int& blocks) {
      return Persistent<Kernel>::resident(Kernel::Parameters::tiles({p.n, p.rows}), blocks);
    }

    template <class Kernel>
    static Status run(const PairProblem& p, cudaStream_t stream) {
      const PairTiles halves{p.n, p.rows};
      const auto fill = [&](auto& parameters, TileMaps& maps, int) {
        maps(parameters.x, p.x, p.n, p.c, p.rows);
        for (int s = 0; s < 2; ++s) {
          auto& side = parameters.sides[s];
          maps(side.w, p.value[s].weight, p.gate[s].weight, p.d, p.c);
          maps(side.channels, {p.channels[s], s == 0 ? p.channel_stride : p.second_channel_stride, p.row_stride}, p.d,
               padded_positions<T>(p.n), p.rows);
          side.bias[0] = static_cast<const T*>(p.value[s].bias);
          side.bias[1] = static_cast<const T*>(p.gate[s].bias);
          side.scale = p.scale[s];
        }
        parameters.mask = static_cast<const T*>(p.mask);
        parameters.mask_row_stride = p.mask_row_stride;
        parameters.mask_stride = p.mask_stride;
        parameters.norm[0] = {p.norm_x.weight};
        parameters.norm[1] = {p.norm_x.bias};
        parameters.eps = p.norm_x.eps;
        parameters.c = p.c;
        parameters.d = p.d;
        parameters.halves = halves;
      };
      return Persistent<Kernel>::run(Kernel::Parameters::tiles(halves), stream, fill);
    }
  };
};

}  // namespace torchops::cuda::gemm
