#include "cuda/gemm/ways.h"

#include <algorithm>

#include "ops/kept_products.h"

namespace torchops::cuda::gemm {
namespace {

bool is_odd(const Case& c) { return c.k % 2 != 0 || c.n % 2 != 0; }

// For gate of (262144, 129) to 128 features, 148 us instead of 202. If w has no multiple of eight rows, the product is
// cuBLAS's, and only x is copied: (262144, 128) to 127 takes 183 instead of 221, (262144, 257) to 255 takes 424 instead
// of 518, and (4097, 1001) to 1003 takes 45 instead of 95. For shorter sums, or such of even sizes, the copy takes as
// long as it saves: with copies of v, too, (262143, 129) to 127 takes 256, and 204 with none, and (262144, 260) to 260
// takes 585 with a copy of x, and 501 (H100, torch 2.11, bfloat16).
bool for_gate(const Case& c, int) {
  // For few features out, the copy takes longer than the product.
  if (c.n < 64) return false;
  return c.n % 8 == 0 || c.k >= (is_odd(c) ? 193 : 384) || (c.k % 8 == 0 && c.n % 2 != 0);
}

// g, v and dv are copied, too, unless w has a multiple of eight rows: all gradients of gate of (262144, 127) to 127
// features take 392 us instead of 441, of 257 to 255 1016 instead of 1382, of 260 to 260 1189 instead of 1599, of 100
// to 100 332 instead of 317, and of (262143, 129) to 127 578 instead of 569.
bool for_gate_gradients(const Case& c, int) {
  return c.n % 8 == 0 || c.k > detail::kMostUncopied ||
         (is_odd(c) && c.k <= detail::kMostOfOnePass && c.n <= detail::kMostOfOnePass);
}

// For elements that the kernel would load one by one, or many long rows of which it would load two at once. glu of
// (262143, 129) to 127 features takes 209 us instead of 344 by cuBLAS, (262144, 130) to 130 takes 227 instead of 336 by
// the kernel, (262144, 100) to 100, which it loads in fours, 160 instead of 143, and (4095, 129) to 127, 26 instead of
// 19 (H100, torch 2.11, bfloat16).
bool for_glu(const Case& c, int vector) {
  return vector == 1 || (vector == 2 && c.k > 128 && c.m * c.n * c.k >= int64_t{1} << 30);
}

// With forward, (262143, 129) to 127 features takes 695 us instead of 1350, (262144, 50) to 50 takes 215 instead of
// 337, and (65535, 130) to 130 takes 218 instead of 355 (H100, torch 2.11, bfloat16).
bool for_glu_gradients(const Case&, int) { return true; }

// In the order of CopiedLayer: the fewest products of elements, and for which sizes.
constexpr struct {
  int64_t least_products;
  bool (*suits)(const Case& c, int vector);
} kCopies[] = {{200'000'000, for_gate},
               {int64_t{1} << 27, for_gate_gradients},
               {200'000'000, for_glu},
               {int64_t{1} << 26, for_glu_gradients}};

// From 240 tiles of 128 x 128 on, it takes 0.83 to 1.02 of the time with 256 to 1024 columns; up to 1.6 times as long
// where tiles are half empty, or there are few (batches of square matrices on an H100, which has room for 264 tiles).
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

// For few rows, stacking weights costs more. From more than 128 features on, cuBLAS may be slow for both gradients in
// float32: 936 us for (65535, 257) to 2 * 255, and 487 in two products (H100).
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

}  // namespace torchops::cuda::gemm
