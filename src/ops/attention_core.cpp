#include "ops/attention_core.h"

#include <torch/library.h>

namespace torchops::detail {
namespace {

using at::Tensor;

constexpr const char* kOp = "_triangle_attention_core";

void check_float32(const char* name, const Tensor& t, const Tensor& q, c10::SymIntArrayRef shape) {
  check_layout(kOp, name, t);
  TORCH_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous(), kOp, ": expected ", name,
              " contiguous and of dtype float32, got dtype ", to_string(t.scalar_type()), " and strides ",
              to_string(t.sym_strides()));
  check_device(kOp, name, t, "q", q);
  check_shape(kOp, name, t, "q, k and the bias", shape);
}

}  // namespace

void check_attention_core(const AttentionCore& a) {
  check_dtype(kOp, "q", a.q);
  TORCH_CHECK(a.q.dim() == 5, kOp, ": expected q of shape (batch, R, H, Q, d), got ", to_string(a.q.sym_sizes()));
  for (const auto& [name, t] : {std::pair{"k", &a.k}, {"v", &a.v}, {"out", &a.out}}) {
    check_matches(kOp, name, *t, "q", a.q);
  }
  check_norm_parameter(kOp, "bias", a.bias, "q", a.q);
  TORCH_CHECK(a.k.dim() == 5, kOp, ": expected k of shape (batch, R, H, K, d), got ", to_string(a.k.sym_sizes()));
  TORCH_CHECK(a.bias.dim() == 4, kOp, ": expected bias of shape (batch, H, Q, width), got ",
              to_string(a.bias.sym_sizes()));
  const auto batch = a.q.sym_size(0), rows = a.q.sym_size(1), heads = a.q.sym_size(2), queries = a.q.sym_size(3);
  const auto keys = a.k.sym_size(3), width = a.bias.sym_size(3);
  check_shape(kOp, "k", a.k, "q", {batch, rows, heads, keys, a.q.sym_size(4)});
  check_shape(kOp, "v", a.v, "k", a.k.sym_sizes());
  check_shape(kOp, "bias", a.bias, "q", {batch, heads, queries, width});
  TORCH_CHECK(width >= keys, kOp, ": expected bias of at least as many columns as there are keys, ", keys, ", got ",
              width);
  check_shape(kOp, "out", a.out, "q", a.q.sym_sizes());
  if (a.mask) check_float32("mask", *a.mask, a.q, {batch, rows, width});
  check_float32("logsumexp", a.logsumexp, a.q, {batch, rows, heads, queries});
  check_writable(kOp, "out", a.out);
  // Below autograd, and for plans that have all scratch in one storage: version counters don't matter.
  const bool overwrites_q = !a.q.is_meta() && coincide(a.out, a.q);
  const auto check_apart = [](bool apart, const char* name) {
    TORCH_CHECK(apart, kOp, ": expected out and logsumexp without memory of ", name, ", got some of it");
  };
  for (const auto& [name, read] : {std::pair{"q", &a.q}, {"k", &a.k}, {"v", &a.v}}) {
    check_apart((overwrites_q || !may_overlap(a.out, *read)) && !may_overlap(a.logsumexp, *read), name);
  }
  for (const auto& [name, read] : {std::pair{"bias", &a.bias}, {"mask", a.mask ? &*a.mask : nullptr}}) {
    if (read) check_apart(!may_overlap(a.out, *read) && !may_overlap(a.logsumexp, *read), name);
  }
  check_apart(!may_overlap(a.out, a.logsumexp), "each other");
}

namespace {

// For all backends but CUDA, and for CUDA in a build without its kernels, where Triton's may run.
bool refused(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const std::optional<Tensor>& mask,
             double /*scale*/, bool /*scaled*/, Tensor& out, Tensor& logsumexp) {
  check_attention_core({q, k, v, bias, mask, out, logsumexp});
  return false;
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  m.def(
      "_triangle_attention_core(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, float scale, bool scaled, "
      "Tensor(a!) out, Tensor(b!) logsumexp) -> bool",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { m.impl("_triangle_attention_core", refused); }

}  // namespace
}  // namespace torchops::detail
