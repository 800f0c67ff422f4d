#include "cuda/gemm/plan.h"

#include <algorithm>
#include <limits>

#include "cuda/gemm/times.h"

namespace torchops::cuda::gemm {
namespace {

// With more features, shared memory would have no room for enough rows of weights.
constexpr int kMostResidentColumns = 512;

// Whether there is a kernel for it that computes what the conditions say. That of an sm90/ tiling may not be compiled
// for an element type, or refuse sizes: then the next candidate runs.
bool exists(const TileTime& tile, const Case& c, const Conditions& conditions) {
  const bool single = conditions.products == 1, aligned = conditions.load_bytes == 16;
  const bool has_16_bits = c.element == Element::kFloat16 || c.element == Element::kBFloat16;
  switch (tile.candidate.way) {
    case Way::kResidentWeights:
      return conditions.has_sm90 && has_16_bits && !conditions.writes_products && !conditions.makes_cotangents;
    case Way::kStreamedWeights:  // in one tiling for cotangents
      return conditions.has_sm90 &&
             (!conditions.makes_cotangents || tile.candidate.as<Tiling>() == Tiling::k128x64SharedA);
    case Way::kSm80:
      return has_16_bits && !conditions.writes_products &&
             has_sm80_tiling(tile.candidate.as<Sm80Tiling>(), aligned, single, conditions.is_gated,
                             conditions.makes_cotangents);
    case Way::kSm80Resident:
      return has_16_bits && !conditions.writes_products && aligned && conditions.store_bytes == 16 &&
             c.k <= kMostResidentColumns &&
             (tile.candidate.as<ResidentTiling>() == ResidentTiling::k64Rows
                  ? !conditions.reads_factor() && !conditions.makes_cotangents
                  : !conditions.reads_factor() || !conditions.makes_cotangents);
    default:
      return false;
  }
}

// Operands in two dtypes have kernels with resident weights, and no others. They are tried in any case: cuBLAS would
// need copies.
Plan plan_of_mixed(const Case& c, const Conditions& conditions) {
  Plan plan;
  const int64_t w_rows = c.n * conditions.products;
  const bool large = !conditions.reads_factor() && !conditions.makes_cotangents && w_rows > 128 &&
                     c.m * w_rows >= int64_t{60'000} * c.sm_count;
  if (c.k > kMostResidentColumns) return plan;
  const auto add = [&](ResidentTiling tiling) { plan.add({Way::kSm80Resident, static_cast<uint8_t>(tiling)}); };
  if (large) add(ResidentTiling::k64Rows);
  add(ResidentTiling::k16Rows);
  return plan;
}

Plan plan_of_float32(const Case& c, const Conditions& conditions) {
  Plan plan;
  if (conditions.writes_products) return plan;
  Case of_all = c;
  of_all.n *= conditions.products;
  if (conditions.has_split_sm90 && (!conditions.automatic || prefers_split_sm90(of_all, /*has_pass=*/true)))
    plan.add({Way::kSplitFloat32});
  if (!conditions.automatic || !prefers_cublas_to_float32(c, conditions.products, conditions.splits_float32))
    plan.add({Way::kSm80Float32});
  return plan;
}

Plan plan_by_times(const Case& c, const Conditions& conditions) {
  struct Timed {
    double time;
    Candidate candidate;
  };
  std::array<Timed, Plan::kMost> found;
  size_t count = 0;
  const double most = conditions.automatic ? time_of_cublas(c, conditions) : std::numeric_limits<double>::infinity();
  const auto add = [&](double time, Candidate candidate) {
    if (time < most && count < found.size()) found[count++] = {time, candidate};
  };
  if (!conditions.is_gated && c.m <= 16 && c.element != Element::kTF32) add(time_of_few_rows(c), {Way::kFewRows});
  const size_t rule = rule_of(conditions);
  for (const TileTime& tile : tile_times()) {
    if (tile.epilogue[rule] > 0 && exists(tile, c, conditions)) add(time_of(tile, c, conditions), tile.candidate);
  }
  std::sort(found.begin(), found.begin() + count, [](const Timed& a, const Timed& b) { return a.time < b.time; });
  Plan plan;
  for (size_t i = 0; i < count; ++i) plan.add(found[i].candidate);
  return plan;
}

Plan make_plan(const Case& c, const Conditions& conditions) {
  if (conditions.is_float32) return plan_of_float32(c, conditions);
  return conditions.is_mixed ? plan_of_mixed(c, conditions) : plan_by_times(c, conditions);
}

struct Remembered {
  Case c{};
  Conditions conditions;
  Plan plan;
};

}  // namespace

Measured& measured() {
  static thread_local Measured of_thread;
  return of_thread;
}

const Plan& plan(const Case& c, const Conditions& conditions) {
  if (measured().restricts) {
    static thread_local Plan only;
    only = {};
    if (measured().only) only.add(*measured().only);
    return only;
  }
  constexpr size_t places = 64;
  static thread_local std::array<Remembered, places> lately;
  const auto hash = static_cast<uint64_t>(c.m * 31 + c.n * 17 + c.k) * 0x9e3779b97f4a7c15;
  Remembered& place = lately[hash >> 58];
  if (place.c != c || place.conditions != conditions) place = {c, conditions, make_plan(c, conditions)};
  return place.plan;
}

}  // namespace torchops::cuda::gemm
