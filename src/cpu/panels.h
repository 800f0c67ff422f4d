#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

#include "ops/matrices.h"
#include "ops/overwriting.h"

// The CPU kernels call ATen's own vectorised primitives on panels of rows. A panel is small enough that what one
// primitive writes is still in the cache when the next one reads it, and that scratch of its size is nothing beside the
// tensor.
namespace torchops::cpu {

using at::Tensor;

/// Scratch that one thread may hold at a time: the bound that the in-place operators promise.
constexpr int64_t kMaxScratchBytes = int64_t{4} << 20;
/// A panel that stays in one core's second-level cache together with what a primitive reads beside it.
constexpr int64_t kPanelBytes = int64_t{512} << 10;
/// A slice of a row that is too long for a panel. A few temporaries of its size are alive at a time.
constexpr int64_t kSliceBytes = int64_t{1} << 20;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Calls f(begin, end) for consecutive ranges of `rows_per_panel` rows, each range on one thread.
/// Inside f no operator records history: worker threads do not inherit the guard of the kernel that started them.
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

/// Panels of rows that are overwritten, and how.
struct RowPanels {
  int64_t trailing_dims = 1;
  /// A panel is one thread's work as long as that leaves each thread as many rows, else the panels come one by one and
  /// the primitives inside f use the threads.
  int64_t min_rows = 1;
  /// Contiguous tensors of the panel's shape and dtype that f gets beside it. They are allocated before f runs first,
  /// so that no lack of memory stops it halfway.
  int64_t scratch = 0;
  /// Bytes that f takes for itself per row beside that.
  int64_t row_temporaries = 0;
  /// Bytes of a row of the largest of these, where it is wider than the operands: it has to stay in the cache.
  int64_t widest_row_bytes = 0;
};

/// Calls f(panel, scratch) on panels of rows of the operands, of which f overwrites the first, `self` or a view of it.
/// A thread holds at most kMaxScratchBytes of scratch and temporaries, or those of one row if that is more.
void for_each_row_panel(const Tensor& self, Operands operands, RowPanels panels,
                        c10::function_ref<void(const Operands& panel, const Operands& scratch)> f);

}  // namespace torchops::cpu
