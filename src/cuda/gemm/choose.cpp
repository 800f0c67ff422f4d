#include "cuda/gemm/choose.h"

namespace torchops::cuda::gemm {
namespace {

bool always(const Case&) { return true; }

// The fastest tilings on an H100, of those measured (bfloat16; 45 shapes, 16 to 1048576 rows, k and n from 64 to 8192).
constexpr Rule<Tiling> kDense[] = {
    // Few outputs: smaller tiles, so that more multiprocessors have one.
    {[](const Case& c) { return c.n <= 64 || c.tiles(128, 128) * 2 <= c.sm_count; }, Tiling::k128x64},
    // A result that is long and narrow is bound by memory: many small tiles keep more loads and stores in flight.
    {[](const Case& c) { return c.n <= 128 && c.k <= 512; }, Tiling::k64x128},
    // One step along k leaves nothing to overlap the epilogue with: better a large one.
    {[](const Case& c) { return c.k <= 64 && c.n > 256; }, Tiling::k128x256},
    // Where a is the larger operand, share what is loaded of it, unless that leaves one tile in a row alone.
    {[](const Case& c) { return c.k <= 256 && c.n <= 2048 && c.m >= 2 * c.n && c.columns(128) % 2 == 0; },
     Tiling::k128x128ResidentB},
    {[](const Case& c) { return c.k > 256 && c.n <= 2048 && c.m >= 2 * c.n && c.columns(128) % 2 == 0; },
     Tiling::k128x128SharedA},
    // Two steps along k are little too, and a long sum is bound by the traffic of the tiles.
    {[](const Case& c) {
       return (c.k <= 128 && c.n > 512) || (c.k > 4096 && c.tiles(128, 256) * 4 >= int64_t{c.sm_count} * 3);
     },
     Tiling::k128x256},
    // One wave of large tiles instead of two of small ones.
    {[](const Case& c) {
       return c.n > 128 && c.m >= 2048 && c.tiles(128, 128) > c.sm_count && c.tiles(128, 256) <= c.sm_count;
     },
     Tiling::k128x256},
    {always, Tiling::k128x128},
};

// Eight-bit operands: the fastest tilings on an H100, of those measured (dense; 6 shapes, 16 to 16384 rows, k and n
// from 2048 to 8192). Few outputs take small tiles: (512, 2048) to 2048 features 9.1 us, and 11.2 with 128 x 128, which
// take 117 us for (4096, 4096) to 4096 features. Tiles of 128 x 192 take 125.
constexpr Rule<Tiling> kScaled[] = {
    {[](const Case& c) { return c.m <= 64 || c.tiles(128, 128) <= c.sm_count; }, Tiling::k64x128},
    {always, Tiling::k128x128CooperativeTall},
};

// The fastest tilings on an H100, of those measured from n = 64 to 16384. With one tile for a row there is no barrier.
// Otherwise two small tiles in flight hide the wait at the barrier, until, in long products, the traffic of small tiles
// costs more than the wait. There the large ones are faster, if whole panels keep nine of ten clusters busy.
constexpr Rule<Tiling> kSquareMatmul[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192; }, Tiling::k64x192ResidentB},
    {[](const Case& c) { return c.n > 128 && c.n <= 256; }, Tiling::k64x256ResidentB},
    {[](const Case& c) { return c.n > 256 && c.n <= 1024 && c.columns(128) % 2 == 0; }, Tiling::k128x128SharedAWide},
    {[](const Case& c) {
       const int64_t clusters = c.sm_count / 2;
       return c.n >= 4096 && clusters % c.columns(256) * 10 < clusters;
     },
     Tiling::k128x256},
    {always, Tiling::k128x128},
    // Where a row has too many tiles of 128 columns to be resident, half as many may be.
    {always, Tiling::k128x256},
};

// The smallest that has room for k. More columns than a tile has are other CTAs' work, which read the rows again, from
// L2: with the first, glu of (1048576, 192) to 192 features takes 309 us instead of 432. Gates of such sizes were not
// measured with it.
constexpr Rule<NarrowTiling> kNarrow[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192 && c.k <= 192; }, NarrowTiling::k64x192x192},
    {[](const Case& c) { return c.n <= 64 && c.k <= 64; }, NarrowTiling::k128x64x64},
    {[](const Case& c) { return c.k <= 128; }, NarrowTiling::k64x128x128},
    {[](const Case& c) { return c.k <= 256; }, NarrowTiling::k64x128x256},
};
constexpr std::span kNarrowGate = std::span(kNarrow).subspan<1>();

// The fastest tilings on an H100, of those measured (bfloat16; 14 shapes, 16 to 262144 rows, k from 128 to 8192, n from
// 256 to 11008).
constexpr Rule<Tiling> kWideGlu[] = {
    // Few outputs: smaller tiles, so that more multiprocessors have one. (16, 4096) to 4096: 40 us instead of 51.
    {[](const Case& c) { return c.tiles(128, 128) * 2 <= c.sm_count; }, Tiling::k128x64SharedA},
    // A long sum is bound by the traffic of the tiles, of which large ones have less, and its epilogue is a small part:
    // (16384, 2048) to 5632 takes 1086 us instead of 1118. In a single wave an epilogue has nothing to overlap with:
    // (1024, 512) to 2048 takes 13.0 us instead of 14.0.
    {[](const Case& c) { return c.k >= 2048 || c.tiles(128, 128) <= c.sm_count; }, Tiling::k128x128Cooperative},
    // The rest gains from the overlap of epilogues and products: (65536, 384) to 1536 takes 245 us instead of 264.
    {always, Tiling::k128x64SharedA},
};

// The only one measured. gate of (524288, 384) to 384 features takes 493 us, and 733 by cuBLAS and a pass; of (4096,
// 1024) to 1024, 27 and 39; of (512, 512) to 512, 24 and 39 (H100 80GB HBM3, torch 2.11, bfloat16).
constexpr Rule<Tiling> kWideGate[] = {{always, Tiling::k128x64SharedA}};

// The only one measured. All gradients of glu from (262144, 384) to 384 features take 945 us, and 1569 where cuBLAS
// makes the products again (H100 80GB HBM3, torch 2.11, bfloat16).
constexpr Rule<Tiling> kWideCotangents[] = {{always, Tiling::k128x64SharedA}};

constexpr Rule<NarrowTiling> kPair[] = {{always, NarrowTiling::k64x128x128}};

// The only ones measured: of N = 768, c = d = 384 the kernels take 1138 and 682 us (H100, bfloat16).
constexpr Rule<Tiling> kWidePairIn[] = {{always, Tiling::k128x64SharedA}};

constexpr Rule<Tiling> kWidePairOut[] = {{always, Tiling::k128x128Cooperative}};

constexpr Rule<GradientTiling> kPairGradients[] = {{always, GradientTiling::k128x128}};

constexpr Rule<GradientTiling> kGated[] = {
    {[](const Case& c) { return c.n <= 64 && c.k <= 64; }, GradientTiling::k64x64},
    {[](const Case& c) { return c.n <= 128 && c.k <= 128; }, GradientTiling::k128x128},
};

// Where most CTAs of a cluster have columns. All gradients of glu but dx, with its cotangents, from (1048576, 256) to
// 256 features take 917 us, and 1505 by the kernel for cotangents and cuBLAS; from 192 to 192, 592 (H100, bfloat16).
constexpr Rule<GradientTiling> kWeightGradients[] = {
    {[](const Case& c) { return c.n > 128 && c.n <= 192 && c.k > 128 && c.k <= 192; }, GradientTiling::k192x192Cluster},
    {[](const Case& c) { return c.n > 128 && c.n <= 256 && c.k > 128 && c.k <= 256; }, GradientTiling::k256x256Cluster},
};

// Measured on an H100, bfloat16, from 64 rows to 1048576.
constexpr Rule<GradientTiling> kDenseGradients[] = {
    {[](const Case& c) { return c.n <= 128 && c.k <= 128; }, GradientTiling::k128x128},
    {[](const Case& c) { return c.n <= 192 && c.k <= 192; }, GradientTiling::k192x192},
    {[](const Case& c) { return c.n <= 256 && c.k <= 128; }, GradientTiling::k256x128},
    {[](const Case& c) { return c.n <= 128 && c.k <= 256; }, GradientTiling::k128x256},
};

}  // namespace

#define TORCHOPS_RULES(operation, rules_of_it)                           \
  template <>                                                            \
  std::span<const Rule<typename operation::Tiling>> rules<operation>() { \
    return rules_of_it;                                                  \
  }
TORCHOPS_RULES(Dense, kDense)
TORCHOPS_RULES(ScaledDense, kScaled)
TORCHOPS_RULES(ScaledProduct, kScaled)
TORCHOPS_RULES(ScaledGateSigmoid, kScaled)
TORCHOPS_RULES(ScaledGateSilu, kScaled)
TORCHOPS_RULES(SquareMatmul, kSquareMatmul)
TORCHOPS_RULES(SquareMatmulT, kSquareMatmul)
TORCHOPS_RULES(Gate, kNarrowGate)
TORCHOPS_RULES(GluSigmoid, kNarrow)
TORCHOPS_RULES(GluSilu, kNarrow)
TORCHOPS_RULES(WideGluSigmoid, kWideGlu)
TORCHOPS_RULES(WideGluSilu, kWideGlu)
TORCHOPS_RULES(WideGate, kWideGate)
TORCHOPS_RULES(GateCotangents, kWideCotangents)
TORCHOPS_RULES(GluSigmoidCotangents, kWideCotangents)
TORCHOPS_RULES(GluSiluCotangents, kWideCotangents)
TORCHOPS_RULES(TriangleIn, kPair)
TORCHOPS_RULES(TriangleOut, kPair)
TORCHOPS_RULES(WideTriangleIn, kWidePairIn)
TORCHOPS_RULES(WideTriangleOut, kWidePairOut)
TORCHOPS_RULES(TriangleInGradients, kPairGradients)
TORCHOPS_RULES(TriangleOutGradients, kPairGradients)
TORCHOPS_RULES(Transition, kPair)
TORCHOPS_RULES(TransitionGradients, kPair)
TORCHOPS_RULES(DenseGradients, kDenseGradients)
TORCHOPS_RULES(GateGradients, kGated)
TORCHOPS_RULES(GluSigmoidGradients, kGated)
TORCHOPS_RULES(GluSiluGradients, kGated)
TORCHOPS_RULES(GluSigmoidWeightGradients, kWeightGradients)
TORCHOPS_RULES(GluSiluWeightGradients, kWeightGradients)

// cuBLAS divides a long sum among multiprocessors that would have no tile.
bool prefers_cublas(const Case& c) { return c.m < 16 || (c.k >= 512 && c.tiles(64, 128) * 2 <= c.sm_count); }

// Fewer than 16 rows were not measured. From (128, 8192) to 1024 features cuBLAS and the pass took 38 us, the kernel
// 45; from (16, 4096) to 4096, where more than a quarter of the multiprocessors has a tile, 48 and 40 (H100, bfloat16).
bool prefers_cublas_for_glu(const Case& c) { return c.m < 16 || (c.k >= 4096 && c.tiles(128, 64) * 4 <= c.sm_count); }

}  // namespace torchops::cuda::gemm
