#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <torch/library.h>

#include "cpu/panels.h"
#include "ops/common.h"
#include "ops/matrices.h"
#include "ops/square_matmul.h"

namespace torchops::cpu {
namespace {

Tensor square_matmul_cpu(const Tensor& a, const Tensor& b, bool transpose_b) {
  check_square_matmul(a, b);
  Tensor out = at::empty(a.sizes(), a.options());
  if (out.numel() == 0) return out;
  const Tensor factor = transpose_b ? b.mT() : b;
  if (b.dim() == 2) {
    Tensor out_rows = detail::as_rows(out);
    at::cpu::mm_out(out_rows, detail::as_rows(a), factor);
  } else {
    Tensor matrices = out.flatten(0, -3);
    at::cpu::bmm_out(matrices, a.flatten(0, -3), factor.flatten(0, -3));
  }
  return out;
}

// A row of the result depends only on the same row of a. So a panel of rows is copied to scratch, and the product of
// that copy, which is in the cache, overwrites the panel. This costs about 1/min(n, rows per panel) more traffic than a
// product into a second buffer. With fewer rows per panel, packing b would dominate. `rows` is self or a view of it.
void multiply_rows_(const Tensor& self, const Tensor& rows, const Tensor& factor) {
  constexpr int64_t fewest_rows = 128;
  // If both the rows and the columns of the output are strided, ATen would make its own copy for BLAS.
  const bool gaps = rows.stride(-1) != 1 && !(rows.dim() == 2 && rows.stride(0) == 1);
  for_each_row_panel(self, {rows}, {.min_rows = fewest_rows, .scratch = gaps ? 2 : 1},
                     [&](const Operands& panel, const Operands& scratch) {
                       Tensor out = gaps ? scratch[1] : panel[0];
                       at::cpu::mm_out(out, scratch[0].copy_(panel[0]), factor);
                       if (gaps) panel[0].copy_(out);
                     });
}

// The same with whole matrices instead of rows, as many as fit a panel. bmm_out() needs a contiguous output.
void multiply_matrices_(const Tensor& a, const Tensor& factors) {
  for_each_row_panel(a, {a, factors}, {.trailing_dims = 2, .scratch = 2},
                     [&](const Operands& panel, const Operands& scratch) {
                       Tensor out = scratch[1];
                       at::cpu::bmm_out(out, scratch[0].copy_(panel[0]), panel[1]);
                       panel[0].copy_(out);
                     });
}

// The same matrix by matrix, for large or few matrices. A factor that BLAS cannot read is copied once for all panels.
void multiply_each_matrix_(const Tensor& a, const Tensor& factors) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t n = factors.size(-1);
  const Tensor packed = detail::has_unit_stride(factors) ? Tensor() : at::empty({n, n}, factors.options());
  bool written = false;
  for_each_matrix({a, factors}, 2, [&](const Operands& part) {
    for (int64_t i = 0; i < part[0].size(0); ++i) {
      const auto multiply = [&] {
        const Tensor factor = part[1].select(0, i);
        multiply_rows_(a, part[0].select(0, i), packed.defined() ? packed.copy_(factor) : factor);
      };
      // Each call allocates scratch.
      written ? overwriting(a, multiply) : multiply();
      written = true;
    }
  });
}

void square_matmul_cpu_(Tensor& a, const Tensor& b, bool transpose_b) {
  check_square_matmul_(a, b);
  const bool one_factor = b.dim() == 2;
  const bool copied = detail::may_alias(a, b) || (one_factor && !detail::has_unit_stride(b));
  const Tensor right = copied ? b.clone(at::MemoryFormat::Contiguous) : b;
  const Tensor factor = transpose_b ? right.mT() : right;
  if (one_factor) return multiply_rows_(a, a, factor);
  const int64_t matrix_bytes = a.size(-2) * a.size(-1) * static_cast<int64_t>(a.element_size());
  const int64_t batch = c10::multiply_integers(a.sizes().slice(0, a.dim() - 2));
  if (2 * matrix_bytes <= kMaxScratchBytes && batch >= at::get_num_threads()) return multiply_matrices_(a, factor);
  multiply_each_matrix_(a, factor);
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("square_matmul", square_matmul_cpu);
  m.impl("square_matmul_", square_matmul_cpu_);
}

}  // namespace
}  // namespace torchops::cpu
