#include <ATen/EmptyTensor.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <torch/library.h>

#include "cpu/linear.h"
#include "ops/common.h"
#include "ops/scaled.h"

namespace torchops::cpu {
namespace {

/// A linear layer of eight-bit operands, as matrices: (x @ w.T) * scale_x * scale_w + b.
struct ScaledLinear {
  Tensor x, w, scale_x, scale_w;  // scales: of one element, or (rows, 1) and (1, out)
  std::optional<Tensor> b;

  ScaledLinear(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
               const std::optional<Tensor>& b)
      : x(detail::as_rows(x)), w(w), scale_x(as_matrix(scale_x, {-1, 1})), scale_w(as_matrix(scale_w, {1, -1})), b(b) {}

  /// z = its rows [begin, end) and columns [from, to), in float32; `factor` is w of these columns.
  void columns_out(Tensor z, const Tensor& x_rows, const Tensor& factor, int64_t begin, int64_t end, int64_t from,
                   int64_t to) const {
    at::cpu::mm_out(z, x_rows, transposed(factor));
    at::cpu::mul_(z, scale_x.size(0) == 1 ? scale_x : scale_x.narrow(0, begin, end - begin));
    at::cpu::mul_(z, scale_w.size(1) == 1 ? scale_w : scale_w.narrow(1, from, to - from));
    if (b) at::cpu::add_(z, b->narrow(0, from, to - from));
  }

 private:
  static Tensor as_matrix(const Tensor& scale, at::IntArrayRef shape) { return scale.reshape(shape); }
};

/// Calls f(begin, end, from, to) for blocks of y, or of all of its columns where the weights of a block, in float32,
/// are few. The blocks of some columns are one after another, so that `weights(from, to)` has to be called only once
/// for all of them.
template <class Weights, class F>
void for_each_block(int64_t rows, int64_t columns, int64_t in_features, const Weights& weights, const F& f) {
  constexpr int64_t least_columns = 64, least_rows = 64, size = sizeof(float);
  const int64_t column_step = std::clamp(kMaxScratchBytes / (std::max(in_features, int64_t{1}) * size),
                                         std::min(columns, least_columns), columns);
  const int64_t row_bytes = (column_step + in_features) * size;
  const int64_t row_step = std::clamp(kPanelBytes * 2 / row_bytes, std::min(rows, least_rows), rows);
  for (int64_t from = 0; from < columns; from += column_step) {
    const int64_t to = std::min(columns, from + column_step);
    const auto factors = weights(from, to);
    const auto run = [&](int64_t begin, int64_t end) { f(factors, begin, end, from, to); };
    if (rows <= least_rows) {
      run(0, rows);  // not on one thread: its product is bound by reading the weights
    } else {
      for_each_panel(rows, std::min(row_step, std::max(ceil_div(rows, at::get_num_threads()), least_rows)), run);
    }
  }
}

Tensor dense_scaled_cpu(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                        const std::optional<Tensor>& b, std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType dtype = check_dense_scaled(x, w, scale_x, scale_w, b, out_dtype);
  at::DimVector sizes(x.sizes());
  sizes.back() = w.size(0);
  const Tensor y = at::detail::empty_cpu(sizes, x.options().dtype(dtype));
  if (y.numel() == 0) return y;
  const ScaledLinear linear(x, w, scale_x, scale_w, b);
  const Tensor y_rows = detail::as_rows(y);
  for_each_block(
      y_rows.size(0), y_rows.size(1), w.size(1),
      [&](int64_t from, int64_t to) { return w.narrow(0, from, to - from).to(at::kFloat); },
      [&](const Tensor& factor, int64_t begin, int64_t end, int64_t from, int64_t to) {
        Tensor z = at::empty({end - begin, to - from}, x.options().dtype(at::kFloat));
        linear.columns_out(z, linear.x.narrow(0, begin, end - begin).to(at::kFloat), factor, begin, end, from, to);
        y_rows.narrow(0, begin, end - begin).narrow(1, from, to - from).copy_(at::cpu::sigmoid_(z));
      });
  return y;
}

TORCH_LIBRARY_IMPL(myops, CPU, m) { m.impl("dense.scaled", dense_scaled_cpu); }

}  // namespace
}  // namespace torchops::cpu
