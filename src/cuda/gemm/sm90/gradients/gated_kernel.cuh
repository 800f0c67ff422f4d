#pragma once

// All gradients of a rule of products/resident_weights.cuh in one pass over the rows. Forward saves nothing: its
// products are recomputed, which costs less than reading them.
//
//   load warp    x, grad, and c if the rule reads it -> a stage of shared memory, by TMA, several ahead
//   warpgroups   z = x @ w.T for each weight, in registers;
//              the rule's dz for each, over grad and the buffer next to it; dc, over c;
//              dx = sum of dz @ w, to its own buffer;  dw += dz.T @ x;  dbias += dz
//
// The sums of dw and of dbias stay in registers for all rows. At the end each CTA writes them, and a second kernel adds
// them in the order of the CTAs. dx and dc are stored by TMA while the products of dw run.
//
// Or x and dx are float32 (`float32_x`): the load warp's tiles of x are ahead in buffers of their own, from which the
// other warps of its warpgroup round them to a stage; dx is stored from registers.

#include <cutlass/numeric_conversion.h>

#include <cute/algorithm/gemm.hpp>

#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm90/pointwise.cuh"
#include "cuda/gemm/sm90/skeleton/persistent.cuh"
#include "cuda/gemm/sm90/skeleton/tma.cuh"
#include "cuda/gemm/sm90/weight_sums.cuh"

namespace torchops::cuda::gemm {

template <class Rule_, class Element_, GradientTiling tiling, bool float32_x>
struct GatedGradientsKernel {
  using Rule = Rule_;
  using Element = Element_;
  static constexpr bool kXIsFloat32 = float32_x;
  static constexpr int kRows = 64, kN = kSpec<tiling>.most_n, kK = kSpec<tiling>.most_k;
  static constexpr int kProducts = Rule::kProducts, kSize = static_cast<int>(sizeof(Element));
  static constexpr int kWarpgroups = kSpec<tiling>.consumers, kConsumers = 128 * kWarpgroups;
  // A tile is divided among as many warpgroups as have 64 rows of dw each. If there are more, groups of them take tiles
  // in turn, each with its own sums, and the pointwise part of one group overlaps the products of another.
  static constexpr int kDivision = std::min(kN / 64, kWarpgroups), kGroups = kWarpgroups / kDivision;
  static constexpr int kGroupThreads = 128 * kDivision;
  static constexpr int kLoadBytes = kRows * ((float32_x ? 0 : kK) + kN + (Rule::kReadsC ? kN : 0)) * kSize;
  // Of dx, one for each group; or of x in float32.
  using BufferElement = std::conditional_t<float32_x, float, Element>;
  static constexpr int kBuffers = float32_x ? 2 : kGroups;
  static constexpr int kBufferBytes = kRows * kK * static_cast<int>(sizeof(BufferElement));
  static constexpr int kRoundingWarps = 3, kRoundingThreads = 32 * kRoundingWarps;
  // Besides x and grad: the second of two dz, or c.
  static constexpr int kStageBytes = kRows * (kK + 2 * kN) * kSize;
  static constexpr int kWeightBytes = kProducts * kN * kK * kSize;
  static constexpr int kRoom = kMostSharedBytes - 1024 - kWeightBytes - kBuffers * kBufferBytes - kProducts * kN * 4;
  // A group always uses the same stages, so that the parity of a barrier tells its phases apart.
  static constexpr int kStages = std::min(kRoom / kStageBytes, 6) / kGroups * kGroups;
  static constexpr Exactness kExactness = kExactnessOf<Element>;
  static_assert(kStages >= 2 * kGroups && (kProducts == 2) != Rule::kReadsC);
  // A stage is loaded with its bytes, and when each thread that rounds is done; it is free after each warp whose
  // products have read it, and for dc also the thread whose store has.
  using Stages = Ring<kStages, kGroupThreads / 32 + (Rule::kReadsC ? 1 : 0), 1 + (float32_x ? kRoundingThreads : 0)>;
  using Buffers = Ring<kBuffers, kRoundingThreads>;

  template <int rows, int columns>
  using Rows = SwizzledRows<Element, rows, columns>;
  template <int rows, int columns>
  using Transposed = SwizzledTransposed<Element, rows, columns>;

  struct Shared {
    struct Stage {
      cute::array_aligned<Element, kRows * kK, 1024> x;
      cute::array_aligned<Element, kRows * kN, 1024> grad;    // then dz of the first product
      cute::array_aligned<Element, kRows * kN, 1024> second;  // c, then dc; or dz of the second product
    };
    cute::array_aligned<Element, kN * kK, 1024> w[kProducts];
    Stage stages[kStages];
    cute::array_aligned<BufferElement, kRows * kK, 1024> buffers[kBuffers];
    alignas(16) float bias[kProducts][kN];  // scaled as the rule needs it
    LoadBarrier<> w_loaded;
    Stages ring;
    Buffers buffer_ring;

    CUTLASS_DEVICE void init() { init_barriers(w_loaded, ring, buffer_ring); }
  };

  template <int rows, int columns>
  using Load = TileMap<cute::SM90_TMA_LOAD, Element, rows, columns>;
  struct Parameters {
    TileMap<cute::SM90_TMA_LOAD, BufferElement, kRows, kK> x;
    Load<kRows, kN> grad, c;  // c and dc; a copy of grad's if the rule has none
    Load<kN, kK> w[kProducts];
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kK> dx;  // if not float32_x
    float* float_dx;
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kN> dc;
    const Element* bias[2];
    float* partial;  // for each group of each CTA, for each product: dw (n x k), dbias (n)
    bool c_is_y;
    int m, n, k;

    CUTLASS_DEVICE int tiles() const { return divided(m, kRows); }
  };

  /// The warpgroups of a group divide z and dx by their columns and dw by its rows.
  template <int m, int n, int k, cute::GMMA::Major major_a, cute::GMMA::Major major_b, class Division>
  using Product = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::Int<m>, cute::Int<n>, cute::Int<k>>,
                                 major_a, major_b>(),
      cute::Layout<Division>{}));
  using ByColumns = cute::Shape<cute::_1, cute::Int<kDivision>, cute::_1>;
  using ByRows = cute::Shape<cute::Int<kDivision>, cute::_1, cute::_1>;
  using ProductZ = Product<kRows, kN / kDivision, kK, cute::GMMA::Major::K, cute::GMMA::Major::K, ByColumns>;
  using ProductX = Product<kRows, kK / kDivision, kN, cute::GMMA::Major::K, cute::GMMA::Major::MN, ByColumns>;
  using ProductW = Product<kN, kK, kRows, cute::GMMA::Major::MN, cute::GMMA::Major::MN, ByRows>;

  /// How many groups of 8 columns of z a thread has: neighbouring pairs, 8 apart, in each of two rows.
  static constexpr int kSums = kN / kDivision / 32;

  CUTLASS_DEVICE static void load(const Parameters& p, Shared& shared) {
    shared.w_loaded.arrive_and_expect_tx(kWeightBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kProducts; ++i) p.w[i].load(shared.w[i].data(), 0, 0, shared.w_loaded);
    typename Stages::At at;
    typename Buffers::At of_x;
    const auto load_x = [&](int tile) {
      if (tile >= p.tiles()) return;
      auto& buffered = shared.buffer_ring.fill(of_x, kBufferBytes);
      if constexpr (float32_x) p.x.load(shared.buffers[of_x.index()].data(), tile, 0, buffered);
      ++of_x;
    };
    if constexpr (float32_x) load_x(blockIdx.x);
    for (int tile = blockIdx.x; tile < p.tiles(); tile += gridDim.x, ++at) {
      if constexpr (float32_x) load_x(tile + gridDim.x);  // one tile further, because rounding takes time
      auto& stage = shared.stages[at.index()];
      auto& loaded = shared.ring.fill(at, kLoadBytes);
      if constexpr (!float32_x) p.x.load(stage.x.data(), tile, 0, loaded);
      p.grad.load(stage.grad.data(), tile, 0, loaded);
      if constexpr (Rule::kReadsC) p.c.load(stage.second.data(), tile, 0, loaded);
    }
  }

  /// Called by kRoundingThreads threads if float32_x: x from float32 to its stage.
  CUTLASS_DEVICE static void round(const Parameters& p, Shared& shared) {
    using namespace cute;
    const int thread = static_cast<int>(threadIdx.x) - kConsumers - 32;
    constexpr int vectors = kK / 4;
    const cutlass::NumericArrayConverter<Element, float, 2> to_elements;
    typename Stages::At at;
    typename Buffers::At of_x;
    for (int tile = blockIdx.x; tile < p.tiles(); tile += gridDim.x, ++at, ++of_x) {
      shared.buffer_ring.wait_until_loaded(of_x);
      shared.ring.wait_until_free(at);
      const Tensor from = as_position_independent_swizzle_tensor(
          make_tensor(make_smem_ptr(shared.buffers[of_x.index()].data()), SwizzledRows<BufferElement, kRows, kK>{}));
      const Tensor to = as_position_independent_swizzle_tensor(
          make_tensor(make_smem_ptr(shared.stages[at.index()].x.data()), Rows<kRows, kK>{}));
#pragma unroll 4
      for (int i = thread; i < kRows * vectors; i += kRoundingThreads) {
        const int row = i / vectors, column = i % vectors * 4;  // four neighbours stay neighbours
        // By addresses: the compiler doesn't see that a swizzled pointer is one to aligned shared memory.
        float four[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                     : "r"(cast_smem_ptr_to_uint(&from(row, column)))
                     : "memory");
        const cutlass::Array<Element, 2> pairs[] = {to_elements({four[0], four[1]}), to_elements({four[2], four[3]})};
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(cast_smem_ptr_to_uint(&to(row, column))),
                     "r"(reinterpret_cast<const uint32_t&>(pairs[0])), "r"(reinterpret_cast<const uint32_t&>(pairs[1]))
                     : "memory");
      }
      // TMA may overwrite what was read, and products read what was written.
      finish_reads();
      shared.ring.loaded[at.index()].arrive();
      shared.buffer_ring.free[of_x.index()].arrive();
    }
  }

  // In columns of z that don't exist, TMA has filled w with zeros, so z of a row of x with an infinity would be NaN,
  // and so would dx, which is 0 where all gates are closed or open. As copies of the last column, they have dz = 0,
  // because c and the cotangent are 0 there.
  CUTLASS_DEVICE static void repeat_last_weights(const Parameters& p, Shared& shared) {
    using namespace cute;
    if (p.n == kN) return;
    shared.w_loaded.wait(0);
    Tensor w = as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(shared.w[0].data()), Rows<kN, kK>{}));
    for (int i = threadIdx.x; i < (kN - p.n) * kK; i += kConsumers) w(p.n + i / kK, i % kK) = w(p.n - 1, i % kK);
    finish_reads();  // products read what was written
  }

  // Called by the consumers while the first tiles are being loaded.
  CUTLASS_DEVICE static void load_bias(const Parameters& p, Shared& shared) {
    load_scaled_bias<Rule>(p.bias, shared.bias, 0, p.n, kConsumers);
    if constexpr (Rule::kReadsC) repeat_last_weights(p, shared);
    cutlass::arch::NamedBarrier::sync(kConsumers, kGroups);
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared, int warpgroup);

  static constexpr int kCluster = 1;
  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 232, compute>,
                            Warps<40, OneThread<load>, WholeWarp<round, float32_x ? kRoundingWarps : 0>>>;
};

template <class Rule, class Element, GradientTiling tiling, bool float32_x>
CUTLASS_DEVICE void GatedGradientsKernel<Rule, Element, tiling, float32_x>::compute(const Parameters& p, Shared& shared,
                                                                                    int warpgroup) {
  using namespace cute;
  load_bias(p, shared);
  const int group = warpgroup / kDivision;
  const int thread = threadIdx.x % kGroupThreads;
  // The same for all of a warpgroup, as descriptors must be; the shuffle tells the compiler.
  const int leader = __shfl_sync(~0u, thread / 128, 0) * 128;
  const auto sync = [&] { cutlass::arch::NamedBarrier::sync(kGroupThreads, group); };
  const auto swizzled = [](Element* data, auto layout) {
    return as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(data), layout));
  };
  ProductZ product_z;
  ProductX product_x;
  ProductW product_w;
  const auto slice_z = product_z.get_slice(leader);
  const auto slice_x = product_x.get_slice(leader);
  const auto slice_w = product_w.get_slice(leader);
  Tensor z = partition_fragment_C(product_z, Shape<Int<kRows>, Int<kN>>{});
  Tensor t = make_fragment_like(z);  // of the second product
  Tensor sums_x = partition_fragment_C(product_x, Shape<Int<kRows>, Int<kK>>{});
  Tensor sums_w = partition_fragment_C(product_w, Shape<Int<kN>, Int<kK>>{});
  Tensor sums_w2 = make_fragment_like(sums_w);
  clear(sums_w);
  if constexpr (kProducts == 2) clear(sums_w2);
  float sums_b[kProducts][kSums] = {};
  const Tensor places = product_z.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<kN>>{}));

  const auto read_z = make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product_z).get_slice(thread);
  const auto write_z = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_z).get_slice(thread);
  const auto write_x = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_x).get_slice(thread);
  const auto read_tile = [&](Element* data, auto& fragment) {
    copy(make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product_z),
         read_z.partition_S(swizzled(data, Rows<kRows, kN>{})), read_z.retile_D(fragment));
  };
  const auto write_tile = [&](const auto& fragment, Element* data) {
    copy(make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_z), write_z.retile_S(fragment),
         write_z.partition_D(swizzled(data, Rows<kRows, kN>{})));
  };
  const auto weight_z = [&](int i) {
    return slice_z.make_fragment_B(slice_z.partition_B(make_tensor(make_smem_ptr(shared.w[i].data()), Rows<kN, kK>{})));
  };
  const auto weight_x = [&](int i) {
    return slice_x.make_fragment_B(
        slice_x.partition_B(make_tensor(make_smem_ptr(shared.w[i].data()), Transposed<kN, kK>{})));
  };
  const cutlass::NumericArrayConverter<Element, float, 2> round;

  shared.w_loaded.wait(0);
  typename Stages::At at;
  at.advance(group);
  int former = -1;  // the stage that products of dw may still be reading
  for (int tile = blockIdx.x + group * gridDim.x; tile < p.tiles(); tile += kGroups * gridDim.x, at.advance(kGroups)) {
    auto& stage = shared.stages[at.index()];
    shared.ring.wait_until_loaded(at);

    const Tensor x =
        slice_z.make_fragment_A(slice_z.partition_A(make_tensor(make_smem_ptr(stage.x.data()), Rows<kRows, kK>{})));
    warpgroup_fence_operand(z);
    if constexpr (kProducts == 2) warpgroup_fence_operand(t);
    warpgroup_arrive();
    product_z.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(x); ++block) {
      cute::gemm(product_z, x(_, _, block), weight_z(0)(_, _, block), z);
      if constexpr (kProducts == 2) cute::gemm(product_z, x(_, _, block), weight_z(1)(_, _, block), t);
      product_z.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    Tensor g = make_tensor_like<Element>(z), second = make_tensor_like<Element>(z);
    read_tile(stage.grad.data(), g);
    if constexpr (Rule::kReadsC) read_tile(stage.second.data(), second);
    warpgroup_wait<1>();
    warpgroup_fence_operand(sums_w);
    if constexpr (kProducts == 2) warpgroup_fence_operand(sums_w2);
    if (former >= 0 && thread % 32 == 0) shared.ring.free[former].arrive();
    warpgroup_wait<0>();
    warpgroup_fence_operand(z);
    if constexpr (kProducts == 2) warpgroup_fence_operand(t);

    // dz over g, the contents of the second buffer over `second`, and the sums of their columns over both rows.
    Tensor g_pairs = recast<cutlass::Array<Element, 2>>(g), second_pairs = recast<cutlass::Array<Element, 2>>(second);
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kSums; ++part) {
      float columns[kProducts][8] = {};
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 16; k += 2) {  // a thread has pairs of neighbouring columns, and row r + 8 after row r
        const int i = 16 * part + k, in_tile = get<1>(places(i));
        float2 bias[2];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kProducts; ++j) bias[j] = *reinterpret_cast<const float2*>(&shared.bias[j][in_tile]);
        cutlass::Array<float, 2> first_dz, other;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float first = fmaf(Rule::scale(0), z(i + v), v == 0 ? bias[0].x : bias[0].y);
          float scaled = 0.f;
          if constexpr (kProducts == 2) scaled = fmaf(Rule::scale(1), t(i + v), v == 0 ? bias[1].x : bias[1].y);
          const float c = Rule::kReadsC ? static_cast<float>(second(i + v)) : 0.f;
          Rule::template backward<kExactness>(static_cast<float>(g(i + v)), first, scaled, c, p.c_is_y, first_dz[v],
                                              other[v]);
          const int column = k / 4 * 2 + v;
          columns[0][column] += first_dz[v];
          if constexpr (kProducts == 2) columns[kProducts - 1][column] += other[v];
        }
        g_pairs(i / 2) = round(first_dz);
        second_pairs(i / 2) = round(other);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kProducts; ++j) sums_b[j][part] += sum_of_warp(columns[j]);
    }
    write_tile(g, stage.grad.data());
    write_tile(second, stage.second.data());
    if (thread == 0) {
      tma_store_wait<0>();  // for the previous tile: dx may be overwritten
      if (Rule::kReadsC && former >= 0) shared.ring.free[former].arrive();
    }
    cutlass::arch::fence_view_async_shared();
    sync();

    warpgroup_fence_operand(sums_x);
    warpgroup_fence_operand(sums_w);
    if constexpr (kProducts == 2) warpgroup_fence_operand(sums_w2);
    warpgroup_arrive();
    product_x.accumulate_ = GMMA::ScaleOut::Zero;
    const auto multiply_x = [&](Element* dz, int i) {
      const Tensor a = slice_x.make_fragment_A(slice_x.partition_A(make_tensor(make_smem_ptr(dz), Rows<kRows, kN>{})));
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(a); ++block) {
        cute::gemm(product_x, a(_, _, block), weight_x(i)(_, _, block), sums_x);
        product_x.accumulate_ = GMMA::ScaleOut::One;
      }
    };
    const Tensor x_w = slice_w.make_fragment_B(
        slice_w.partition_B(make_tensor(make_smem_ptr(stage.x.data()), Transposed<kRows, kK>{})));
    const auto multiply_w = [&](Element* dz, auto& sums) {
      const Tensor a =
          slice_w.make_fragment_A(slice_w.partition_A(make_tensor(make_smem_ptr(dz), Transposed<kRows, kN>{})));
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(a); ++block) {
        cute::gemm(product_w, a(_, _, block), x_w(_, _, block), sums);
      }
    };
    multiply_x(stage.grad.data(), 0);
    if constexpr (kProducts == 2) multiply_x(stage.second.data(), 1);
    warpgroup_commit_batch();
    multiply_w(stage.grad.data(), sums_w);
    if constexpr (kProducts == 2) multiply_w(stage.second.data(), sums_w2);
    warpgroup_commit_batch();
    warpgroup_wait<1>();
    warpgroup_fence_operand(sums_x);

    if constexpr (float32_x) {
      const Tensor places_x =
          product_x.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<kK>>{}));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(sums_x); i += 2) {  // four threads have 32 neighbouring bytes
        const int row = tile * kRows + get<0>(places_x(i)), column = get<1>(places_x(i));
        if (row < p.m && column < p.k) {
          *reinterpret_cast<float2*>(p.float_dx + int64_t{row} * p.k + column) = make_float2(sums_x(i), sums_x(i + 1));
        }
      }
      if (Rule::kReadsC && thread == 0) p.dc.store(stage.second.data(), tile, 0);
    } else {
      Tensor result = make_tensor_like<Element>(sums_x);
      Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(sums_x); i += 2) {
        pairs(i / 2) = round(cutlass::Array<float, 2>{sums_x(i), sums_x(i + 1)});
      }
      copy(make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_x), write_x.retile_S(result),
           write_x.partition_D(swizzled(shared.buffers[group].data(), Rows<kRows, kK>{})));
      cutlass::arch::fence_view_async_shared();
      sync();
      if (thread == 0) {
        p.dx.store(shared.buffers[group].data(), tile, 0);
        if constexpr (Rule::kReadsC) p.dc.store(stage.second.data(), tile, 0);
      }
    }
    former = at.index();
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums_w);
  if constexpr (kProducts == 2) warpgroup_fence_operand(sums_w2);
  if (thread == 0) tma_store_wait<0>();

  // dx of this group has been stored, so its buffer is free; or else a stage that only this group uses.
  const int64_t weights = int64_t{p.n} * p.k;
  float* const partial = p.partial + (blockIdx.x * kGroups + group) * (kProducts * (weights + p.n));
  write_weight_sums(product_w, sums_w, thread, partial, p.n, p.k);
  if constexpr (kProducts == 2) write_weight_sums(product_w, sums_w2, thread, partial + weights + p.n, p.n, p.k);
  void* const free = float32_x ? static_cast<void*>(shared.stages[group].x.data()) : shared.buffers[group].data();
  auto* const scratch = static_cast<float*>(free);
  static_assert(4 * kProducts * kN * 4 <= kRows * kK * kSize);
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < kProducts; ++j) {
    write_column_sums<kN, kDivision>(sums_b[j], thread, scratch + j * 4 * kN, partial + j * (weights + p.n) + weights,
                                     p.n, sync);
  }
}

}  // namespace torchops::cuda::gemm
