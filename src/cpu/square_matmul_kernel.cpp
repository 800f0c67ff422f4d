#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <torch/library.h>

#include "cpu/panels.h"
#include "ops/common.h"
#include "ops/square_matmul.h"

namespace torchops::cpu {
namespace {

Tensor square_matmul_cpu(const Tensor& a, const Tensor& b, bool transpose_b) {
  check_square_matmul(a, b);
  Tensor out = at::empty(a.sizes(), a.options());
  if (out.numel() == 0) return out;
  Tensor out_rows = detail::as_rows(out);
  at::cpu::mm_out(out_rows, detail::as_rows(a), transpose_b ? b.t() : b);
  return out;
}

// A row of the result depends on that row of a alone. So a panel of rows is copied to scratch and the product of the
// copy, which is in the cache, goes straight to where the panel was: about 1/min(n, rows per panel) more traffic than
// the product into a second buffer. Panels of fewer rows than this would spend their time on packing b.
void square_matmul_cpu_(Tensor& a, const Tensor& b, bool transpose_b) {
  check_square_matmul_(a, b);
  constexpr int64_t fewest_rows = 128;
  const auto for_blas = [](const Tensor& t) { return t.stride(0) == 1 || t.stride(1) == 1; };
  const Tensor right = detail::may_alias(a, b) || !for_blas(b) ? b.clone(at::MemoryFormat::Contiguous) : b;
  const Tensor factor = transpose_b ? right.t() : right;
  // Where rows and columns of the output both have gaps, ATen would make a copy of its own for BLAS.
  const bool gaps = a.stride(-1) != 1 && !(a.dim() == 2 && a.stride(0) == 1);
  for_each_row_panel(a, {a}, {.min_rows = fewest_rows, .scratch = gaps ? 2 : 1},
                     [&](const Operands& panel, const Operands& scratch) {
                       Tensor out = gaps ? scratch[1] : panel[0];
                       at::cpu::mm_out(out, scratch[0].copy_(panel[0]), factor);
                       if (gaps) panel[0].copy_(out);
                     });
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("square_matmul", square_matmul_cpu);
  m.impl("square_matmul_", square_matmul_cpu_);
}

}  // namespace
}  // namespace torchops::cpu
