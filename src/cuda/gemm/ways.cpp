#include "cuda/gemm/ways.h"

#include <algorithm>

#include "ops/kept_products.h"

namespace torchops::cuda::gemm {
namespace {

bool is_odd(const Case& c) { return c.k % 2 != 0 || c.n % 2 != 0; }

// With a multiple of eight rows in w, the fused kernel reads the copies. Otherwise the product is cuBLAS's, and only x
// is copied: a long sum repays that, and with even sizes, which cuBLAS multiplies faster, an even longer one. If only
// the rows of the result are odd, x needs no copy.
bool for_gate(const Case& c, int) {
  // For few features out, the copy takes longer than the product.
  if (c.n < 64) return false;
  return c.n % 8 == 0 || c.k >= (is_odd(c) ? 193 : 384) || (c.k % 8 == 0 && c.n % 2 != 0);
}

// g, v and dv are copied, too, unless w has a multiple of eight rows. Longer sums repay that, and so does the kernel
// for all gradients, if both numbers of features fit it.
bool for_gate_gradients(const Case& c, int) {
  return c.n % 8 == 0 || c.k > detail::kMostUncopied ||
         (is_odd(c) && c.k <= detail::kMostOfOnePass && c.n <= detail::kMostOfOnePass);
}

// For elements that the kernel would load one by one, or many long rows of which it would load two at once. Loads of
// four are fast enough.
bool for_glu(const Case& c, int vector) {
  return vector == 1 || (vector == 2 && c.k > 128 && c.m * c.n * c.k >= int64_t{1} << 30);
}

// Both products are computed again, and four of gradients follow, so copies are read often.
bool for_glu_gradients(const Case&, int) { return true; }

// In the order of CopiedLayer: the fewest products of elements, and for which sizes.
constexpr struct {
  int64_t least_products;
  bool (*suits)(const Case& c, int vector);
} kCopies[] = {{200'000'000, for_gate},
               {int64_t{1} << 27, for_gate_gradients},
               {200'000'000, for_glu},
               {int64_t{1} << 26, for_glu_gradients}};

// The kernel of split products needs enough tiles to fill the device (an H100 has room for 264), and few that are half
// empty.
bool prefers_cublas_to_split_product(const Case& c) {
  return c.tiles(128, 128) < 240 || (c.n % 128 != 0 && c.n != 64 && c.n < 512) || c.m < 128 || c.k < 64;
}

}  // namespace

bool copies_pay(CopiedLayer layer, const Case& c, int vector) {
  const auto& rule = kCopies[static_cast<int>(layer)];
  return c.m * c.n * c.k >= rule.least_products && rule.suits(c, vector);
}

ProductWay product_way(const Case& c, bool splits, bool automatic) {
  if (splits) {
    const bool by_cublas = c.k > kMostSplitColumns || (automatic && prefers_cublas_to_split_product(c));
    return by_cublas ? ProductWay::kCublas : ProductWay::kSplit;
  }
  // cuBLAS may want to split long sums of so few tiles, for which it needs a workspace.
  const bool may_split = c.k > 1024 && c.tiles(128, 128) < c.sm_count;
  return may_split ? ProductWay::kCublas : ProductWay::kCublasWithoutWorkspace;
}

// For few rows, the copy of the weights costs more than one product saves. In float32 and from more than 128 features
// on, cuBLAS may be slower for both gradients of weights together than for one after the other.
StackedProducts stacked_products(const Case& c, bool is_exact_float32) {
  const bool stacks = c.m > 4 * c.n;
  return {stacks, stacks && !(is_exact_float32 && c.n > 128)};
}

// A product of few tiles takes as long as one tile, and two of them twice as long. The copy of the weights takes as
// long as a short sum.
bool stacks_products(const Case& c, bool adjacent) {
  const bool has_one_wave = 2 * c.tiles(128, 64) <= c.sm_count;
  return has_one_wave && (adjacent || (c.element == Element::kTF32 && c.k >= 256 && c.n * c.k <= 1 << 19));
}

// With more than one tile for a row, the CTAs of the kernel wait for each other before they write, and a single wave
// has nothing else to do meanwhile.
bool copies_overwritten_rows(const Case& c) { return c.n > 256 && c.tiles(128, 128) <= c.sm_count; }

PairWays pair_ways(int64_t c, int64_t d, bool has_sm90, bool has_sm80) {
  const bool streams = std::max(c, d) > kMostFeatures;
  return {has_sm90 && streams, has_sm90 && !streams, has_sm80 && !streams};
}

namespace {

// In microseconds. The launches take kLaunch and kTritonLaunch. A wave of CTAs takes all keys, `step` for 64 of them;
// Triton's programs of 64 queries share a multiprocessor, where one alone takes no less than kAlone for 64 keys.
// Measured on an H200.
template <AttentionTiling tiling>
bool is_faster_than_triton(const Case& c, int64_t heads, int64_t rows, double step, double triton_step) {
  constexpr double kLaunch = 7, kTritonLaunch = 6, kAlone = 0.95;
  constexpr AttentionSpec spec = kSpec<tiling>;
  const int64_t row_tiles = (rows + spec.rows - 1) / spec.rows;
  const int64_t tiles = heads * row_tiles * c.rows(64 * spec.warpgroups / spec.rows);
  const int64_t waves = (tiles + c.sm_count - 1) / c.sm_count;
  const auto steps = static_cast<double>(c.columns(spec.keys));
  const double programs = static_cast<double>(heads * rows * c.rows(64)) / c.sm_count;
  return kLaunch + static_cast<double>(waves) * steps * step <
         kTritonLaunch + steps * std::max(kAlone, programs * triton_step);
}

}  // namespace

bool attention_pays(const Case& c, int64_t heads, int64_t rows) {
  using enum AttentionTiling;
  // Rows of 24 features, of 32 that Triton computes, take it longer to load.
  const double triton_step = c.k > 16 && c.k < 32 ? 0.8 : 0.32;
  switch (attention_tiling(c)) {
    case k2x128x32:
      return is_faster_than_triton<k2x128x32>(c, heads, rows, 1.0, triton_step);
    case k4x64x32:
      return is_faster_than_triton<k4x64x32>(c, heads, rows, 1.0, triton_step);
    case k3x64x64:
      return is_faster_than_triton<k3x64x64>(c, heads, rows, 1.2, 0.64);
  }
  return false;
}

}  // namespace torchops::cuda::gemm
