#include "cpu/panels.h"

namespace torchops::cpu {

void for_each_row_panel(Operands operands, int64_t trailing_dims, int64_t min_panel_rows,
                        c10::function_ref<void(const Operands&)> f) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for_each_matrix(std::move(operands), trailing_dims, [&](const Operands& matrices) {
    const Tensor& x = matrices[0];
    const int64_t rows = x.size(0), threads = at::get_num_threads();
    const int64_t row_bytes = x.numel() / rows * static_cast<int64_t>(x.element_size());
    const int64_t most_rows = std::max(kMaxScratchBytes / row_bytes, int64_t{1});
    const int64_t rows_per_thread = ceil_div(rows, threads);
    const auto run = [&](int64_t begin, int64_t end) {
      Operands panel;
      for (const Tensor& matrix : matrices) panel.push_back(matrix.narrow(0, begin, end - begin));
      f(panel);
    };
    if (std::min(most_rows, rows_per_thread) < min_panel_rows) {
      const int64_t step = threads * most_rows;
      for (int64_t begin = 0; begin < rows; begin += step) run(begin, std::min(rows, begin + step));
    } else {
      const int64_t panel_rows =
          std::clamp(kPanelBytes / row_bytes, min_panel_rows, std::min(most_rows, rows_per_thread));
      for_each_panel(rows, panel_rows, run);
    }
  });
}

}  // namespace torchops::cpu
