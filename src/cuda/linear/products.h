#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cuda/base/overwrite_rows.h"
#include "ops/matrices.h"

// Linear layers and their gradients, by cuBLAS or, in float32, split products, for operators whose own kernel is the
// pass after the products. All tensors are matrices of rows. With 16-bit weights, float32 rows are rounded panel by
// panel.
namespace torchops::cuda {

using detail::rounded_row_bytes;

/// Calls f(begin, end) for panels of `step` rows.
inline void for_each_panel_of(int64_t rows, int64_t step, c10::function_ref<void(int64_t, int64_t)> f) {
  for (int64_t begin = 0; begin < rows; begin += step) f(begin, std::min(rows, begin + step));
}

/// Calls f(begin, end) for panels of rows whose scratch, `row_bytes` for each row, stays within `most_bytes`; for all
/// rows at once if they need no scratch.
inline void for_each_panel(int64_t rows, int64_t row_bytes, c10::function_ref<void(int64_t, int64_t)> f,
                           int64_t most_bytes = kMaxScratchBytes) {
  for_each_panel_of(rows, row_bytes == 0 ? rows : std::max(most_bytes / row_bytes, int64_t{1}), f);
}

/// At most `step` rows for panels of about the same size: a short one at the end would cost nearly as much as the
/// others. Panels begin at multiples of eight rows, unless that is too many: there, all rows are aligned to 16 bytes.
int64_t even_step(int64_t rows, int64_t step);

/// Bytes per row of x @ w.T.
inline int64_t product_row_bytes(const at::Tensor& w) { return w.size(0) * static_cast<int64_t>(w.element_size()); }

/// The rows of a panel whose product with w is still in the L2 cache when the next pass reads it; all rows if the
/// product is small, or if panels would be too short for cuBLAS to be fast. A product may take a third of the cache,
/// since the pass also reads and writes other tensors. Scratch, of `scratch_bytes` per row, stays within `most_bytes`.
///
/// In 16 bits, cuBLAS adds a bias to products of few rows slowly. From 128 features on, that costs more than the cache
/// saves.
int64_t rows_of_panel(int64_t rows, const at::Tensor& w, bool adds_bias, int64_t scratch_bytes,
                      int64_t most_bytes = kMaxScratchBytes);

/// out = a @ b for matrices.
at::Tensor& product_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);
at::Tensor product(const at::Tensor& a, const at::Tensor& b);
/// out += a @ b.
void add_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b);

/// out = x @ w.T + b. With a contiguous out and b, this is the call of F.linear, and cuBLAS mostly rounds once. For a
/// strided out or b, the algorithms that it picks for aligned operands round the product before they add b: where b
/// cancels the product, few digits are then left. So they do for a single row of 16 bits, whose product and sum are
/// therefore two calls, in float32.
void linear_out(at::Tensor out, const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

/// [a; b], for one product instead of two: a view if they are halves.
at::Tensor stacked(const at::Tensor& a, const at::Tensor& b);
/// The same for biases; one that is missing is 0.
std::optional<at::Tensor> stacked(const std::optional<at::Tensor>& a, const std::optional<at::Tensor>& b);

/// dx = dz @ w, or with `accumulate` dx += dz @ w. A float32 dx of 16-bit factors is not rounded in between.
void input_gradient(at::Tensor dx, const at::Tensor& dz, const at::Tensor& w, bool accumulate = false);

/// dw = dz.T @ x of all rows, rounded once, unless it is large; dw has the dtype of dz, or float32.
void weight_gradient_out(const at::Tensor& dw, const at::Tensor& dz, const at::Tensor& x);
at::Tensor weight_gradient(const at::Tensor& dz, const at::Tensor& x);

/// For gradients of 16-bit weights by a float32 x: calls f(begin, x_panel, parts) for panels of rows of x, rounded once
/// for all products. f writes what a panel adds to the gradients `totals` to parts: tensors of the same shapes, which
/// are summed in float32 if there are several panels, and else the totals themselves. A total that is not wanted is a
/// tensor without elements.
///
/// A panel of 64 MiB has enough rows for kernels that sum over all of them: they write and add their sums once for each
/// panel.
void for_each_rounded_panel(const at::Tensor& x, at::TensorList totals,
                            c10::function_ref<void(int64_t, const at::Tensor&, const std::vector<at::Tensor>&)> f);

/// t with unit column stride, as the passes need it.
at::Tensor unit_columns(const at::Tensor& t);

std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& b);

}  // namespace torchops::cuda
