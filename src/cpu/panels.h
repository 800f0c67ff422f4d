#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

#include "ops/matrices.h"
#include "ops/overwriting.h"

// The CPU kernels call ATen's vectorised primitives on panels of rows. A panel is so small that the output of one
// primitive is still in the cache when the next one reads it, and that scratch of its size is negligible beside the
// tensor.
namespace torchops::cpu {

using at::Tensor;

/// Scratch that a thread may hold at a time; the in-place operators guarantee this bound.
constexpr int64_t kMaxScratchBytes = int64_t{4} << 20;
/// The size of a panel that fits one core's second-level cache, together with what a primitive reads beside it.
constexpr int64_t kPanelBytes = int64_t{512} << 10;
/// The size of the scratch for a slice of a row that is too long for a panel.
constexpr int64_t kSliceBytes = int64_t{1} << 20;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The rows of panels of about the same size, of which each thread gets as many: at least `fewest` and at most `most`,
/// or up to `limit` if only larger panels can be divided so. `most` if none can.
inline int64_t balanced_rows(int64_t rows, int64_t most, int64_t fewest = 1, int64_t limit = 0) {
  const int64_t threads = at::get_num_threads(), turns = ceil_div(rows, most) / threads;
  for (const int64_t count : {ceil_div(ceil_div(rows, most), threads) * threads, turns * threads}) {
    const int64_t balanced = count > 0 ? ceil_div(rows, count) : 0;
    if (balanced >= fewest && balanced <= std::max(most, limit)) return balanced;
  }
  return most;
}

/// Calls f(begin, end) for consecutive ranges of `rows_per_panel` rows, each range on one thread. No operator inside f
/// records history: worker threads don't inherit the guard of the kernel that started them.
template <class F>
void for_each_panel(int64_t rows, int64_t rows_per_panel, const F& f) {
  at::parallel_for(0, ceil_div(rows, rows_per_panel), 1, [&](int64_t first, int64_t last) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t panel = first; panel < last; ++panel) {
      f(panel * rows_per_panel, std::min(rows, (panel + 1) * rows_per_panel));
    }
  });
}

using detail::for_each_matrix;
using detail::Operands;
using detail::overwriting;

/// How panels of rows are overwritten.
struct RowPanels {
  int64_t trailing_dims = 1;
  /// At least this many rows per panel, if each panel is one thread's work. If a thread would get fewer, the panels
  /// come one by one, and the primitives inside f use the threads.
  int64_t min_rows = 1;
  /// The number of contiguous tensors of the panel's shape and dtype that f gets as scratch. They are allocated before
  /// f runs first, so that running out of memory can't stop it halfway.
  int64_t scratch = 0;
  /// Bytes per row that f allocates itself.
  int64_t row_temporaries = 0;
  /// Bytes per row of the largest of these, if it is wider than the operands: it must stay in the cache.
  int64_t widest_row_bytes = 0;
};

/// Calls f(panel, scratch) on panels of rows of the operands. f overwrites the first operand: `self` or a view of it. A
/// thread holds at most kMaxScratchBytes of scratch and temporaries, or those of one row if that is more.
void for_each_row_panel(const Tensor& self, Operands operands, RowPanels panels,
                        c10::function_ref<void(const Operands& panel, const Operands& scratch)> f);

}  // namespace torchops::cpu
