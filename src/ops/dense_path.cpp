#include "ops/dense_path.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <string>

namespace torchops::detail {
namespace {

constexpr const char* kPathNames[] = {"auto", "fused", "cublas"};

DensePath parse_path(const char* source, const std::string& name) {
  for (const auto path : {DensePath::kAuto, DensePath::kFused, DensePath::kCublas}) {
    if (name == kPathNames[static_cast<int>(path)]) return path;
  }
  TORCH_CHECK(false, source, ": expected auto, fused or cublas, got ", name);
}

std::atomic<DensePath>& current_path() {
  static std::atomic<DensePath> path = [] {
    const char* const name = std::getenv("TORCHOPS_DENSE_PATH");
    return name == nullptr || *name == '\0' ? DensePath::kAuto : parse_path("TORCHOPS_DENSE_PATH", name);
  }();
  return path;
}

std::string set_path(const std::string& name) {
  return kPathNames[static_cast<int>(current_path().exchange(parse_path("_dense_path", name)))];
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  // Sets the path and returns the former one.
  m.def("_dense_path(str path) -> str", {at::Tag::pt2_compliant_tag});
  m.impl("_dense_path", set_path);
}

}  // namespace

DensePath dense_path() { return current_path().load(std::memory_order_relaxed); }

}  // namespace torchops::detail
