#pragma once

// The gradients of a step of a triangle update in one pass over the positions. Forward saves only the product: layer
// norms, projections and gates are recomputed. With xhat and ohat the normalised rows of x and o, and the norms'
// weights folded into the matrices (triangle/steps.cuh), the input step for one side is
//
//   y = (xhat @ w[0].T + b[0]) * F(xhat @ w[1].T + b[1]) * factor of the position,   channels from rows,
//
// and the output step is the same with ohat in the first product, and rows from channels. From the cotangent of y come
// du and dt, those of both products; then
//
//   input step    dxhat += du @ w[0] + dt @ w[1];     dw[0] += du.T @ xhat;  dw[1] += dt.T @ xhat
//   output step   dxhat = dt @ w[1];  dohat = du @ w[0];  dw[0] += du.T @ ohat;  dw[1] += dt.T @ xhat
//
// and, through the norms, do from dohat, and dx from the last dxhat.
//
//   2 warpgroups   the products; they divide their columns, or for dw the rows. In the output step they also compute
//                  xhat of the next tile, over x, while those of a tile run
//   a third one    tiles of 64 positions: a thread loads them into a stage of shared memory, by TMA, some ahead, and
//                  all compute ohat, over o, or in the input step xhat
//
// The sums of dw and of the columns of du and dt stay in registers for all positions, as in gradients/gated.cuh. The
// column sums are products with ones: the warps that compute du and dt are busier than the matrix units.
//
// Shared memory bounds the gradients of the input step, not device memory. So a cluster that computes both sides, and
// reads x and dxhat once, has little to win. Two variants are slower: warpgroups that take turns with the matrix units,
// each of which computes all columns of dxhat from its own columns of du and dt; and u and t as one product of 128
// columns, which reads less shared memory.

#include "cuda/gemm/sm90/triangle/norms.cuh"

namespace torchops::cuda::gemm {

/// What happens to dxhat, known at compile time because registers are few: the output step begins it, the sides of the
/// input step add to it, and the last one turns it into dx, and may add the cotangent of a residual.
enum class DxHat { kBegins, kGrows, kEnds, kEndsAndAddsResidual };

/// A tile of positions: its row, and its place among the tiles of the row.
struct PairPlace {
  int row, place;
};

/// The tiles of `rows` rows of n positions, dealt to the CTAs in turn. Loops over them need no division, for which the
/// products of a tile would have to wait.
struct DealtPairTiles {
  int n, rows, in_row, row_step, place_step;

  static DealtPairTiles of(const PairTiles& tiles, int ctas) {
    const int in_row = tiles.in_row();
    return {tiles.n, tiles.rows, in_row, ctas / in_row, ctas % in_row};
  }

  CUTLASS_DEVICE PairPlace first() const {
    const int tile = static_cast<int>(blockIdx.x);
    return {tile / in_row, tile % in_row};
  }
  CUTLASS_DEVICE PairPlace after(PairPlace at) const {
    at.row += row_step;
    at.place += place_step;
    if (at.place >= in_row) {
      at.place -= in_row;
      ++at.row;
    }
    return at;
  }
  CUTLASS_DEVICE bool has(PairPlace at) const { return at.row < rows; }
};

template <class Element_, class Gate, bool kOut, GradientTiling tiling, DxHat kDxHat>
struct PairGradientsKernel {
  using Element = Element_;
  static constexpr int kRows = kPairRows, kFeatures = kSpec<tiling>.most_n;
  static constexpr int kWarpgroups = kSpec<tiling>.consumers, kConsumers = 128 * kWarpgroups;
  static constexpr int kColumns = kFeatures / kWarpgroups;
  static constexpr int kTileBytes = kRows * kFeatures * static_cast<int>(sizeof(Element));
  static constexpr int kStages = 3;
  static constexpr bool kAddsResidual = kDxHat == DxHat::kEndsAndAddsResidual,
                        kLast = kAddsResidual || kDxHat == DxHat::kEnds;
  static_assert(kOut == (kDxHat == DxHat::kBegins));
  static_assert(kSpec<tiling>.most_k == kFeatures && kWarpgroups == 2 && kFeatures == 128);
  // Releases: the thread whose store has read the stage; in the input step also each warp whose products have.
  using Stages = Ring<kStages, 1 + (kOut ? 0 : kConsumers / 32)>;
  using At = typename Stages::At;

  /// Positions in rows, or channels in rows: the same number of bytes.
  using Tile = cute::array_aligned<Element, kRows * kFeatures, 1024>;
  using Matrix = cute::array_aligned<Element, kFeatures * kFeatures, 1024>;
  struct Stage {
    Tile x;      // then xhat; in the output step, finally dxhat
    Tile other;  // o, then ohat and finally do; or dxhat so far, and finally dxhat or dx
    Tile grad;   // then du
  };
  struct Shared {
    Matrix w[2];
    Stage stages[kStages];
    // Each warpgroup writes its columns, when nobody reads those of the previous tile any more: products of dx, which
    // read all columns, are complete at the last sync(), and of those of dw a warpgroup reads only its own columns.
    Tile dt;
    alignas(16) float bias[2][kFeatures];
    float rstd[kStages][kRows];  // of the norm that a gradient passes through: that of o, or of x
    float2 row_sums[kWarpgroups][kRows];
    alignas(16) Element ones[64];  // 8 x 8: products with it sum the columns of du and dt
    LoadBarrier<> w_loaded;
    Stages ring;
    Barrier<128> normalized[kStages];

    CUTLASS_DEVICE void init() { init_barriers(w_loaded, ring, normalized); }
  };

  using LoadRows = PlaneMap<cute::SM90_TMA_LOAD, Element, kRows, kFeatures>;
  using LoadChannels = PlaneMap<cute::SM90_TMA_LOAD, Element, kFeatures, kRows>;
  using StoreRows = PlaneMap<cute::SM90_TMA_STORE, Element, kRows, kFeatures>;
  using StoreChannels = PlaneMap<cute::SM90_TMA_STORE, Element, kFeatures, kRows>;
  using LoadWeight = TileMap<cute::SM90_TMA_LOAD, Element, kFeatures, kFeatures>;
  struct Parameters {
    LoadRows x, rows;       // rows: the cotangent in the output step, or dxhat so far
    LoadChannels channels;  // o, or the cotangent in the input step
    StoreRows dxhat;
    StoreChannels d_o;  // in the output step
    LoadWeight w[2];
    const Element *bias[2], *mask;
    NormValues<Element> norm_x[2], norm_o[2];
    float2* moments;  // one per position
    int64_t mask_row_stride, mask_stride, moments_row_stride, moments_stride;
    struct {  // what is added to dx; shared memory has no room for it
      const Element* data;
      int64_t row_stride, stride;
      LoadRows map;
    } residual;
    float eps_x, eps_o, scale;
    int c, d;
    float* partial;  // for each CTA and product: dw, then the sums of the columns of du or dt
    DealtPairTiles tiles;

    /// The size of a product's sums: du or dt has `outputs` columns, and the other factor has `features`.
    CUTLASS_HOST_DEVICE int outputs() const { return kOut ? c : d; }
    CUTLASS_HOST_DEVICE int features(int product) const { return kOut && product == 0 ? d : c; }
    CUTLASS_HOST_DEVICE int64_t sums(int product) const { return int64_t{outputs()} * (features(product) + 1); }
  };

  using Major = cute::GMMA::Major;
  template <int m, int n, int k, Major major_a, Major major_b, class Division>
  using Product = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::Int<m>, cute::Int<n>, cute::Int<k>>,
                                 major_a, major_b>(),
      cute::Layout<Division>{}));
  using ByColumns = cute::Shape<cute::_1, cute::Int<kWarpgroups>, cute::_1>;
  using ByRows = cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>;
  // du and dt have the layout of the cotangent.
  static constexpr Major kOfO = kOut ? Major::MN : Major::K;
  static constexpr Major kOfDz = kOut ? Major::K : Major::MN, kOfDzT = kOut ? Major::MN : Major::K;
  using ProductU = Product<kRows, kColumns, kFeatures, kOfO, Major::K, ByColumns>;
  using ProductT = Product<kRows, kColumns, kFeatures, Major::K, Major::K, ByColumns>;
  using ProductX = Product<kRows, kColumns, kFeatures, kOfDz, Major::MN, ByColumns>;
  using ProductW0 = Product<kFeatures, kFeatures, kRows, kOfDzT, kOut ? Major::K : Major::MN, ByRows>;
  using ProductW1 = Product<kFeatures, kFeatures, kRows, kOfDzT, Major::MN, ByRows>;
  using ProductSums = Product<kFeatures, 8, kRows, kOfDzT, Major::K, ByRows>;
  // As many ones as a product needs, all in the same 8 x 8 elements.
  using Ones = cute::Layout<cute::Shape<cute::_8, cute::Shape<cute::_8, cute::Int<kRows / 8>>>,
                            cute::Stride<cute::_8, cute::Stride<cute::_1, cute::_0>>>;
  // Positions in rows, as (positions, features) and transposed; and the other way round for channels in rows.
  using InRows = SwizzledRows<Element, kRows, kFeatures>;
  using InRowsT = SwizzledTransposed<Element, kRows, kFeatures>;
  using InChannels = SwizzledTransposed<Element, kFeatures, kRows>;
  using InChannelsT = SwizzledRows<Element, kFeatures, kRows>;
  using OfDz = std::conditional_t<kOut, InRows, InChannels>;
  using OfDzT = std::conditional_t<kOut, InRowsT, InChannelsT>;

  /// What the third warpgroup does.
  CUTLASS_DEVICE static void load_and_normalize(const Parameters& p, Shared& shared) {
    const bool loads = threadIdx.x % 128 < 32 && cute::elect_one_sync();
    if (loads) {
      shared.w_loaded.arrive_and_expect_tx(2 * sizeof(Matrix));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) p.w[i].load(shared.w[i].data(), 0, 0, shared.w_loaded);
    }
    At to;
    PairPlace next = p.tiles.first();
    const auto load_next = [&] {
      if (loads && p.tiles.has(next)) {
        load(p, shared.stages[to.index()], shared.ring.fill(to, 3 * kTileBytes), next);
      }
      next = p.tiles.after(next);
      ++to;
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kStages; ++i) load_next();
    At at;
    PairPlace tile = p.tiles.first();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int count = 0; p.tiles.has(tile); tile = p.tiles.after(tile), ++at, ++count) {
      if (count >= kStages) load_next();
      normalize(p, shared, at, tile);
      cutlass::arch::fence_view_async_shared();
      shared.normalized[at.index()].arrive();
    }
  }

  CUTLASS_DEVICE static void load(const Parameters& p, Stage& stage, cutlass::arch::ClusterTransactionBarrier& loaded,
                                  PairPlace tile) {
    const auto [row, place] = tile;
    p.x.load(stage.x.data(), place, 0, row, loaded);
    p.channels.load((kOut ? stage.other : stage.grad).data(), 0, place, row, loaded);
    p.rows.load((kOut ? stage.grad : stage.other).data(), place, 0, row, loaded);
    if (kAddsResidual) p.residual.map.prefetch(place, 0, row);
  }

  /// Where the moments of a row of x are; null past the last row.
  CUTLASS_DEVICE static float2* moments_of(const Parameters& p, PairPlace tile, int row) {
    const int position = tile.place * kRows + row;
    if (position >= p.tiles.n) return nullptr;
    return p.moments + tile.row * p.moments_row_stride + position * p.moments_stride;
  }

  /// Of a tile that has been loaded, in the input step x; in the output step o.
  CUTLASS_DEVICE static void normalize(const Parameters& p, Shared& shared, const At& at, PairPlace tile) {
    Stage& stage = shared.stages[at.index()];
    auto& rstd = shared.rstd[at.index()];
    if constexpr (kOut) {
      shared.ring.wait_until_loaded(at);
      normalize_channels<kFeatures>(stage.other.data(), rstd, p.d, p.eps_o);
    } else {
      constexpr int of_row = 128 / kRows;
      const int thread = threadIdx.x % 128, row = thread / of_row;
      Moments moments{};
      if (const float2* const from = moments_of(p, tile, row); from != nullptr) {
        moments.scale[0] = from->x;
        moments.shift[0] = from->y;
      }
      shared.ring.wait_until_loaded(at);
      normalize_row</*measures=*/false, of_row>(stage.x.data(), thread, p.c, p.eps_x, moments);
      if (thread % of_row == 0) rstd[row] = moments.scale[0];
    }
  }

  /// In the output step the two other warpgroups normalise x, since the third one would be too slow for both.
  CUTLASS_DEVICE static void normalize_x(const Parameters& p, Shared& shared, const At& at, PairPlace tile) {
    constexpr int of_row = kConsumers / kRows;
    const int thread = thread_here(), row = thread / of_row;
    Moments moments;
    shared.ring.wait_until_loaded(at);
    normalize_row</*measures=*/true, of_row>(shared.stages[at.index()].x.data(), thread, p.c, p.eps_x, moments);
    float2* const to = moments_of(p, tile, row);
    if (thread % of_row == 0 && to != nullptr) *to = make_float2(moments.scale[0], moments.shift[0]);
  }

  CUTLASS_DEVICE static void sync() { cutlass::arch::NamedBarrier::sync(kConsumers, 0); }

  // Called by the warpgroups while the first tiles are being loaded.
  CUTLASS_DEVICE static void fold_norms(const Parameters& p, Shared& shared) {
    using Norm = NormVectors<kFeatures>;
    static_assert(2 * sizeof(Norm) <= sizeof(Tile));
    auto* const norms = reinterpret_cast<Norm*>(shared.dt.data());  // of o, of x
    if (threadIdx.x < 64) shared.ones[threadIdx.x] = Element(1.f);
    if (kOut) norms[0].load(p.norm_o[0], p.norm_o[1], p.d, kConsumers);
    norms[1].load(p.norm_x[0], p.norm_x[1], p.c, kConsumers);
    sync();
    shared.w_loaded.wait(0);
    // No loop from threadIdx.x on: after one, nvcc 13.0 keeps the address of shared memory in a register of each
    // thread, and copies each descriptor of a matrix instruction from there (R2UR).
    static_assert(kConsumers == 2 * kFeatures);
    const int product = static_cast<int>(threadIdx.x) / kFeatures, row = static_cast<int>(threadIdx.x) % kFeatures;
    const Element* const bias = p.bias[product];
    shared.bias[product][row] = fold_norm<kFeatures>(shared.w[product].data(), row, norms[kOut && product == 0 ? 0 : 1],
                                                     bias == nullptr || row >= p.outputs() ? nullptr : bias + row,
                                                     product == 0 ? 1.f : Gate::kTanhScale)
                                    .bias;
    cutlass::arch::fence_view_async_shared();
    sync();
  }

  CUTLASS_DEVICE static void compute(const Parameters& p, Shared& shared);

  static constexpr int kCluster = 1;
  using Roles = gemm::Roles<Warpgroups<kWarpgroups, 232, compute>, Warpgroups<1, 40, load_and_normalize>>;
};

}  // namespace torchops::cuda::gemm
