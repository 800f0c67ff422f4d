#include "cpu/panels.h"

#include <vector>

namespace torchops::cpu {
namespace {

// One share of scratch per thread. All matrices of a call have the same shape, so the first one determines the size.
std::vector<Operands> allocate(int64_t shares, const Tensor& matrix, int64_t rows, int64_t count) {
  at::DimVector shape(matrix.sizes());
  shape[0] = rows;
  std::vector<Operands> out(static_cast<size_t>(shares));
  for (Operands& share : out) {
    for (int64_t i = 0; i < count; ++i) share.push_back(at::empty(shape, matrix.options()));
  }
  return out;
}

Operands rows_of(const Operands& operands, int64_t begin, int64_t end) {
  if (operands.empty() || operands[0].size(0) == end - begin) return operands;
  Operands out;
  for (const Tensor& operand : operands) out.push_back(operand.narrow(0, begin, end - begin));
  return out;
}

}  // namespace

void for_each_row_panel(const Tensor& self, Operands operands, RowPanels panels,
                        c10::function_ref<void(const Operands&, const Operands&)> f) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Operands> scratch;
  for_each_matrix(std::move(operands), panels.trailing_dims, [&](const Operands& matrices) {
    const Tensor& x = matrices[0];
    const int64_t rows = x.size(0), threads = at::get_num_threads();
    const int64_t row_bytes = x.numel() / rows * static_cast<int64_t>(x.element_size());
    const int64_t row_scratch = std::max(panels.scratch, int64_t{1}) * row_bytes + panels.row_temporaries;
    const int64_t most_rows = std::max(kMaxScratchBytes / row_scratch, int64_t{1});
    const int64_t rows_per_thread = ceil_div(rows, threads);
    const bool one_by_one = std::min(most_rows, rows_per_thread) < panels.min_rows;
    const int64_t largest = std::min(most_rows, rows_per_thread);
    const int64_t step = one_by_one
                             ? std::min(threads * most_rows, rows)
                             : balanced_rows(rows,
                                             std::clamp(kPanelBytes / std::max(row_bytes, panels.widest_row_bytes),
                                                        panels.min_rows, largest),
                                             panels.min_rows, largest);
    const int64_t count = ceil_div(rows, step), shares = one_by_one ? 1 : std::min(threads, count);
    if (scratch.empty()) scratch = allocate(shares, x, step, panels.scratch);
    const auto run_share = [&](int64_t share) {
      for (int64_t panel = count * share / shares; panel < count * (share + 1) / shares; ++panel) {
        const int64_t begin = panel * step, end = std::min(rows, begin + step);
        f(rows_of(matrices, begin, end), rows_of(scratch[share], 0, end - begin));
      }
    };
    overwriting(self, [&] {
      if (shares == 1) return run_share(0);
      at::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        for (int64_t share = first; share < last; ++share) run_share(share);
      });
    });
  });
}

}  // namespace torchops::cpu
