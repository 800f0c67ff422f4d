#pragma once

// The gradients of a transition's weights in one pass over its rows: the second half of transition/dx.cuh, whose
// xhat it reads. A CTA has 64 of the hidden features, and keeps their weights in shared memory for all rows;
// gate, up and dh are recomputed, and
//
//   dgate += da.T @ xhat;  dup += du.T @ xhat;  ddown.T += p.T @ g;  and the sums of da, du and g over the rows
//
//   load warp      64 rows of xhat and of g -> a stage of shared memory
//   2 makers       take the stages in turn: a, u and dh in registers; da, du and p to shared memory
//   1 adder        the products of all stages, whose sums stay in its registers
//   another warp   the sums of g; CTAs with different features sum different rows

#include "cuda/gemm/sm90/transition/dx.cuh"
#include "cuda/gemm/sm90/weight_sums.cuh"

namespace torchops::cuda::gemm {

/// What a CTA writes, and also the total over all CTAs: for each slice of 64 hidden features, the gradients of gate, of
/// up, and of down transposed; those of the biases of gate and up; and a share of that of down's bias.
template <int kC, int kSlice>
struct FeedForwardSums {
  float weights[3][kSlice][kC], biases[2][kSlice], down_bias[kC];
};

template <class Element_, class F, NarrowTiling tiling>
struct FeedForwardDwKernel {
  using Element = Element_;
  using Slopes = FeedForwardSlopes<F, Element>;
  static constexpr int kRows = kSpec<tiling>.rows, kC = kSpec<tiling>.most_k, kMostHidden = 512, kSlice = 64;
  // Two CTAs that share the loads of rows gain nothing with many rows, and wait for each other with few.
  static constexpr int kCluster = 1, kMakers = 2, kStages = 4;
  static constexpr int kSize = static_cast<int>(sizeof(Element)), kPiece = 64 * 64;
  static constexpr int kWeightBytes = 3 * kSlice * kC * kSize, kStageBytes = 2 * kRows * kC * kSize;
  static_assert(kRows == 64 && kC == 128);
  using Stages = Ring<kStages, /*releases=*/2>;  // products, and the sums of g
  using Sums = FeedForwardSums<kC, kSlice>;

  struct Rows {
    cute::array_aligned<Element, kRows * kC, 1024> xhat, grad;
  };
  struct HiddenRows {
    cute::array_aligned<Element, kRows * 2 * kSlice, 1024> cotangents;  // columns of da, then of du
    cute::array_aligned<Element, kRows * kSlice, 1024> value;
  };
  struct Shared {
    cute::array_aligned<Element, 2 * kSlice * kC, 1024> factors;  // rows of gate, then of up
    cute::array_aligned<Element, kC * kSlice, 1024> down;
    Rows rows[kStages];
    HiddenRows hidden_rows[kMakers];  // finally the sums of biases
    alignas(16) float bias[2][kSlice];
    LoadBarrier<> weights_loaded;
    Stages ring;
    Barrier<128> full[kMakers];
    Barrier<1> taken[kMakers];

    CUTLASS_DEVICE void init() { init_barriers(weights_loaded, ring, full, taken); }
  };

  using LoadRows = TileMap<cute::SM90_TMA_LOAD, Element, kRows, 64>;
  using LoadWeight = TileMap<cute::SM90_TMA_LOAD, Element, 64, 64>;
  struct Parameters {
    LoadRows xhat, grad;
    LoadWeight gate, up, down;
    const float* bias;  // as in transition/dx.cuh
    Sums* sums;         // for each group of CTAs, for each slice
    int slices, groups, row_tiles;
    bool accumulate, sums_grad;  // adds to the existing sums; also sums g

    /// Each group goes through its own tiles.
    CUTLASS_DEVICE int slice() const { return static_cast<int>(blockIdx.x) % slices; }
    CUTLASS_DEVICE int group() const { return static_cast<int>(blockIdx.x) / slices; }
  };

  using Major = cute::GMMA::Major;
  template <int n, int k, Major major_a, Major major_b>
  using Product = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<n>, cute::Int<k>>, major_a,
                                 major_b>()));
  using ProductFactors = Product<2 * kSlice, kC, Major::K, Major::K>;
  using ProductDown = Product<kSlice, kC, Major::K, Major::MN>;
  using ProductW = Product<kC, kRows, Major::MN, Major::MN>;

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    const int slice = p.slice();
    shared.weights_loaded.arrive_and_expect_tx(kWeightBytes);
    for (int half = 0; half < kC / 64; ++half) {
      p.gate.load(shared.factors.data() + half * 2 * kPiece, slice, half, shared.weights_loaded);
      p.up.load(shared.factors.data() + (half * 2 + 1) * kPiece, slice, half, shared.weights_loaded);
      p.down.load(shared.down.data() + half * kPiece, half, slice, shared.weights_loaded);
    }
    typename Stages::At at;
    for (int tile = p.group(); tile < p.row_tiles; tile += p.groups, ++at) {
      Rows& rows = shared.rows[at.index()];
      auto& loaded = shared.ring.fill(at, kStageBytes);
      for (int part = 0; part < kC / 64; ++part) {
        p.xhat.load(rows.xhat.data() + part * kPiece, tile, part, loaded);
        p.grad.load(rows.grad.data() + part * kPiece, tile, part, loaded);
      }
    }
  }

  CUTLASS_DEVICE static void make(const Parameters& p, Shared& shared, int maker);
  CUTLASS_DEVICE static void add(const Parameters& p, Shared& shared);
  CUTLASS_DEVICE static void add_grad(const Parameters& p, Shared& shared);

  using Roles = gemm::Roles<Warpgroups<kMakers, 128, make>, Warpgroups<1, 224, add>,
                            Warps<32, OneThread<load>, WholeWarp<add_grad>>>;
};

template <class Element, class F, NarrowTiling tiling>
CUTLASS_DEVICE void FeedForwardDwKernel<Element, F, tiling>::make(const Parameters& p, Shared& shared, int maker) {
  using namespace cute;
  const int thread = threadIdx.x % 128, in_quad = thread % 4 * 2, slice = p.slice();
  const auto view = [](Element* data, auto layout) { return make_tensor(make_smem_ptr(data), layout); };
  const auto swizzled = [&](Element* data, auto layout) {
    return as_position_independent_swizzle_tensor(view(data, layout));
  };
  ProductFactors product_factors;
  ProductDown product_down;
  Tensor hidden = partition_fragment_C(product_factors, Shape<Int<kRows>, Int<2 * kSlice>>{});  // a, then u
  Tensor dh = partition_fragment_C(product_down, Shape<Int<kRows>, Int<kSlice>>{});
  Tensor cotangents = make_tensor_like<Element>(hidden);
  Tensor value = make_tensor_like<Element>(dh);
  constexpr int count = decltype(size(dh))::value;
  const auto write_cotangents = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_factors);
  const auto write_value = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_down);
  const auto cotangents_slice = write_cotangents.get_slice(thread);
  const auto value_slice = write_value.get_slice(thread);
  const cutlass::NumericArrayConverter<Element, float, 2> round;
  using InRows = SwizzledRows<Element, kRows, kC>;
  const auto multiply = [&](auto& product, Element* a, Element* b, auto layout_b, auto& sums) {
    const auto of_product = product.get_slice(0);
    const Tensor of_a = of_product.make_fragment_A(of_product.partition_A(view(a, InRows{})));
    const Tensor of_b = of_product.make_fragment_B(of_product.partition_B(view(b, layout_b)));
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(of_a); ++block) {
      cute::gemm(product, of_a(_, _, block), of_b(_, _, block), sums);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
  };

  for (int i = static_cast<int>(threadIdx.x) % (128 * kMakers); i < 2 * kSlice; i += 128 * kMakers) {
    shared.bias[i / kSlice][i % kSlice] = p.bias[i / kSlice * kMostHidden + slice * kSlice + i % kSlice];
  }
  cutlass::arch::NamedBarrier::sync(128 * kMakers, kMakers);
  float sums[2][kSlice / 32] = {};
  shared.weights_loaded.wait(0);
  HiddenRows& hidden_rows = shared.hidden_rows[maker];
  int turn = maker;  // index among the group's tiles
  for (int tile = p.group() + maker * p.groups; tile < p.row_tiles; tile += kMakers * p.groups, turn += kMakers) {
    const int stage = turn % kStages;
    Rows& rows = shared.rows[stage];
    shared.ring.loaded[stage].wait(turn / kStages % 2);
    warpgroup_fence_operand(hidden);
    warpgroup_fence_operand(dh);
    warpgroup_arrive();
    multiply(product_factors, rows.xhat.data(), shared.factors.data(), SwizzledRows<Element, 2 * kSlice, kC>{}, hidden);
    multiply(product_down, rows.grad.data(), shared.down.data(), SwizzledTransposed<Element, kC, kSlice>{}, dh);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(hidden);
    warpgroup_fence_operand(dh);

    Tensor pairs = recast<cutlass::Array<Element, 2>>(cotangents);
    Tensor value_pairs = recast<cutlass::Array<Element, 2>>(value);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kSlice / 32; ++group) {
      float columns[2][8] = {};
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 16; j += 2) {  // pairs of neighbouring columns, alternating between two rows
        const int i = 16 * group + j, column = i / 4 * 8 + in_quad;
        const float2 gate = *reinterpret_cast<const float2*>(&shared.bias[0][column]);
        const float2 up = *reinterpret_cast<const float2*>(&shared.bias[1][column]);
        cutlass::Array<float, 2> da, du, of_p;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float a = fmaf(Slopes::kScale, hidden(i + v), v == 0 ? gate.x : gate.y);
          const float u = hidden(count + i + v) + (v == 0 ? up.x : up.y);
          Slopes::of(a, u, dh(i + v), da[v], du[v], of_p[v]);
          columns[0][j / 4 * 2 + v] += da[v];
          columns[1][j / 4 * 2 + v] += du[v];
        }
        pairs(i / 2) = round(da);
        pairs((count + i) / 2) = round(du);
        value_pairs(i / 2) = round(of_p);
      }
      sums[0][group] += sum_of_warp(columns[0]);
      sums[1][group] += sum_of_warp(columns[1]);
    }
    shared.taken[maker].wait(turn / kMakers % 2 ^ 1);  // doesn't block in the first round
    copy(write_cotangents, cotangents_slice.retile_S(cotangents),
         cotangents_slice.partition_D(
             swizzled(hidden_rows.cotangents.data(), SwizzledRows<Element, kRows, 2 * kSlice>{})));
    copy(write_value, value_slice.retile_S(value),
         value_slice.partition_D(swizzled(hidden_rows.value.data(), SwizzledRows<Element, kRows, kSlice>{})));
    cutlass::arch::fence_view_async_shared();
    shared.full[maker].arrive();
  }

  // The adder no longer reads `hidden_rows`.
  if (turn > maker) shared.taken[maker].wait((turn / kMakers - 1) % 2);
  using Scratch = float[2][4][kSlice];  // for each warp
  static_assert(sizeof(Scratch) <= sizeof(HiddenRows));
  const auto scratch = [&](int of) -> Scratch& { return *reinterpret_cast<Scratch*>(&shared.hidden_rows[of]); };
  const int lane = thread % 32;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kSlice / 32; ++group) {  // as in write_column_sums()
      const int column = 8 * group + lane / 4;
      scratch(maker)[i][thread / 32][column / 2 * 8 + lane % 4 * 2 + column % 2] = sums[i][group];
    }
  }
  cutlass::arch::NamedBarrier::sync(128 * kMakers, kMakers);
  const int i = static_cast<int>(threadIdx.x) % (128 * kMakers);
  static_assert(2 * kSlice <= 128 * kMakers);
  if (i >= 2 * kSlice) return;
  float sum = 0.f;
  for (int of = 0; of < kMakers; ++of) {
    for (int warp = 0; warp < 4; ++warp) sum += scratch(of)[i / kSlice][warp][i % kSlice];
  }
  float& to = p.sums[blockIdx.x].biases[i / kSlice][i % kSlice];
  to = p.accumulate ? to + sum : sum;
}

template <class Element, class F, NarrowTiling tiling>
CUTLASS_DEVICE void FeedForwardDwKernel<Element, F, tiling>::add_grad(const Parameters& p, Shared& shared) {
  using Quad = cutlass::AlignedArray<Element, 4>;
  const cutlass::NumericArrayConverter<float, Element, 4> widen;
  const int lane = static_cast<int>(threadIdx.x) % 32, slice = p.slice();
  float sums[4] = {};
  typename Stages::At at;
  for (int tile = p.group(); tile < p.row_tiles; tile += p.groups, ++at) {
    shared.ring.wait_until_loaded(at);
    const Element* const grad = shared.rows[at.index()].grad.data() + lane % 2 * 4;
    for (int part = slice; p.sums_grad && part < kRows / 8; part += p.slices) {
      for (int row = part * 8; row < part * 8 + 8; ++row) {
        const auto values = widen(*reinterpret_cast<const Quad*>(grad + swizzled_piece<kRows>(row, lane / 2 * 8)));
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 4; ++v) sums[v] += values[v];
      }
    }
    finish_reads();
    __syncwarp();
    if (lane == 0) shared.ring.free[at.index()].arrive();
  }
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < 4; ++v) {
    float& to = p.sums[blockIdx.x].down_bias[lane * 4 + v];
    to = p.accumulate ? to + sums[v] : sums[v];
  }
}

template <class Element, class F, NarrowTiling tiling>
CUTLASS_DEVICE void FeedForwardDwKernel<Element, F, tiling>::add(const Parameters& p, Shared& shared) {
  using namespace cute;
  const int thread = threadIdx.x % 128;
  const auto view = [](Element* data, auto layout) { return make_tensor(make_smem_ptr(data), layout); };
  ProductW product;
  const auto slice = product.get_slice(0);
  Tensor gate = partition_fragment_C(product, Shape<Int<kSlice>, Int<kC>>{});
  Tensor up = make_fragment_like(gate), down = make_fragment_like(gate);
  Sums& to = p.sums[blockIdx.x];
  const Tensor places = product.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kSlice>, Int<kC>>{}));
  const auto each = [&](const auto& f) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(gate); i += 2) {
      const auto [row, column] = places(i);
      const auto pair = [&](int weight) { return reinterpret_cast<float2*>(&to.weights[weight][row][column]); };
      f(gate, i, pair(0));
      f(up, i, pair(1));
      f(down, i, pair(2));
    }
  };
  clear(gate);
  clear(up);
  clear(down);
  if (p.accumulate) {
    each([](auto& sums, int i, const float2* from) {
      sums(i) = from->x;
      sums(i + 1) = from->y;
    });
  }
  product.accumulate_ = GMMA::ScaleOut::One;
  const auto multiply = [&](Element* a, Element* b, auto& sums) {
    const Tensor of_a = slice.make_fragment_A(slice.partition_A(view(a, SwizzledTransposed<Element, kRows, kSlice>{})));
    const Tensor of_b = slice.make_fragment_B(slice.partition_B(view(b, SwizzledTransposed<Element, kRows, kC>{})));
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(of_a); ++block) {
      cute::gemm(product, of_a(_, _, block), of_b(_, _, block), sums);
    }
  };
  int turn = 0;
  for (int tile = p.group(); tile < p.row_tiles; tile += p.groups, ++turn) {
    const int stage = turn % kStages, maker = turn % kMakers;
    Rows& rows = shared.rows[stage];
    HiddenRows& hidden_rows = shared.hidden_rows[maker];
    shared.ring.loaded[stage].wait(turn / kStages % 2);
    shared.full[maker].wait(turn / kMakers % 2);
    warpgroup_fence_operand(gate);
    warpgroup_fence_operand(up);
    warpgroup_fence_operand(down);
    warpgroup_arrive();
    multiply(hidden_rows.cotangents.data(), rows.xhat.data(), gate);
    multiply(hidden_rows.cotangents.data() + kPiece, rows.xhat.data(), up);
    multiply(hidden_rows.value.data(), rows.grad.data(), down);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(gate);
    warpgroup_fence_operand(up);
    warpgroup_fence_operand(down);
    if (thread == 0) {
      shared.taken[maker].arrive();
      shared.ring.free[stage].arrive();
    }
  }
  each([](const auto& sums, int i, float2* result) { *result = make_float2(sums(i), sums(i + 1)); });
}

}  // namespace torchops::cuda::gemm
