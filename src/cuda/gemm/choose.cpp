#include "cuda/gemm/choose.h"

#include <algorithm>
#include <limits>

namespace torchops::cuda::gemm {
namespace {

bool always(const Case&) { return true; }

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

template <AttentionTiling tiling>
constexpr Rule<AttentionTiling> kOfAttention{[](const Case& c) { return attention_tiling(c) == tiling; }, tiling};

constexpr Rule<AttentionTiling> kAttention[] = {kOfAttention<AttentionTiling::k2x128x32>,
                                                kOfAttention<AttentionTiling::k4x64x32>,
                                                kOfAttention<AttentionTiling::k3x64x64>};

}  // namespace

// A CTA of k2x128x32 has two blocks of 64 queries. For an odd number of these, one of k4x64x32, whose steps take
// longer, has no empty one.
AttentionTiling attention_tiling(const Case& c) {
  using enum AttentionTiling;
  if (c.k > kSpec<k2x128x32>.d) return k3x64x64;
  return c.rows(64) % 2 != 0 ? k4x64x32 : k2x128x32;
}

#define TORCHOPS_RULES(operation, rules_of_it)                           \
  template <>                                                            \
  std::span<const Rule<typename operation::Tiling>> rules<operation>() { \
    return rules_of_it;                                                  \
  }
TORCHOPS_RULES(ScaledDense, kScaled)
TORCHOPS_RULES(ScaledProduct, kScaled)
TORCHOPS_RULES(ScaledGateSigmoid, kScaled)
TORCHOPS_RULES(ScaledGateSilu, kScaled)
TORCHOPS_RULES(SquareMatmul, kSquareMatmul)
TORCHOPS_RULES(SquareMatmulT, kSquareMatmul)
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
TORCHOPS_RULES(Attention, kAttention)
TORCHOPS_RULES(MaskedAttention, kAttention)

namespace {

// A CTA has 128 rows and all columns, so few rows of many columns occupy few multiprocessors for long.
bool prefers_input_gradients(const Case& c) { return c.n <= 512 || c.rows(128) * 5 >= c.sm_count * 2; }

}  // namespace

std::optional<DenseGradientsWay> dense_gradients_way(const Case& c, bool automatic) {
  if (has_kernel<DenseGradients>(c)) return DenseGradientsWay::kOnePass;
  if (!has_kernel<DenseInputGradients>(c) || (automatic && !prefers_input_gradients(c))) return std::nullopt;
  return DenseGradientsWay::kInputGradients;
}

}  // namespace torchops::cuda::gemm
