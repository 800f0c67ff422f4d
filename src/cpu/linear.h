#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cpu/panels.h"

// Linear layers panel by panel: x @ w.T + b and its gradients, for operators that work on the panel while it is in the
// cache. All tensors are matrices of rows.
namespace torchops::cpu {

/// w.t(), without its two trips through the dispatcher.
Tensor transposed(const Tensor& w);

/// out = x @ w_t + b. The bias is the start value of the product's accumulators: at::addmm_out would put it there too,
/// but expands it to the shape of out first.
void linear_out(Tensor out, const Tensor& x, const Tensor& w_t, const std::optional<Tensor>& b);

using detail::rounded_row_bytes;

/// How the rows are divided for gradients. A chunk is one thread's work, panel after panel, and has a gradient of the
/// weights of its own; their sum is the result. The division depends on sizes alone, and with it the order of the
/// additions. Large weights, or few rows, make one chunk, whose products are divided among the threads by BLAS.
class Chunks {
 public:
  /// Of the rows of x with `weights` weights of the shape of w; scratch of a panel is (panel rows, out), and twice
  /// (panel rows, in) where x is rounded to w's dtype and its gradient widened.
  Chunks(const Tensor& x, const Tensor& w, int64_t weights);

  int64_t count() const { return count_; }

  /// Calls f(chunk, begin, end) for each panel.
  void for_each_panel(c10::function_ref<void(int64_t, int64_t, int64_t)> f) const;

 private:
  void for_each_panel_of(int64_t chunk, c10::function_ref<void(int64_t, int64_t, int64_t)> f) const;

  int64_t rows_, panel_rows_, panels_, count_;
};

/// dw = dz.T @ x and db = dz summed over the rows, which come panel by panel; what is not wanted is not computed. Added
/// up in at least float32.
class WeightGradient {
 public:
  WeightGradient(const Tensor& w, bool dw, bool db, const Chunks& chunks);

  void add(int64_t chunk, const Tensor& dz, const Tensor& x) const;

  /// Writes the sums, which are of the dtype of w, to the wanted ones.
  void finish(const Tensor& dw, const Tensor& db) const;

 private:
  Tensor dw_, db_;  // (chunks, ...), undefined where not wanted
};

/// dx = dz @ w, or with `accumulate` dx += dz @ w; dx may be of another dtype.
void input_gradient(Tensor dx, const Tensor& dz, const Tensor& w, bool accumulate = false);

}  // namespace torchops::cpu
