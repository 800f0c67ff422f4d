#include <ATen/EmptyTensor.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <ATen/ops/silu_cpu_dispatch.h>
#include <torch/library.h>

#include "cpu/linear.h"
#include "ops/common.h"
#include "ops/glu.h"
#include "ops/scaled.h"

namespace torchops::cpu {
namespace {

using detail::GluActivation;
using OptionalTensor = std::optional<Tensor>;

/// Rows [begin, end) and columns [from, to) of a result.
struct Block {
  int64_t begin, end, from, to;

  int64_t rows() const { return end - begin; }
  int64_t columns() const { return to - from; }
  Tensor of(const Tensor& t) const { return t.narrow(0, begin, rows()).narrow(1, from, columns()); }
};

/// A linear layer of eight-bit operands, (x @ w.T) * scale_x * scale_w + b, with x as a matrix of its rows.
class ScaledLinear {
 public:
  ScaledLinear(const Tensor& w, const Tensor& scale_x, const Tensor& scale_w, const OptionalTensor& b)
      : w_(w), scale_x_(scale_x.reshape({-1, 1})), scale_w_(scale_w.reshape({1, -1})), b_(b) {}

  /// Reads the weights of these columns, which the following calls use until the next read().
  void read(int64_t from, int64_t to) { read_ = w_.narrow(0, from, to - from).to(at::kFloat); }

  /// The result for a block of the columns read last. `x` are its rows in float32.
  Tensor operator()(const Tensor& x, const Block& block) const {
    Tensor z = at::empty({block.rows(), block.columns()}, x.options());
    at::cpu::mm_out(z, x, transposed(read_));
    at::cpu::mul_(z, scale_x_.size(0) == 1 ? scale_x_ : scale_x_.narrow(0, block.begin, block.rows()));
    at::cpu::mul_(z, scale_w_.size(1) == 1 ? scale_w_ : scale_w_.narrow(1, block.from, block.columns()));
    if (b_) at::cpu::add_(z, b_->narrow(0, block.from, block.columns()));
    return z;
  }

 private:
  Tensor w_, scale_x_, scale_w_, read_;
  OptionalTensor b_;
};

/// y = f(x, block) for blocks of y, with the block's rows of x in float32. A block has as many columns as fit
/// kMaxScratchBytes of float32 weights. All `layers` read those weights before f is called for any of the rows.
template <class F>
void for_each_block(const Tensor& y, const Tensor& x, c10::ArrayRef<ScaledLinear*> layers, const F& f) {
  const Tensor y_rows = detail::as_rows(y), x_rows = detail::as_rows(x);
  const int64_t rows = y_rows.size(0), columns = y_rows.size(1), in_features = x_rows.size(1);
  constexpr int64_t least_columns = 64, least_rows = 64, size = sizeof(float);
  const int64_t column_bytes = std::max(in_features, int64_t{1}) * size * static_cast<int64_t>(layers.size());
  const int64_t column_step = std::clamp(kMaxScratchBytes / column_bytes, std::min(columns, least_columns), columns);
  const int64_t row_bytes = (column_step * static_cast<int64_t>(layers.size()) + in_features) * size;
  // At most an equal share of the rows per thread. With few rows, reading the weights dominates: let BLAS split the
  // product.
  const int64_t per_thread = std::max(ceil_div(rows, at::get_num_threads()), least_rows);
  const int64_t row_step = std::min(std::max(2 * kPanelBytes / row_bytes, least_rows), per_thread);
  for (int64_t from = 0; from < columns; from += column_step) {
    const int64_t to = std::min(columns, from + column_step);
    for (ScaledLinear* const layer : layers) layer->read(from, to);
    const auto run = [&](int64_t begin, int64_t end) {
      const Block block{begin, end, from, to};
      block.of(y_rows).copy_(f(x_rows.narrow(0, begin, end - begin).to(at::kFloat), block));
    };
    rows <= least_rows ? run(0, rows) : for_each_panel(rows, row_step, run);
  }
}

Tensor empty_result(const Tensor& x, const Tensor& w, at::ScalarType dtype) {
  return at::detail::empty_cpu(detail::with_last(x.sizes(), w.size(0)), x.options().dtype(dtype));
}

Tensor dense_scaled_cpu(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                        const OptionalTensor& b, std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType dtype = check_dense_scaled(x, w, scale_x, scale_w, b, out_dtype);
  const Tensor y = empty_result(x, w, dtype);
  if (y.numel() == 0) return y;
  ScaledLinear linear(w, scale_x, scale_w, b);
  for_each_block(y, x, {&linear}, [&](const Tensor& x_rows, const Block& block) {
    Tensor z = linear(x_rows, block);
    return at::cpu::sigmoid_(z);
  });
  return y;
}

Tensor gate_scaled_cpu(const Tensor& v, const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                       const OptionalTensor& b) {
  check_gate_scaled(v, x, w, scale_x, scale_w, b);
  const Tensor y = empty_result(x, w, v.scalar_type());
  if (y.numel() == 0) return y;
  ScaledLinear linear(w, scale_x, scale_w, b);
  const Tensor v_rows = detail::as_rows(v);
  for_each_block(y, x, {&linear}, [&](const Tensor& x_rows, const Block& block) {
    Tensor z = linear(x_rows, block);
    return at::cpu::mul_(at::cpu::sigmoid_(z), block.of(v_rows));
  });
  return y;
}

Tensor glu_scaled_cpu(const Tensor& x, const Tensor& w, const Tensor& wg, const Tensor& scale_x, const Tensor& scale_w,
                      const Tensor& scale_wg, const OptionalTensor& b, const OptionalTensor& bg,
                      std::string_view activation, std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType dtype = check_glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, bg, activation, out_dtype);
  const Tensor y = empty_result(x, w, dtype);
  if (y.numel() == 0) return y;
  const bool silu = detail::glu_activation(activation) == GluActivation::kSilu;
  ScaledLinear value(w, scale_x, scale_w, b), gate(wg, scale_x, scale_wg, bg);
  for_each_block(y, x, {&value, &gate}, [&](const Tensor& x_rows, const Block& block) {
    Tensor t = gate(x_rows, block);
    silu ? at::cpu::silu_(t) : at::cpu::sigmoid_(t);
    return at::cpu::mul_(t, value(x_rows, block));
  });
  return y;
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("dense.scaled", dense_scaled_cpu);
  m.impl("gate.scaled", gate_scaled_cpu);
  m.impl("glu.scaled", glu_scaled_cpu);
}

}  // namespace
}  // namespace torchops::cpu
