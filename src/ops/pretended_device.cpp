#include "ops/pretended_device.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <string_view>
#include <vector>

namespace torchops::detail {
namespace {

struct Named {
  std::string_view name;
  DeviceLimits limits;
};

constexpr DeviceLimits limits_of(int64_t major, int64_t minor, int64_t shared_kib) {
  // A block may have all shared memory of its multiprocessor but for one KiB.
  return {major, minor, (shared_kib - 1) << 10, shared_kib << 10};
}

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
constexpr std::array kKnown{Named{"8.0", limits_of(8, 0, 164)},   Named{"8.6", limits_of(8, 6, 100)},
                            Named{"8.9", limits_of(8, 9, 100)},   Named{"9.0", limits_of(9, 0, 228)},
                            Named{"10.0", limits_of(10, 0, 228)}, Named{"12.0", limits_of(12, 0, 100)}};

// Major, minor, and the bytes per block and per multiprocessor; nothing if the variable is not set.
std::vector<int64_t> as_list() {
  const auto& limits = pretended_device();
  if (!limits) return {};
  return {limits->major, limits->minor, limits->shared_bytes_per_block, limits->shared_bytes_per_multiprocessor};
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def("_pretended_device() -> int[]", {at::Tag::pt2_compliant_tag});
  m.impl("_pretended_device", as_list);
}

}  // namespace

const std::optional<DeviceLimits>& pretended_device() {
  static const std::optional<DeviceLimits> pretended = []() -> std::optional<DeviceLimits> {
    const char* const name = std::getenv("TORCHOPS_PRETEND_CAPABILITY");
    if (name == nullptr || *name == '\0') return std::nullopt;
    for (const Named& known : kKnown) {
      if (known.name == name) return known.limits;
    }
    TORCH_CHECK_VALUE(false, "TORCHOPS_PRETEND_CAPABILITY: expected 8.0, 8.6, 8.9, 9.0, 10.0 or 12.0, got ", name);
  }();
  return pretended;
}

}  // namespace torchops::detail
