#include "ops/kept_products.h"

#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

namespace {

// Without a guard, which would refuse a program exported for other sizes, or compile it again for them: what tracing
// leaves open counts as false.
bool holds(const c10::SymBool& condition) { return TORCH_STATICALLY_KNOWN_TRUE(condition); }

// Whether the product of a large gate on CUDA in 16 bits is one of cuBLAS, and then a pass, in forward as well as in
// backward, so that keeping it costs forward nothing: for features out that are no multiple of eight, unless backward
// copies what it reads.
bool is_of_cublas(const c10::SymInt& in_features, const c10::SymInt& out_features) {
  if (!holds((out_features % 8).sym_ne(0)) || holds(in_features.sym_gt(detail::kMostUncopied))) return false;
  const bool odd = holds((in_features % 2).sym_ne(0)) || holds((out_features % 2).sym_ne(0));
  return !odd || holds(in_features.sym_gt(detail::kMostOfOnePass)) ||
         holds(out_features.sym_gt(detail::kMostOfOnePass));
}

// The kernels of a transition of up to 128 features in 16 bits on CUDA recompute its products in one pass, which needs
// at least a tile of rows to be faster. On a CPU, products of few features that leave the cache cost as much as they
// save.
bool keeps_hidden_products(const Tensor& x, const Tensor& gate_weight) {
  constexpr int64_t most_cached_bytes = int64_t{8} << 20, rows_of_tile = 128;
  const c10::SymInt in_features = gate_weight.sym_size(1);
  const bool on_cpu = gate_weight.device().is_cpu(), is_short = gate_weight.element_size() == 2;
  if (holds(in_features.sym_gt(128)) || !(on_cpu || is_short)) return true;
  if (!on_cpu) return holds(x.sym_numel().sym_le(in_features * rows_of_tile));
  const c10::SymInt row_bytes = gate_weight.sym_size(0) * static_cast<int64_t>(gate_weight.element_size());
  return holds((x.sym_numel() * row_bytes).sym_le(in_features * most_cached_bytes));
}

}  // namespace

// Recomputing the products is worth one or two tensors of memory as long as it is cheap.
//
// On CUDA in 16 bits, forward plus backward of glu with and without saved products takes 6887 and 8691 us for (8192,
// 4096) to 11008 features, and 1588 and 1700 us for (16384, 1024) to 4096; of gate, 710 and 837 us for (8191, 2049) to
// 2047. In float32 and float64, products take longer, and those of features that are no whole pieces of 16 bytes are
// cuBLAS's, so that forward writes them anyway: in float32, glu takes 2179 and 2836 us for (262143, 129) to 127, and
// 1145 and 1506 for (4097, 1001) to 1003; gate takes 1544 and 1735, and 602 and 764 (H100 80GB HBM3, torch 2.11).
//
// On a CPU with 2 cores, gate takes 0.75 and 0.97 of the time of eager mode for (32768, 192) to 192 features in
// float32, and 0.84 and 1.03 in bfloat16; for (4096, 1024) to 1024 in float32, 0.99 and 1.30. With 128 features both
// ways take as long (AMD EPYC, AVX-512, torch 2.13).
bool detail::keeps_products(const Tensor& x, const Tensor& w, Gated of) {
  const bool on_cpu = w.device().is_cpu(), is_short = w.element_size() == 2;
  if ((x.scalar_type() != w.scalar_type() && of != Gated::kHidden) || !(on_cpu || w.device().is_cuda())) return false;
  const c10::SymInt in_features = w.sym_size(1), out_features = w.sym_size(0);
  if (of == Gated::kHidden) return keeps_hidden_products(x, w);
  const int64_t most_recomputed = on_cpu ? 128 : is_short ? 1024 : 256;
  if (holds(in_features.sym_gt(most_recomputed))) return true;
  if (on_cpu) return false;
  if (is_short) return of == Gated::kTensor && is_of_cublas(in_features, out_features);
  const int64_t vector = 16 / static_cast<int64_t>(w.element_size());
  return holds((in_features % vector).sym_ne(0)) || holds((out_features % vector).sym_ne(0));
}

namespace {

bool keeps_products(const Tensor& x, const Tensor& w, bool of_glu) {
  detail::check_linear("_keeps_products", x, "w", w, "b", {});
  return detail::keeps_products(x, w, of_glu ? detail::Gated::kProduct : detail::Gated::kTensor);
}

TORCH_LIBRARY_FRAGMENT(myops, m) {
  // For compiler passes, which write training as the autograd kernels do.
  m.def("_keeps_products(Tensor x, Tensor w, bool of_glu) -> bool", keeps_products,
        std::vector<at::Tag>{at::Tag::pt2_compliant_tag});
}

}  // namespace
}  // namespace torchops
