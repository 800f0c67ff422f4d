#include "ops/dense.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

Tensor dense(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("myops::dense", "").typed<decltype(dense)>();
  return op.call(x, w, b);
}

std::tuple<Tensor, Tensor> detail::dense_backward(const Tensor& grad, const Tensor& y) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_dense_backward", "").typed<decltype(dense_backward)>();
  return op.call(grad, y);
}

void check_dense(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  TORCH_CHECK(x.dim() >= 1, "dense: expected x with at least 1 dimension, got a 0-dimensional tensor");
  detail::check_dtype("dense", "x", x);
  detail::check_matches("dense", "w", w, "x", x);
  const c10::SymInt in_features = x.sym_size(-1);
  TORCH_CHECK(w.dim() == 2, "dense: expected w of shape (out, in) with in = ", in_features, " to match x, got ",
              detail::to_string(w.sym_sizes()));
  TORCH_SYM_CHECK(w.sym_size(1).sym_eq(in_features), "dense: expected w of shape (out, in) with in = ", in_features,
                  " to match x, got ", detail::to_string(w.sym_sizes()));
  if (!b) return;
  detail::check_matches("dense", "b", *b, "x", x);
  const c10::SymInt out_features = w.sym_size(0);
  TORCH_CHECK(b->dim() == 1, "dense: expected b of shape ", detail::to_string({out_features}), " to match w, got ",
              detail::to_string(b->sym_sizes()));
  TORCH_SYM_CHECK(b->sym_size(0).sym_eq(out_features), "dense: expected b of shape ", detail::to_string({out_features}),
                  " to match w, got ", detail::to_string(b->sym_sizes()));
}

namespace {

constexpr const char* kPathNames[] = {"auto", "fused", "cublas"};

detail::DensePath parse_path(const char* source, const std::string& name) {
  for (const auto path : {detail::DensePath::kAuto, detail::DensePath::kFused, detail::DensePath::kCublas}) {
    if (name == kPathNames[static_cast<int>(path)]) return path;
  }
  TORCH_CHECK(false, source, ": expected auto, fused or cublas, got ", name);
}

std::atomic<detail::DensePath>& current_path() {
  static std::atomic<detail::DensePath> path = [] {
    const char* const name = std::getenv("TORCHOPS_DENSE_PATH");
    return name == nullptr || *name == '\0' ? detail::DensePath::kAuto : parse_path("TORCHOPS_DENSE_PATH", name);
  }();
  return path;
}

std::string set_path(const std::string& name) {
  return kPathNames[static_cast<int>(current_path().exchange(parse_path("_dense_path", name)))];
}

std::atomic<detail::DenseGradients>& current_gradients() {
  static std::atomic<detail::DenseGradients> kernel{nullptr};
  return kernel;
}

Tensor dense_meta(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  check_dense(x, w, b);
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = w.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

std::tuple<Tensor, Tensor> dense_backward_meta(const Tensor& grad, const Tensor& y) {
  TORCH_CHECK(grad.dim() == y.dim(), "_dense_backward: expected grad of shape ", detail::to_string(y.sym_sizes()),
              " to match y, got ", detail::to_string(grad.sym_sizes()));
  return {at::empty_symint(y.sym_sizes(), y.options()), at::empty_symint({y.sym_size(-1)}, y.options())};
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def("dense(Tensor x, Tensor w, Tensor? b=None) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("_dense_backward(Tensor grad, Tensor y) -> (Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
  // Sets the path and returns the former one.
  m.def("_dense_path(str path) -> str", {at::Tag::pt2_compliant_tag});
  m.impl("_dense_path", set_path);
}

TORCH_LIBRARY_IMPL(myops, Meta, m) {
  m.impl("dense", dense_meta);
  m.impl("_dense_backward", dense_backward_meta);
}

}  // namespace

detail::DensePath detail::dense_path() { return current_path().load(std::memory_order_relaxed); }

detail::DenseGradients detail::dense_gradients() { return current_gradients().load(std::memory_order_relaxed); }

void detail::set_dense_gradients(DenseGradients kernel) { current_gradients().store(kernel); }

}  // namespace torchops
