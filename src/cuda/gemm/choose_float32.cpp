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

namespace {

// Microseconds of cuBLAS, which multiplies by FFMAs, and of a pass, which reads and writes memory.
double time_of_cublas_float32(const Case& c, bool has_pass) {
  const auto outputs = static_cast<double>(c.m) * static_cast<double>(c.n);
  return 8 + outputs * static_cast<double>(c.k) / 18e6 + (has_pass ? 2 + outputs / 4e5 : 0);
}

}  // namespace

bool prefers_split_sm90(const Case& c, bool has_pass) {
  return time_of_split(c, split_tile(c)) < time_of_cublas_float32(c, has_pass);
}

// By FFMAs, cuBLAS multiplies faster the longer the sums are, and then takes another pass; fewer rows were not
// measured. Split products run on tensor cores: a step of 64 columns takes as long for a few tiles as its latency.
bool prefers_cublas_to_float32(const Case& c, int products, bool splits) {
  if (!splits) return c.k > 128 || c.n < 64 || c.m < 2048;
  if (c.k > kMostSplitColumns) return true;
  const int64_t waves = (c.tiles(128, 64) + c.sm_count - 1) / c.sm_count, steps = (c.k + 63) / 64;
  const double kernel = 3.5 + static_cast<double>(steps) * std::max(5.5, 3.6 * static_cast<double>(waves));
  Case of_all = c;
  of_all.n *= products;
  return time_of_cublas_float32(of_all, /*has_pass=*/true) < kernel;
}

}  // namespace torchops::cuda::gemm
