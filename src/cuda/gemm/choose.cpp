#include "cuda/gemm/choose.h"

#include <algorithm>
#include <limits>

namespace torchops::cuda::gemm {
namespace {

bool always(const Case&) { return true; }

// One wave of large tiles, where small ones would take two.
bool fits_one_wave(const Case& c) {
  return c.n > 128 && c.m >= 2048 && c.tiles(128, 128) > c.sm_count && c.tiles(128, 256) <= c.sm_count;
}

// For tilings of 128 rows whose CTAs work in pairs, side by side: the time that the waves of pairs take, and one
// epilogue that nothing overlaps, in multiples of what a column takes. Loading the rows costs as much as 32 columns.
// Both constants are fitted to measurements.
double time_in_pairs(const Case& c, int columns) {
  const int64_t pairs = c.tiles(128, 2 * columns), at_once = std::max(c.sm_count / 2, 1);
  const double epilogue = 400. / static_cast<double>(c.k * (c.element == Element::kTF32 ? 4 : 2));
  return (static_cast<double>((pairs + at_once - 1) / at_once) + epilogue) * (columns + 32);
}

// The columns of the fastest such tiling, or 0 if others are faster.
int columns_in_pairs(const Case& c) {
  const bool is_tf32 = c.element == Element::kTF32;
  if (c.n <= 128 || c.n > 2304 || c.m < c.n) return 0;
  // Of 16 bits, k128x128ResidentB and NarrowDense win with few input features, if they divide the columns well.
  if (!is_tf32 && (c.k <= 64 || (c.k <= 256 && c.columns(128) % 2 == 0))) return 0;
  int best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (const int columns : {192, 160, 144, 128, 112, 96}) {  // among equals, large tiles load less
    // There is no epilogue of 112 or 144 columns for 32 bits, and that of 112 is slow.
    if (is_tf32 ? columns % 32 != 0 : columns == 112 && c.k <= 512) continue;
    if (const double time = time_in_pairs(c, columns); time < least) {
      best = columns;
      least = time;
    }
  }
  return fits_one_wave(c) && time_in_pairs(c, 256) < least ? 0 : best;
}

template <int columns>
bool suit_in_pairs(const Case& c) {
  return columns_in_pairs(c) == columns;
}

// Large tiles read the operands less often. Small ones occupy more multiprocessors, and keep more loads and stores in
// flight.
constexpr Rule<Tiling> kDense[] = {
    // Few outputs: smaller tiles occupy more multiprocessors.
    {[](const Case& c) { return c.n <= 64 || c.tiles(128, 128) * 2 <= c.sm_count; }, Tiling::k128x64},
    // A long and narrow result is bound by memory: many small tiles keep more loads and stores in flight.
    {[](const Case& c) { return c.n <= 128 && c.k <= 512; }, Tiling::k64x128},
    // Share the loads of a, the larger operand, and leave few columns of tiles empty: 264 features are two tiles of 144
    // columns, or three of 128, one of which is almost empty.
    {suit_in_pairs<96>, Tiling::k128x96SharedA},
    {suit_in_pairs<112>, Tiling::k128x112SharedA},
    {suit_in_pairs<128>, Tiling::k128x128SharedA},
    {suit_in_pairs<144>, Tiling::k128x144SharedA},
    {suit_in_pairs<160>, Tiling::k128x160SharedA},
    {suit_in_pairs<192>, Tiling::k128x192SharedA},
    // With a single step along k, nothing overlaps the epilogue: one large epilogue is better.
    {[](const Case& c) { return c.k <= 64 && c.n > 256; }, Tiling::k128x256},
    // If a is the larger operand, share its loads, unless a row has an odd number of tiles.
    {[](const Case& c) { return c.k <= 256 && c.n <= 2048 && c.m >= 2 * c.n && c.columns(128) % 2 == 0; },
     Tiling::k128x128ResidentB},
    // Two steps along k are still too few. Long sums are bound by the traffic of the tiles, which is less with large
    // ones.
    {[](const Case& c) {
       const int64_t tiles = c.tiles(128, 256);
       return (c.k <= 128 && c.n > 512) || (c.k > 4096 && tiles * 4 >= int64_t{c.sm_count} * 3) ||
              (c.k >= 4096 && tiles >= int64_t{c.sm_count} * 3);
     },
     Tiling::k128x256},
    {fits_one_wave, Tiling::k128x256},
    {always, Tiling::k128x128},
};

// For cases that prefers_resident_weights() accepts. Where no rule suits, the kernels of kDense are faster.
constexpr Rule<NarrowTiling> kNarrowDense[] = {
    {[](const Case& c) { return c.n % 16 != 0; }, NarrowTiling::k64x128x256},
    {[](const Case& c) { return c.k <= 64 && (c.n <= 192 || c.m <= 16384); }, NarrowTiling::k128x64x64},
    {[](const Case& c) { return c.k <= 192 && c.n > 128 && c.n <= 192; }, NarrowTiling::k64x192x192},
    {[](const Case& c) { return c.k <= 96 || (c.k <= 128 && c.n > 64); }, NarrowTiling::k64x128x128},
    {[](const Case& c) { return c.k <= 192 && c.n > 1024 && c.m > 8192; }, NarrowTiling::k64x192x192},
    {[](const Case& c) { return c.k <= 192 && c.n > 256; }, NarrowTiling::k64x128x256},
    {[](const Case& c) { return c.k > 192 && (c.n > 192 || (c.n > 64 && c.n <= 128)); }, NarrowTiling::k64x128x256},
};

// Eight-bit operands. Few outputs take small tiles, which occupy more multiprocessors.
constexpr Rule<Tiling> kScaled[] = {
    {[](const Case& c) { return c.m <= 64 && c.tiles(64, 64) <= c.sm_count; }, Tiling::k64x64SharedA},
    {[](const Case& c) { return c.m <= 64 || c.tiles(128, 128) <= c.sm_count; }, Tiling::k64x128},
    {always, Tiling::k128x128CooperativeTall},
};

// With one tile per row there is no barrier. Otherwise two small tiles in flight hide the wait at the barrier, until,
// in long products, the traffic of small tiles costs more than the wait. Large tiles are then faster if whole panels
// keep nine of ten clusters busy.
constexpr Rule<Tiling> kSquareMatmul[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192; }, Tiling::k64x192ResidentB},
    {[](const Case& c) { return c.n > 128 && c.n <= 256; }, Tiling::k64x256ResidentB},
    // In batches, share the loads of b, too: each matrix has its own, while a single b stays in the second-level cache.
    {[](const Case& c) {
       return c.batch > 1 && c.n > 256 && c.n <= 1024 && c.rows(128) % 2 == 0 && c.columns(128) % 4 == 0;
     },
     Tiling::k128x128SharedBoth},
    {[](const Case& c) { return c.n > 256 && c.n <= 1024 && c.columns(128) % 2 == 0; }, Tiling::k128x128SharedAWide},
    {[](const Case& c) {
       const int64_t clusters = c.sm_count / 2;
       return c.n >= 4096 && clusters % c.columns(256) * 10 < clusters;
     },
     Tiling::k128x256},
    {always, Tiling::k128x128},
    // If a row has too many tiles of 128 columns to be resident, half as many may fit.
    {always, Tiling::k128x256},
};

// The smallest tile that k fits. If there are more columns than a tile has, other CTAs compute them and read the rows
// again, from L2. The first tiling saves that up to 192 columns; it was not measured for gates.
constexpr Rule<NarrowTiling> kNarrow[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192 && c.k <= 192; }, NarrowTiling::k64x192x192},
    {[](const Case& c) { return c.n <= 64 && c.k <= 64; }, NarrowTiling::k128x64x64},
    {[](const Case& c) { return c.k <= 128; }, NarrowTiling::k64x128x128},
    {[](const Case& c) { return c.k <= 256; }, NarrowTiling::k64x128x256},
};
constexpr std::span kNarrowGate = std::span(kNarrow).subspan<1>();

// Of two products of any length.
constexpr Rule<Tiling> kStreamedGlu[] = {
    // Few outputs: smaller tiles occupy more multiprocessors.
    {[](const Case& c) { return c.tiles(128, 128) * 2 <= c.sm_count; }, Tiling::k128x64SharedA},
    // A long sum is bound by the traffic of the tiles, which is less with large ones, and its epilogue is a small part.
    // In a single wave, nothing overlaps an epilogue anyway.
    {[](const Case& c) { return c.k >= 2048 || c.tiles(128, 128) <= c.sm_count; }, Tiling::k128x128Cooperative},
    // Otherwise, the epilogue of one tile should overlap the products of another.
    {always, Tiling::k128x64SharedA},
};

// The only tiling of these families.
constexpr Rule<Tiling> kStreamed[] = {{always, Tiling::k128x64SharedA}};

// The smallest tile that channels and features fit: columns that don't exist cost as much as others.
constexpr Rule<NarrowTiling> kPair[] = {
    {[](const Case& c) { return c.n <= 64 && c.k <= 64; }, NarrowTiling::k64x64x64},
    {[](const Case& c) { return c.n <= 64; }, NarrowTiling::k64x64x128},
    {always, NarrowTiling::k64x128x128},
};

constexpr Rule<NarrowTiling> kFeedForward[] = {{always, NarrowTiling::k64x128x128}};

// The fewest columns that don't exist. A Case has c as k.
constexpr Rule<Tiling> kStreamedPairOut[] = {
    {[](const Case& c) { return c.k <= 128; }, Tiling::k128x128OneByOne},
    {[](const Case& c) { return (c.k + 383) / 384 * 384 < (c.k + 255) / 256 * 256; }, Tiling::k128x384OneByOne},
    {always, Tiling::k128x256OneByOne},
};

constexpr Rule<GradientTiling> kPairGradients[] = {{always, GradientTiling::k128x128}};

constexpr Rule<GradientTiling> kGated[] = {
    {[](const Case& c) { return c.n <= 64 && c.k <= 64; }, GradientTiling::k64x64},
    {[](const Case& c) { return c.n <= 128 && c.k <= 128; }, GradientTiling::k128x128},
};

// For sizes at which most CTAs of a cluster have columns.
constexpr Rule<GradientTiling> kWeightGradients[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192 && c.k > 128 && c.k <= 192; }, GradientTiling::k192x192Cluster},
    {[](const Case& c) { return c.n > 128 && c.n <= 256 && c.k > 128 && c.k <= 256; }, GradientTiling::k256x256Cluster},
};

// The smallest sums of dw, which stay in registers, that n and k fit.
constexpr Rule<GradientTiling> kDenseGradients[] = {
    {[](const Case& c) { return c.n <= 128 && c.k <= 128; }, GradientTiling::k128x128},
    {[](const Case& c) { return c.n <= 192 && c.k <= 192; }, GradientTiling::k192x192},
    {[](const Case& c) { return c.n <= 256 && c.k <= 128; }, GradientTiling::k256x128},
    {[](const Case& c) { return c.n <= 128 && c.k <= 256; }, GradientTiling::k128x256},
};

constexpr Rule<GradientTiling> kDenseInputGradients[] = {
    {[](const Case& c) { return c.k <= 128; }, GradientTiling::kAnyx128},
    {[](const Case& c) { return c.k <= 256; }, GradientTiling::kAnyx256},
};

}  // namespace

#define TORCHOPS_RULES(operation, rules_of_it)                           \
  template <>                                                            \
  std::span<const Rule<typename operation::Tiling>> rules<operation>() { \
    return rules_of_it;                                                  \
  }
TORCHOPS_RULES(Dense, kDense)
TORCHOPS_RULES(NarrowDense, kNarrowDense)
TORCHOPS_RULES(ScaledDense, kScaled)
TORCHOPS_RULES(ScaledProduct, kScaled)
TORCHOPS_RULES(ScaledGateSigmoid, kScaled)
TORCHOPS_RULES(ScaledGateSilu, kScaled)
TORCHOPS_RULES(SquareMatmul, kSquareMatmul)
TORCHOPS_RULES(SquareMatmulT, kSquareMatmul)
TORCHOPS_RULES(Gate, kNarrowGate)
TORCHOPS_RULES(GluSigmoid, kNarrow)
TORCHOPS_RULES(GluSilu, kNarrow)
TORCHOPS_RULES(StreamedGluSigmoid, kStreamedGlu)
TORCHOPS_RULES(StreamedGluSilu, kStreamedGlu)
TORCHOPS_RULES(StreamedGate, kStreamed)
TORCHOPS_RULES(GateCotangents, kStreamed)
TORCHOPS_RULES(GluSigmoidCotangents, kStreamed)
TORCHOPS_RULES(GluSiluCotangents, kStreamed)
TORCHOPS_RULES(TriangleIn, kPair)
TORCHOPS_RULES(TriangleOut, kPair)
TORCHOPS_RULES(StreamedTriangleIn, kStreamed)
TORCHOPS_RULES(StreamedTriangleOut, kStreamedPairOut)
TORCHOPS_RULES(TriangleInGradients, kPairGradients)
TORCHOPS_RULES(TriangleOutGradients, kPairGradients)
TORCHOPS_RULES(Transition, kFeedForward)
TORCHOPS_RULES(TransitionGradients, kFeedForward)
TORCHOPS_RULES(DenseGradients, kDenseGradients)
TORCHOPS_RULES(DenseInputGradients, kDenseInputGradients)
TORCHOPS_RULES(GateGradients, kGated)
TORCHOPS_RULES(GluSigmoidGradients, kGated)
TORCHOPS_RULES(GluSiluGradients, kGated)
TORCHOPS_RULES(GluSigmoidWeightGradients, kWeightGradients)
TORCHOPS_RULES(GluSiluWeightGradients, kWeightGradients)

namespace {

// Short sums are bound by memory, and weights that stay in shared memory are not read again for each tile.
bool prefers_resident_weights(const Case& c) {
  // It starts slower than small tiles do, so its own should fill most multiprocessors.
  if (c.k > 256 || c.m * c.n < 1 << 20) return false;
  // Its CTAs stay in their columns, which should divide nine of ten multiprocessors.
  if (c.sm_count % c.columns(128) * 10 >= c.sm_count) return false;
  // Rows of the result that don't begin at 32-byte boundaries: many columns or a long sum make up for slow stores.
  if (c.n % 16 != 0) return c.n > 768 && c.k > 96 && c.k % 64 == 0;
  // Bound by memory: the CTAs of a cluster, which share a, read it once.
  if (c.m >= 65536 && c.n > 384 && c.n <= 512) return c.k > 192;
  if (c.m >= 65536 && c.n > 192 && c.n <= 256) return c.k > 64;
  return true;
}

// cuBLAS splits a long sum among multiprocessors that would otherwise have no tile.
bool prefers_cublas(const Case& c) { return c.m < 16 || (c.k >= 512 && c.tiles(64, 128) * 2 <= c.sm_count); }

// The warps of a CTA share a long sum, so few outputs occupy more multiprocessors.
bool prefers_sm80(const Case& c) { return c.element != Element::kTF32 && c.tiles(64, 128) * 2 <= c.sm_count; }

// cuBLAS and the pass win with long sums of many outputs, which take much longer than the pass; with longer ones from
// 65 rows on; and if the elements of a must be loaded one by one. But they are slow with rows of odd length in the
// result.
bool prefers_cublas_to_sm80(const Case& c, bool is_gated) {
  // A single wave takes as long as a sum, most of which is loading elements one or two at a time.
  const bool has_one_wave = is_gated && c.tiles(64, 64) <= c.sm_count;
  if (c.k % 2 != 0) return c.k > (has_one_wave ? 192 : 512);
  if (c.k % 8 != 0 && c.k > 1024 && has_one_wave) return true;
  return c.n % 2 == 0 && ((c.k > 512 && c.tiles(128, 128) > c.sm_count) || (c.k > 2048 && c.m > 64));
}

// The kernel wins if more than a quarter of the multiprocessors have a tile. The second of two products hides what
// splitting the sum of one would save. Fewer than 16 rows were not measured.
bool prefers_cublas_for_gated(const Case& c, int products) {
  return c.m < 16 || (c.k >= (products == 1 ? 1024 : 4096) && c.tiles(128, 64) * 4 <= c.sm_count);
}

// A CTA has 128 rows and all columns, so few rows of many columns occupy few multiprocessors for long.
bool prefers_input_gradients(const Case& c) { return c.n <= 512 || c.rows(128) * 5 >= c.sm_count * 2; }

}  // namespace

Plan plan(const Case& c, const Conditions& conditions) {
  Plan plan;
  if (!conditions.is_gated) plan.add(Way::kFewRows);
  const bool by_cublas = conditions.automatic &&
                         (conditions.is_gated ? prefers_cublas_for_gated(c, conditions.products) : prefers_cublas(c));
  if (conditions.has_sm90) {
    const bool slower = by_cublas || (conditions.automatic && !conditions.is_gated && prefers_sm80(c));
    const bool resident = conditions.is_gated ? !conditions.writes_products && !conditions.makes_cotangents
                                              : !slower && prefers_resident_weights(c);
    if (resident) plan.add(Way::kResidentWeights);
    if (!slower) plan.add(Way::kStreamedWeights);
  }
  if (conditions.writes_products) return plan;
  if (conditions.is_float32) {
    Case of_all = c;
    of_all.n *= conditions.products;
    if (conditions.has_split_sm90 && (!conditions.automatic || prefers_split_sm90(of_all, /*has_pass=*/true)))
      plan.add(Way::kSplitFloat32);
    if (!conditions.automatic || !prefers_cublas_to_float32(c.m, c.n, c.k, conditions.splits_float32))
      plan.add(Way::kSm80);
  } else if (conditions.is_mixed || !conditions.automatic ||
             !(prefers_cublas_to_sm80(c, conditions.is_gated) || (conditions.is_gated && by_cublas))) {
    plan.add(Way::kSm80);
  }
  return plan;
}

std::optional<DenseGradientsWay> dense_gradients_way(const Case& c, bool automatic) {
  if (has_kernel<DenseGradients>(c)) return DenseGradientsWay::kOnePass;
  if (!has_kernel<DenseInputGradients>(c) || (automatic && !prefers_input_gradients(c))) return std::nullopt;
  return DenseGradientsWay::kInputGradients;
}

// Large tiles read the operands less often, small ones occupy more multiprocessors.
constexpr Rule<Sm80Tiling> kSm80[] = {
    {[](const Case& c) { return c.n <= 64 && c.tiles(128, 64) >= c.sm_count; }, Sm80Tiling::k128x64},
    {[](const Case& c) { return c.n > 64 && c.tiles(128, 128) >= c.sm_count; }, Sm80Tiling::k128x128},
    {[](const Case& c) { return c.m > 32 && c.tiles(64, 64) * 2 >= c.sm_count; }, Sm80Tiling::k64x64},
    {[](const Case& c) { return c.m > 32 && c.tiles(64, 32) * 2 >= c.sm_count; }, Sm80Tiling::k64x32},
    {always, Sm80Tiling::k32x32},
};

namespace {

// Each CTA copies its rows of w once, which many outputs repay. With few rows of w, several CTAs fit a multiprocessor.
// For cotangents of one product and a factor, sm80/kernel.cuh is as fast: memory takes all the time. Operands in two
// dtypes have no other kernel.
std::optional<ResidentTiling> resident_tiling(const Case& c, const Sm80Conditions& conditions) {
  using enum ResidentTiling;
  constexpr int most_columns = 512;  // with more features, shared memory would have no room for enough rows of w
  const auto [products, is_gated, reads_factor, makes_cotangents, is_mixed, automatic, load, store] = conditions;
  const int64_t w_rows = c.n * products, least = (w_rows <= 64 ? 15'000 : 60'000) * int64_t{c.sm_count};
  const bool is_faster = reads_factor ? !makes_cotangents && c.m >= int64_t{62} * c.sm_count : c.m * w_rows >= least;
  if (c.k > most_columns || !(is_faster || is_mixed)) return std::nullopt;
  return reads_factor || !is_faster || w_rows <= 128 || makes_cotangents ? k16Rows : k64Rows;
}

// Rows that are not aligned to 16 bytes: any of gate(), or those of x or of a weight of glu() if elements must be
// loaded one by one. From so many outputs on, cuBLAS saves more than its pass costs.
bool prefers_cublas_for_odd_rows(const Case& c, const Sm80Conditions& conditions) {
  const auto [least, most] = std::minmax(conditions.load_vector, conditions.store_vector);
  if (conditions.reads_factor ? least == 8 : conditions.load_vector > 1) return false;
  return c.m * c.n >= int64_t{1} << (conditions.reads_factor && most == 1 ? 17 : 20);
}

}  // namespace

std::optional<Sm80Plan> sm80_plan(const Case& c, const Sm80Conditions& conditions) {
  const bool may_prefer_cublas = conditions.automatic && conditions.is_gated && !conditions.is_mixed;
  if (may_prefer_cublas && prefers_cublas_for_odd_rows(c, conditions)) return std::nullopt;
  const auto* const rule = std::ranges::find_if(kSm80, [&](const auto& rule) { return rule.suits(c); });
  return Sm80Plan{resident_tiling(c, conditions), rule->tiling};
}

}  // namespace torchops::cuda::gemm
