#include "ops/dense_path.h"

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

constexpr std::pair<const char*, DensePath> kPaths[] = {{"auto", DensePath::kAuto},
                                                        {"fused", DensePath::kFused},
                                                        {"portable", DensePath::kPortable},
                                                        {"cublas", DensePath::kCublas}};
constexpr const char* kNames = "auto, fused, portable or cublas";

// The default for the process. The environment variable is read once, so that an invalid value is reported once.
DensePath initial_path() {
  static const DensePath path = [] {
    const char* const name = std::getenv("TORCHOPS_DENSE_PATH");
    if (name == nullptr || *name == '\0') return DensePath::kAuto;
    for (const auto& [known, path] : kPaths) {
      if (std::string_view(known) == name) return path;
    }
    TORCH_WARN("TORCHOPS_DENSE_PATH: expected ", kNames, ", got ", name, "; taking auto");
    return DensePath::kAuto;
  }();
  return path;
}

thread_local std::optional<DensePath> current_path;

}  // namespace

std::optional<DensePath> dense_path_of_thread() { return current_path; }

DensePath dense_path() { return current_path ? *current_path : initial_path(); }

std::string to_string(DensePath path) {
  for (const auto& [name, known] : kPaths) {
    if (known == path) return name;
  }
  return {};
}

DensePath parse_dense_path(const char* op, const std::string& name) {
  for (const auto& [known, path] : kPaths) {
    if (name == known) return path;
  }
  TORCH_CHECK_VALUE(false, op, ": expected path ", kNames, ", got ", name);
}

DensePathGuard::DensePathGuard(std::optional<DensePath> path) : former_(std::exchange(current_path, path)) {}

DensePathGuard::~DensePathGuard() { current_path = former_; }

Tensor dense_on_path(const Tensor& x, const Tensor& w, const OptionalTensor& b, std::string_view path) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_dense_on_path", "").typed<decltype(dense_on_path)>();
  return op.call(x, w, b, path);
}

namespace {

std::string exchange_path(const std::optional<std::string>& name) {
  const DensePath former = dense_path();
  if (name) current_path = parse_dense_path("_dense_path", *name);
  return to_string(former);
}

// Below autograd, for all backends.
Tensor dense_on_path_kernel(const Tensor& x, const Tensor& w, const OptionalTensor& b, std::string_view path) {
  const DensePathGuard on_path(parse_dense_path("_dense_on_path", std::string(path)));
  return dense(x, w, b);
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  // Returns this thread's path, and sets a new one if given.
  m.def("_dense_path(str? path=None) -> str", {at::Tag::pt2_compliant_tag});
  m.impl("_dense_path", exchange_path);
  m.def("_dense_on_path(Tensor x, Tensor w, Tensor? b, str path) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { m.impl("_dense_on_path", dense_on_path_kernel); }

}  // namespace
}  // namespace torchops::detail
