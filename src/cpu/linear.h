#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cpu/panels.h"

// Linear layers panel by panel: x @ w.T + b and its gradients, for operators that use the panel while it is in the
// cache. All tensors are matrices of rows.
namespace torchops::cpu {

/// w.t(), without the two trips through the dispatcher.
Tensor transposed(const Tensor& w);

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

  /// Calls f(chunk, begin, end) for each panel.
  void for_each_panel(c10::function_ref<void(int64_t, int64_t, int64_t)> f) const;

 private:
  void for_each_panel_of(int64_t chunk, c10::function_ref<void(int64_t, int64_t, int64_t)> f) const;

  int64_t rows_, panel_rows_, panels_, count_;
};

/// dw = dz.T @ x and db = dz summed over the rows, panel by panel, accumulated in at least
/// float32. Computes only what is wanted.
class WeightGradient {
 public:
  WeightGradient(const Tensor& w, bool dw, bool db, const Chunks& chunks);

  void add(int64_t chunk, const Tensor& dz, const Tensor& x) const;

  /// Writes the sums to those of dw and db that are wanted; they have the dtype of w.
  void finish(const Tensor& dw, const Tensor& db) const;

 private:
  Tensor dw_, db_;  // (chunks, ...), undefined if not wanted
};

/// dx = dz @ w, or with `accumulate` dx += dz @ w; dx may have another dtype.
void input_gradient(Tensor dx, const Tensor& dz, const Tensor& w, bool accumulate = false);

}  // namespace torchops::cpu
