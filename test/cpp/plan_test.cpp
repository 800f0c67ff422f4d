#include <algorithm>
#include <cstdio>
#include <string_view>
#include <vector>

#include "cuda/gemm/times.h"
#include "expect.h"

// The order of the candidates for a product. Needs no GPU. With the argument "times", it prints predictions for what it
// reads: lines of rows, features out and in, products, and whether one of two products is a factor.
namespace {

using namespace torchops::cuda::gemm;

constexpr int kMultiprocessors = 132;

Case case_of(int64_t m, int64_t n, int64_t k, Element element = Element::kBFloat16) {
  return {m, n, k, 1, element, kMultiprocessors};
}

int bytes_at_once(int64_t features) { return static_cast<int>(std::min<int64_t>(features & -features, 8)) * 2; }

Conditions conditions_of(int64_t n, int64_t k, int products, bool is_gated) {
  Conditions c;
  c.products = products;
  c.is_gated = is_gated;
  c.has_sm90 = n % 8 == 0 && k % 8 == 0;
  c.load_bytes = bytes_at_once(k);
  c.store_bytes = bytes_at_once(n);
  return c;
}

std::vector<Candidate> candidates(const Case& c, const Conditions& conditions) {
  const Plan& found = plan(c, conditions);
  return {found.begin(), found.end()};
}

void the_fastest_comes_first() {
  const Case c = case_of(4096, 512, 512);
  Conditions conditions = conditions_of(c.n, c.k, 1, false);
  double last = 0;
  for (const Candidate& candidate : candidates(c, conditions)) {
    const auto tiles = tile_times();
    const auto tile = std::find_if(tiles.begin(), tiles.end(), [&](const TileTime& t) {
      return t.candidate.way == candidate.way && t.candidate.tiling == candidate.tiling;
    });
    EXPECT(tile != tiles.end());
    const double time = time_of(*tile, c, conditions);
    EXPECT(time >= last);
    last = time;
  }
  EXPECT(last > time_of_cublas(c, conditions));
  conditions.automatic = true;
  EXPECT(!candidates(c, conditions).empty());
  EXPECT(candidates(c, conditions).size() < candidates(c, conditions_of(c.n, c.k, 1, false)).size());
}

void only_what_is_compiled() {
  for (const int products : {1, 2}) {
    for (const bool cotangents : {false, true}) {
      for (const int64_t k : {64, 62, 61}) {
        Conditions conditions = conditions_of(64, k, products, true);
        conditions.makes_cotangents = cotangents;
        for (const Candidate& candidate : candidates(case_of(5000, 64, k), conditions)) {
          const bool is_sm90 = candidate.way == Way::kResidentWeights || candidate.way == Way::kStreamedWeights;
          EXPECT(!is_sm90 || k % 8 == 0);
          EXPECT(candidate.way != Way::kSm80 || has_sm80_tiling(candidate.as<Sm80Tiling>(), k % 8 == 0, products == 1,
                                                                /*gated=*/true, cotangents));
          EXPECT(candidate.way != Way::kSm80Resident || k % 8 == 0);
        }
      }
    }
  }
}

// A kernel of small tiles reads weights no slower than cuBLAS, and needs no pass.
void few_rows_of_a_gate_take_small_tiles() {
  for (const int64_t rows : {1, 8, 32}) {
    Conditions conditions = conditions_of(1024, 512, 1, true);
    conditions.automatic = true;
    const auto found = candidates(case_of(rows, 1024, 512), conditions);
    EXPECT(!found.empty() && found.front().way == Way::kSm80);
  }
}

void products_that_are_written_take_streamed_weights() {
  Conditions conditions = conditions_of(512, 512, 2, true);
  conditions.writes_products = true;
  for (const Candidate& candidate : candidates(case_of(5000, 512, 512), conditions))
    EXPECT(candidate.way == Way::kStreamedWeights);
}

void other_elements() {
  Conditions mixed = conditions_of(64, 64, 1, true);
  mixed.is_mixed = mixed.automatic = true;
  for (const Candidate& candidate : candidates(case_of(5000, 64, 64), mixed))
    EXPECT(candidate.way == Way::kSm80Resident);
  EXPECT(candidates(case_of(5000, 64, 1024), mixed).empty());
  Conditions float32 = conditions_of(64, 64, 1, false);
  float32.is_float32 = float32.has_split_sm90 = true;
  const auto found = candidates(case_of(5000, 64, 64, Element::kFloat32), float32);
  EXPECT(found.size() == 2 && found[0].way == Way::kSplitFloat32 && found[1].way == Way::kSm80Float32);
}

void what_is_remembered_is_right() {
  for (int64_t m = 1; m < 3000; m += 7) {
    const Conditions dense = conditions_of(256, 256, 1, false), gate = conditions_of(256, 256, 1, true);
    const Case c = case_of(m, 256, 256);
    const auto first = candidates(c, dense);
    const auto between = candidates(c, gate);
    const auto again = candidates(c, dense);
    const auto same = [](const Candidate& a, const Candidate& b) { return a.way == b.way && a.tiling == b.tiling; };
    EXPECT(std::equal(first.begin(), first.end(), again.begin(), again.end(), same));
    EXPECT(std::none_of(between.begin(), between.end(), [](const Candidate& a) { return a.way == Way::kFewRows; }));
  }
}

void restricted_for_measurements() {
  const Case c = case_of(5000, 256, 256);
  const Conditions conditions = conditions_of(256, 256, 1, false);
  measured().restricts = true;
  EXPECT(candidates(c, conditions).empty());
  measured().only = Candidate{Way::kSm80, 2};
  EXPECT(candidates(c, conditions).size() == 1);
  measured() = {};
  EXPECT(candidates(c, conditions).size() > 1);
}

void print_times() {
  long long m = 0, n = 0, k = 0;
  int products = 0, is_gated = 0;
  while (std::scanf("%lld %lld %lld %d %d", &m, &n, &k, &products, &is_gated) == 5) {
    const Case c = case_of(m, n, k);
    const Conditions conditions = conditions_of(n, k, products, is_gated != 0);
    std::printf("%.9g %.9g", time_of_cublas(c, conditions), time_of_few_rows(c));
    for (const TileTime& tile : tile_times()) std::printf(" %.9g", time_of(tile, c, conditions));
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "times") {
    print_times();
    return 0;
  }
  the_fastest_comes_first();
  only_what_is_compiled();
  few_rows_of_a_gate_take_small_tiles();
  products_that_are_written_take_streamed_weights();
  other_elements();
  what_is_remembered_is_right();
  restricted_for_measurements();
  return expect::result();
}
