#include "cuda/gemm/times.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace torchops::cuda::gemm {
namespace {

template <class Tiling>
constexpr Candidate of(Way way, Tiling tiling) {
  return {way, static_cast<uint8_t>(tiling)};
}

}  // namespace
}  // namespace torchops::cuda::gemm

#include "cuda/gemm/measured_times.h"

namespace torchops::cuda::gemm {
namespace {

static_assert(std::size(kTileTimes) < Plan::kMost, "a plan has room for all candidates");

// Of two things that overlap in part.
double longer(double a, double b) {
  const double a2 = a * a, b2 = b * b;
  return std::sqrt(std::sqrt(a2 * a2 + b2 * b2));
}

double ceil_of(double a, double b) { return std::ceil(a / b); }

// 0 for 16 bytes, 3 for 2.
size_t alignment(int bytes) { return static_cast<size_t>(4 - std::bit_width(static_cast<unsigned>(bytes) | 2) + 1); }

// A case in numbers: features in units of 16 bits, and memory in bytes.
struct Sizes {
  Sizes(const Case& c, const Conditions& conditions)
      : is_32_bit(c.element == Element::kTF32 || c.element == Element::kFloat32),
        rule(rule_of(conditions)),
        m(static_cast<double>(c.m)),
        n(static_cast<double>(c.n)),
        k(static_cast<double>(c.k) * (is_32_bit ? 2 : 1)),
        load(alignment(conditions.load_bytes)),
        store(alignment(conditions.store_bytes)),
        outputs(m * n * (is_32_bit ? 4 : 2)) {}

  double operands(double products) const { return 2 * (m * k + products * n * k); }

  bool is_32_bit;
  size_t rule;
  double m, n, k;
  size_t load, store;
  double outputs;  // bytes of a tensor of them
};

// How many tensors of m x n elements a kernel reads and writes, and the pass after cuBLAS.
double tensors_of_kernel(const Conditions& c) {
  if (c.makes_cotangents) return c.products == 2 ? 3 : 4;
  return c.writes_products ? 1 + c.products : c.reads_factor() ? 2 : 1;
}
double tensors_of_pass(const Conditions& c) { return c.makes_cotangents ? 5 : c.is_gated ? 3 : 2; }

// A product of n columns by cuBLAS.
double time_of_product(const Case& c, const Sizes& s, double n) {
  constexpr struct {
    double rows, columns, ctas;
  } tiles[] = {{128, 256, 1}, {128, 128, 1}, {128, 64, 2}, {64, 64, 4}};
  const CublasTime& t = kCublasTime;
  const double of_steps = t.of_steps[s.load], of_results = t.of_results[s.store],
               latency = t.latency * std::sqrt(of_steps);
  double best = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < std::size(tiles); ++i) {
    const double whole = ceil_of(s.m, tiles[i].rows) * ceil_of(n, tiles[i].columns);
    for (const double parts : {1., 2., 4., 8., 16.}) {
      if (parts > 1 && s.k < 128 * parts) break;
      const double waves = ceil_of(whole * parts, c.sm_count * tiles[i].ctas),
                   most = ceil_of(whole * parts, c.sm_count);
      const double steps = ceil_of(s.k, 64 * parts);
      const double partial = parts == 1 ? 0 : t.parts + s.m * n * 4 * parts * t.memory_of_parts / c.bytes_per_us;
      best = std::min(best, waves * t.epilogue + partial +
                                steps * longer(latency * waves, t.throughput[i] * most * of_steps * of_results));
    }
  }
  const double bytes = 2 * (s.m * s.k + n * s.k) + s.outputs / s.n * n;
  return t.launch + longer(best, bytes / c.bytes_per_us * t.memory * t.of_memory[std::max(s.load, s.store)]);
}

}  // namespace

std::span<const TileTime> tile_times() { return kTileTimes; }

double time_of(const TileTime& tile, const Case& c, const Conditions& conditions) {
  const Sizes s(c, conditions);
  const bool is_sm80 = tile.candidate.way == Way::kSm80 || tile.candidate.way == Way::kSm80Resident;
  const double tiles = ceil_of(s.m, tile.rows) * ceil_of(s.n, tile.columns);
  const double waves = ceil_of(tiles, c.sm_count * tile.ctas), most = ceil_of(tiles, c.sm_count);
  const double of_step = tile.of_steps[s.load] * (s.rule == 2 ? tile.second : 1);
  const double steps = ceil_of(s.k, is_sm80 ? 32 : 64) * of_step * longer(tile.latency * waves, tile.throughput * most);
  const double bytes = s.operands(conditions.products) + s.outputs * tensors_of_kernel(conditions);
  const double memory = bytes / c.bytes_per_us * tile.memory * tile.of_memory[std::max(s.load, s.store)];
  return tile.launch + longer(tile.epilogue[s.rule] * tile.of_epilogue[s.store] * waves + steps, memory);
}

double time_of_few_rows(const Case& c) {
  const Sizes s(c, {});
  const FewRowsTime& t = kFewRowsTime;
  const double chunks = ceil_of(s.k, 1024) * ceil_of(s.n, 16. * 8 * c.sm_count) * (s.m > 8 ? t.of_more_rows : 1);
  return t.launch + longer((s.operands(1) + s.outputs) / c.bytes_per_us * t.memory, t.chunk * chunks);
}

double time_of_cublas(const Case& c, const Conditions& conditions) {
  const Sizes s(c, conditions);
  const CublasTime& t = kCublasTime;
  const double products = conditions.has_one_product ? time_of_product(c, s, conditions.products * s.n)
                                                     : conditions.products * time_of_product(c, s, s.n);
  const double bytes = s.outputs * tensors_of_pass(conditions);
  return products + t.pass[s.rule] + bytes / c.bytes_per_us * t.memory_of_pass * t.of_pass[s.store];
}

}  // namespace torchops::cuda::gemm
