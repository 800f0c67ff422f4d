#include "ops/kernel_path.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <string_view>
#include <utility>

#include "ops/dense.h"

namespace torchops::detail {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr std::pair<const char*, KernelPath> kPaths[] = {{"auto", KernelPath::kAuto},
                                                         {"fused", KernelPath::kFused},
                                                         {"portable", KernelPath::kPortable},
                                                         {"cublas", KernelPath::kCublas}};
constexpr const char* kNames = "auto, fused, portable or cublas";

// The default for the process. The environment variable is read once, so that an invalid value is reported once.
KernelPath initial_path() {
  static const KernelPath path = [] {
    const char* const name = std::getenv("TORCHOPS_KERNEL_PATH");
    if (name == nullptr || *name == '\0') return KernelPath::kAuto;
    for (const auto& [known, path] : kPaths) {
      if (std::string_view(known) == name) return path;
    }
    TORCH_WARN("TORCHOPS_KERNEL_PATH: expected ", kNames, ", got ", name, "; taking auto");
    return KernelPath::kAuto;
  }();
  return path;
}

thread_local std::optional<KernelPath> current_path;

}  // namespace

std::optional<KernelPath> kernel_path_of_thread() { return current_path; }

KernelPath kernel_path() { return current_path ? *current_path : initial_path(); }

std::string to_string(KernelPath path) {
  for (const auto& [name, known] : kPaths) {
    if (known == path) return name;
  }
  return {};
}

KernelPath parse_kernel_path(const char* op, const std::string& name) {
  for (const auto& [known, path] : kPaths) {
    if (name == known) return path;
  }
  TORCH_CHECK_VALUE(false, op, ": expected path ", kNames, ", got ", name);
}

KernelPathGuard::KernelPathGuard(std::optional<KernelPath> path) : former_(std::exchange(current_path, path)) {}

KernelPathGuard::~KernelPathGuard() { current_path = former_; }

Tensor dense_on_path(const Tensor& x, const Tensor& w, const OptionalTensor& b, std::string_view path) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_dense_on_path", "").typed<decltype(dense_on_path)>();
  return op.call(x, w, b, path);
}

namespace {

std::string exchange_path(const std::optional<std::string>& name) {
  const KernelPath former = kernel_path();
  if (name) current_path = parse_kernel_path("_kernel_path", *name);
  return to_string(former);
}

// Below autograd, for all backends.
Tensor dense_on_path_kernel(const Tensor& x, const Tensor& w, const OptionalTensor& b, std::string_view path) {
  const KernelPathGuard on_path(parse_kernel_path("_dense_on_path", std::string(path)));
  return dense(x, w, b);
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  // Returns this thread's path, and sets a new one if given.
  m.def("_kernel_path(str? path=None) -> str", {at::Tag::pt2_compliant_tag});
  m.impl("_kernel_path", exchange_path);
  // Has a kernel in CUDA builds.
  m.def("_only_candidate(int way, int tiling) -> int[]", {at::Tag::pt2_compliant_tag});
  m.def("_dense_on_path(Tensor x, Tensor w, Tensor? b, str path) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { m.impl("_dense_on_path", dense_on_path_kernel); }

}  // namespace
}  // namespace torchops::detail
