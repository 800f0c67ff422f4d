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
// epilogue that nothing overlaps, in multiples of what a column takes. 32 columns are what loading the rows costs.
// Fitted to 697 shapes (H100, bfloat16; 512 to 262144 rows, k from 320 to 8192, n from 136 to 2304), of which those
// that columns_in_pairs() accepts took 1.01 times as long as with the fastest of the tilings in the mean, and 0.92 of
// what k128x128, k128x128SharedA and k128x256 took by rules of their own. In TF32 (276 shapes), that was 0.90 in the
// median.
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

// The fastest of the tilings measured on an H100 (bfloat16; 45 shapes, 16 to 1048576 rows, k and n from 64 to 8192).
constexpr Rule<Tiling> kDense[] = {
    // Few outputs: smaller tiles occupy more multiprocessors.
    {[](const Case& c) { return c.n <= 64 || c.tiles(128, 128) * 2 <= c.sm_count; }, Tiling::k128x64},
    // A long and narrow result is bound by memory: many small tiles keep more loads and stores in flight.
    {[](const Case& c) { return c.n <= 128 && c.k <= 512; }, Tiling::k64x128},
    // Share the loads of a, the larger operand, and leave few columns of tiles empty: (262144, 384) to 264 features
    // takes 158 us with two tiles of 144 columns, and 271 with three of 128, one of which is almost empty.
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
    // Two steps along k are still too few. Long sums are bound by the traffic of the tiles: (4096, 4096) to 4096
    // features takes 194 us instead of 212 (a cold call).
    {[](const Case& c) {
       const int64_t tiles = c.tiles(128, 256);
       return (c.k <= 128 && c.n > 512) || (c.k > 4096 && tiles * 4 >= int64_t{c.sm_count} * 3) ||
              (c.k >= 4096 && tiles >= int64_t{c.sm_count} * 3);
     },
     Tiling::k128x256},
    {fits_one_wave, Tiling::k128x256},
    {always, Tiling::k128x128},
};

// The fastest of the tilings measured on an H100, of cases that prefers_narrow() accepts. Where no rule suits, the
// kernels of kDense are faster.
constexpr Rule<NarrowTiling> kNarrowDense[] = {
    {[](const Case& c) { return c.n % 16 != 0; }, NarrowTiling::k64x128x256},
    {[](const Case& c) { return c.k <= 64 && (c.n <= 192 || c.m <= 16384); }, NarrowTiling::k128x64x64},
    {[](const Case& c) { return c.k <= 192 && c.n > 128 && c.n <= 192; }, NarrowTiling::k64x192x192},
    {[](const Case& c) { return c.k <= 96 || (c.k <= 128 && c.n > 64); }, NarrowTiling::k64x128x128},
    {[](const Case& c) { return c.k <= 192 && c.n > 1024 && c.m > 8192; }, NarrowTiling::k64x192x192},
    {[](const Case& c) { return c.k <= 192 && c.n > 256; }, NarrowTiling::k64x128x256},
    {[](const Case& c) { return c.k > 192 && (c.n > 192 || (c.n > 64 && c.n <= 128)); }, NarrowTiling::k64x128x256},
};

// Eight-bit operands: the fastest of the tilings measured on an H100 (dense; 6 shapes, 16 to 16384 rows, k and n from
// 2048 to 8192). Few outputs take small tiles: (512, 2048) to 2048 features takes 9.1 us, and 11.2 with 128 x 128, and
// (64, 4096) to 4096 features 11.3 us with 64 x 64, and 15.0 with 64 x 128 and clusters of two in the rows.
// (4096, 4096) to 4096 features takes 117 us with 128 x 128, and 125 with 128 x 192.
constexpr Rule<Tiling> kScaled[] = {
    {[](const Case& c) { return c.m <= 64 && c.tiles(64, 64) <= c.sm_count; }, Tiling::k64x64SharedA},
    {[](const Case& c) { return c.m <= 64 || c.tiles(128, 128) <= c.sm_count; }, Tiling::k64x128},
    {always, Tiling::k128x128CooperativeTall},
};

// The fastest of the tilings measured on an H100, from n = 64 to 16384. With one tile per row there is no barrier.
// Otherwise two small tiles in flight hide the wait at the barrier, until, in long products, the traffic of small tiles
// costs more than the wait. Large tiles are then faster if whole panels keep nine of ten clusters busy.
constexpr Rule<Tiling> kSquareMatmul[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192; }, Tiling::k64x192ResidentB},
    {[](const Case& c) { return c.n > 128 && c.n <= 256; }, Tiling::k64x256ResidentB},
    // In batches, share the loads of b, too: 128 matrices with n = 1024 take 394 us instead of 420, and 512 with n =
    // 512 take 302 us instead of 330 (cold calls). Of one b, (65536, 1024) takes 211 us instead of 205.
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
// again, from L2: with the first tiling, glu of (1048576, 192) to 192 features takes 309 us instead of 432. Gates of
// such sizes were not measured with it.
constexpr Rule<NarrowTiling> kNarrow[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192 && c.k <= 192; }, NarrowTiling::k64x192x192},
    {[](const Case& c) { return c.n <= 64 && c.k <= 64; }, NarrowTiling::k128x64x64},
    {[](const Case& c) { return c.k <= 128; }, NarrowTiling::k64x128x128},
    {[](const Case& c) { return c.k <= 256; }, NarrowTiling::k64x128x256},
};
constexpr std::span kNarrowGate = std::span(kNarrow).subspan<1>();

// The fastest of the tilings measured on an H100 (bfloat16; 14 shapes, 16 to 262144 rows, k from 128 to 8192, n from
// 256 to 11008).
constexpr Rule<Tiling> kStreamedGlu[] = {
    // Few outputs: smaller tiles occupy more multiprocessors. (16, 4096) to 4096 takes 40 us instead of 51.
    {[](const Case& c) { return c.tiles(128, 128) * 2 <= c.sm_count; }, Tiling::k128x64SharedA},
    // A long sum is bound by the traffic of the tiles, which is less with large ones, and its epilogue is a small part:
    // (16384, 2048) to 5632 takes 1086 us instead of 1118. In a single wave, nothing overlaps an epilogue anyway:
    // (1024, 512) to 2048 takes 13.0 us instead of 14.0.
    {[](const Case& c) { return c.k >= 2048 || c.tiles(128, 128) <= c.sm_count; }, Tiling::k128x128Cooperative},
    // Otherwise, overlapping epilogues and products wins: (65536, 384) to 1536 takes 245 us instead of 264.
    {always, Tiling::k128x64SharedA},
};

// The only tiling measured. gate of (524288, 384) to 384 features takes 493 us, against 733 with cuBLAS and one more
// pass; (4096, 1024) to 1024 takes 27, against 39; (512, 512) to 512 takes 24, against 39 (H100 80GB HBM3, torch 2.11,
// bfloat16).
constexpr Rule<Tiling> kStreamedGate[] = {{always, Tiling::k128x64SharedA}};

// The only tiling measured. All gradients of glu from (262144, 384) to 384 features take 945 us, against 1569 if cuBLAS
// recomputes the products (H100 80GB HBM3, torch 2.11, bfloat16).
constexpr Rule<Tiling> kStreamedCotangents[] = {{always, Tiling::k128x64SharedA}};

// The smallest tile that channels and features fit. A triangle update with N = 512 and 64 of both takes 123 us with
// tiles of 64, and 151 with those of 128 (H100, bfloat16).
constexpr Rule<NarrowTiling> kPair[] = {
    {[](const Case& c) { return c.n <= 64 && c.k <= 64; }, NarrowTiling::k64x64x64},
    {[](const Case& c) { return c.n <= 64; }, NarrowTiling::k64x64x128},
    {always, NarrowTiling::k64x128x128},
};

constexpr Rule<NarrowTiling> kFeedForward[] = {{always, NarrowTiling::k64x128x128}};

// The only tiling measured.
constexpr Rule<Tiling> kStreamedPairIn[] = {{always, Tiling::k128x64SharedA}};

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

// For sizes at which most CTAs of a cluster have columns. All gradients of glu but dx, with its cotangents, from
// (1048576, 256) to 256 features take 917 us, against 1505 with the kernel for cotangents and cuBLAS; from 192 to 192,
// they take 592 (H100, bfloat16).
constexpr Rule<GradientTiling> kWeightGradients[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192 && c.k > 128 && c.k <= 192; }, GradientTiling::k192x192Cluster},
    {[](const Case& c) { return c.n > 128 && c.n <= 256 && c.k > 128 && c.k <= 256; }, GradientTiling::k256x256Cluster},
};

// Measured on an H100 in bfloat16, from 64 to 1048576 rows.
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
TORCHOPS_RULES(StreamedGate, kStreamedGate)
TORCHOPS_RULES(GateCotangents, kStreamedCotangents)
TORCHOPS_RULES(GluSigmoidCotangents, kStreamedCotangents)
TORCHOPS_RULES(GluSiluCotangents, kStreamedCotangents)
TORCHOPS_RULES(TriangleIn, kPair)
TORCHOPS_RULES(TriangleOut, kPair)
TORCHOPS_RULES(StreamedTriangleIn, kStreamedPairIn)
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

// Where its rules choose a tiling, it took 0.66 to 1.07 of the time of the kernels of kDense, 0.92 in the median (H100,
// bfloat16; 307 shapes, 256 to 1048576 rows, k from 32 to 256, n from 32 to 4096).
bool prefers_resident_weights(const Case& c) {
  // It starts slower than small tiles do, so its own should fill most multiprocessors.
  if (c.k > 256 || c.m * c.n < 1 << 20) return false;
  // Its CTAs stay in their columns, which should divide nine of ten multiprocessors.
  if (c.sm_count % c.columns(128) * 10 >= c.sm_count) return false;
  // Rows of the result that don't begin at 32-byte boundaries: few columns or a short sum were slower.
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
// 65 rows on, (128, 4096) to 4096 features in 18 us instead of 26; and if the elements of a must be loaded one by one,
// (1000, 1001) to 1003 in 32 instead of 49. But their rows of odd length are slow: (4096, 1000) to 1001 takes 97 us,
// and 34 by the kernel (H100, bfloat16).
bool prefers_cublas_to_sm80(const Case& c, bool is_gated) {
  // A single wave takes as long as a sum, most of which is loading elements one or two at a time.
  const bool has_one_wave = is_gated && c.tiles(64, 64) <= c.sm_count;
  if (c.k % 2 != 0) return c.k > (has_one_wave ? 192 : 512);
  if (c.k % 8 != 0 && c.k > 1024 && has_one_wave) return true;
  return c.n % 2 == 0 && ((c.k > 512 && c.tiles(128, 128) > c.sm_count) || (c.k > 2048 && c.m > 64));
}

// Fewer than 16 rows were not measured. From (128, 8192) to 1024 features, cuBLAS and the pass took 38 us and the
// kernel 45. From (16, 4096) to 4096, where more than a quarter of the multiprocessors have a tile, they took 48 and 40
// (H100, bfloat16).
// The second of two products hides what splitting the sum of one would save.
bool prefers_cublas_for_gated(const Case& c, int products) {
  return c.m < 16 || (c.k >= (products == 1 ? 1024 : 4096) && c.tiles(128, 64) * 4 <= c.sm_count);
}

// A CTA has 128 rows and all columns, so few rows of many columns occupy few multiprocessors for long: dz and dx of
// (4096, 256) to 1024 features take 30 us instead of 27. 65536 rows take 175 us instead of 224 (H100, bfloat16).
bool prefers_input_gradients(const Case& c) { return c.n <= 512 || c.rows(128) * 5 >= c.sm_count * 2; }

}  // namespace

Plan plan(const Case& c, const Conditions& conditions) {
  Plan plan;
  if (!conditions.is_gated) plan.add(Way::kFewRows);
  const bool by_cublas = conditions.automatic && (conditions.is_gated ? prefers_cublas_for_gated(c, conditions.products) : prefers_cublas(c));
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

// From so many outputs on, and with this tiling, it was the fastest for 2048 to 1048576 rows, 64 to 512 features in and
// 64 to 1024 out (H100, bfloat16). With few rows of w, several CTAs fit a multiprocessor. For cotangents of one product
// and a factor, sm80/kernel.cuh is as fast: memory takes all the time. Operands in two dtypes have no other kernel.
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
// loaded one by one. (262143, 129) to 127 features: gate took 471 us by the kernel and 220 by cuBLAS and the pass, glu
// 453 and 357, in eager mode 246 and 374. One by one, gate of (4095, 129) to 127 took 15.3 and 10.7, of (1023, 129) to
// 127 9.7 and 9.0, of (255, 129) to 127 9.4 and 9.9, and glu of (4095, 129) to 127 15.0 and 18.1 (H100, bfloat16).
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
