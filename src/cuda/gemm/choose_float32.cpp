#include <algorithm>

#include "cuda/gemm/choose.h"

// The choices for products of float32 numbers that keep their digits.
namespace torchops::cuda::gemm {
namespace {

// What a CTA of sm90/products/split_float32.cuh computes, and the microseconds that it takes for 32 columns of its
// operands. These are fitted to measurements on an H200, and so are the numbers of cuBLAS below; those of the pass
// follow from bandwidth.
struct SplitTile {
  int rows, columns;
  double step;
};
constexpr SplitTile kSplitTiles[] = {{128, 128, 1.27}, {128, 96, 1.06}, {128, 64, 0.68}, {64, 64, 0.53}};

// Microseconds that a split product takes: its first loads and last stores, and the waves of its tiles.
double time_of_split(const Case& c, const SplitTile& tile) {
  const int64_t waves = (c.tiles(tile.rows, tile.columns) + c.sm_count - 1) / c.sm_count;
  return 3 + static_cast<double>(waves * ((c.k + 31) / 32)) * tile.step;
}

// Among equals, large tiles load less.
const SplitTile& split_tile(const Case& c) {
  return *std::ranges::min_element(kSplitTiles, {}, [&](const SplitTile& tile) { return time_of_split(c, tile); });
}

template <int rows, int columns>
bool suit_split(const Case& c) {
  const SplitTile& tile = split_tile(c);
  return tile.rows == rows && tile.columns == columns;
}

// In a Case, n is the columns of all products. The last one is also for an a that is overwritten, whose result must fit
// one tile.
constexpr Rule<Tiling> kSplit[] = {
    {suit_split<64, 64>, Tiling::k64x64Split},
    {suit_split<128, 64>, Tiling::k128x64Split},
    {suit_split<128, 96>, Tiling::k128x96Split},
    {[](const Case&) { return true; }, Tiling::k128x128Split},
};

}  // namespace

#define TORCHOPS_SPLIT_RULES(operation)              \
  template <>                                        \
  std::span<const Rule<Tiling>> rules<operation>() { \
    return kSplit;                                   \
  }
TORCHOPS_SPLIT_RULES(Float32Product)
TORCHOPS_SPLIT_RULES(Float32Dense)
TORCHOPS_SPLIT_RULES(Float32Gate)
TORCHOPS_SPLIT_RULES(Float32GluSigmoid)
TORCHOPS_SPLIT_RULES(Float32GluSilu)

// cuBLAS multiplies by FFMAs, and a pass reads and writes memory.
bool prefers_split_sm90(const Case& c, bool has_pass) {
  const auto outputs = static_cast<double>(c.m) * static_cast<double>(c.n);
  const double cublas = 8 + outputs * static_cast<double>(c.k) / 18e6, pass = has_pass ? 2 + outputs / 4e5 : 0;
  return time_of_split(c, split_tile(c)) < cublas + pass;
}

// By FFMAs: cuBLAS multiplies faster the longer the sums are, and then takes another pass. Split products run on tensor
// cores, so the kernel keeps ahead up to longer sums, and beyond these if enough outputs fill its large tiles. Fewer
// rows were not measured.
bool prefers_cublas_to_float32(int64_t m, int64_t n, int64_t k, bool splits) {
  if (!splits) return k > 128 || n < 64 || m < 2048;
  if (m < 256 || k > kMostSplitColumns) return true;
  return k > 256 ? n < 128 || m * n < 1 << 21 : k > 128 && n < 64;
}

}  // namespace torchops::cuda::gemm
