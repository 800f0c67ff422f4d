#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "cpu/panels.h"

// Linear layers panel by panel: x @ w.T + b and its gradients, for operators that use the panel while it is in the
// cache. All tensors are matrices of rows.
namespace torchops::cpu {

/// w.t(), without the two trips through the dispatcher.
Tensor transposed(const Tensor& w);

/// The tensor whose halves are `first` and what follows it in memory (detail::are_halves).
Tensor both_halves(const Tensor& first);

/// out = x @ w_t + b. The accumulators of the product start from the bias. at::addmm_out would do the same, but expands
/// the bias to the shape of out first.
void linear_out(Tensor out, const Tensor& x, const Tensor& w_t, const std::optional<Tensor>& b);

using detail::rounded_row_bytes;

/// Bytes per row of what a product reads in the place of x: x in the dtype of w, or a copy of a panel that BLAS cannot
/// read.
inline int64_t copied_row_bytes(const Tensor& x, const Tensor& w) {
  const bool readable = x.dim() < 2 || x.size(-1) < 2 || detail::has_unit_stride(x);
  if (readable || x.scalar_type() != w.scalar_type()) return rounded_row_bytes(x, w);
  return x.size(-1) * static_cast<int64_t>(x.element_size());
}

/// How the rows are divided for gradients. A chunk is one thread's work, panel by panel, and has its own gradient of
/// the weights; their sum is the result. The division depends only on sizes, and so does the order of the additions.
/// Large weights, or few rows, make one chunk, whose products BLAS divides among the threads.
class Chunks {
 public:
  /// For the rows of x and `weights` weights of the shape of w. A panel's scratch is (panel rows, out), plus two of
  /// (panel rows, in) if x is rounded to w's dtype and its gradient widened.
  Chunks(const Tensor& x, const Tensor& w, int64_t weights);

  int64_t count() const { return count_; }
  int64_t panels() const { return panels_; }

  /// Calls f(chunk, begin, end) for each panel.
  void for_each_panel(c10::function_ref<void(int64_t, int64_t, int64_t)> f) const;

 private:
  void for_each_panel_of(int64_t chunk, c10::function_ref<void(int64_t, int64_t, int64_t)> f) const;

  int64_t rows_, panel_rows_, panels_, count_;
};

/// A sum over the panels of at least one row, in at least float32, if it is wanted. One that needs no scratch, since it
/// is of one panel, or of one chunk and not of 16 bits, is added up in the result itself.
class PanelSum {
 public:
  PanelSum(const Tensor& result, bool wanted, const Chunks& chunks);

  bool wanted() const { return partial_.defined(); }
  at::ScalarType scalar_type() const { return partial_.scalar_type(); }
  /// The sum of a chunk so far, to which a panel is to be added; and whether there is none yet, so that it is to be
  /// overwritten. Panels of one chunk come one after the other.
  std::pair<Tensor, bool> next(int64_t chunk) const;
  void add(int64_t chunk, const Tensor& part) const;
  /// Writes the sum to the result.
  void finish() const;

 private:
  Tensor result_, partial_;  // (chunks, ...), undefined if not wanted
  mutable std::vector<char> begun_;
};

/// dw = dz.T @ x and db = dz summed over the rows, panel by panel. Computes only what is wanted.
class WeightGradient {
 public:
  WeightGradient(const Tensor& dw, bool wants_dw, const Tensor& db, bool wants_db, const Chunks& chunks)
      : dw_(dw, wants_dw, chunks), db_(db, wants_db, chunks) {}

  void add(int64_t chunk, const Tensor& dz, const Tensor& x) const;
  void finish() const {
    dw_.finish();
    db_.finish();
  }

 private:
  PanelSum dw_, db_;
};

/// dx = dz @ w, or with `accumulate` dx += dz @ w; dx may have another dtype.
void input_gradient(Tensor dx, const Tensor& dz, const Tensor& w, bool accumulate = false);

}  // namespace torchops::cpu
