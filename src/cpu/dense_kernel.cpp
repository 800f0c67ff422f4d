#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid_backward_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <ATen/ops/sum_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cpu/linear.h"
#include "ops/common.h"
#include "ops/dense.h"

namespace torchops::cpu {
namespace {

void dense_rows(Tensor y, const Tensor& x, const Tensor& w_t, const std::optional<Tensor>& b) {
  linear_out(y, x, w_t, b);
  at::cpu::sigmoid_(y);
}

// Eager writes the pre-activation, reads it back and writes a second tensor of the same size: three passes over memory
// where one is enough. Here a thread computes a panel of it and applies the sigmoid while the panel is in its cache.
//
// The product of each panel packs w again (in * out elements, against in * out * rows multiplications), so a panel has
// at most 1 MiB, or min(in, 512) rows if that is more, but never more rows than an equal share per thread.
Tensor dense_cpu(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  check_dense(x, w, b);
  const int64_t in_features = w.size(1), out_features = w.size(0);
  Tensor y = at::detail::empty_cpu(detail::with_last(x.sizes(), out_features), x.options());
  if (y.numel() == 0) return y;
  const int64_t rows = y.numel() / out_features, threads = at::get_num_threads();
  const Tensor x_rows = detail::as_rows(x), y_rows = detail::as_rows(y);
  const Tensor w_t = transposed(w);

  const int64_t rows_per_thread = ceil_div(rows, threads);
  constexpr int64_t fewest_rows = 32;         // with fewer, packing w dominates: let BLAS split the product
  constexpr int64_t worth_threads = 1 << 15;  // elements of y, as for ATen's pointwise kernels
  if (rows_per_thread < fewest_rows || y.numel() < worth_threads) {
    dense_rows(y_rows, x_rows, w_t, b);
    return y;
  }
  constexpr int64_t panel_bytes = int64_t{1} << 20;
  const int64_t panel_rows = std::max(panel_bytes / (out_features * static_cast<int64_t>(x.element_size())),
                                      std::clamp(in_features, int64_t{1}, int64_t{512}));
  for_each_panel(rows, balanced_rows(rows, std::min(panel_rows, rows_per_thread)), [&](int64_t begin, int64_t end) {
    dense_rows(y_rows.narrow(0, begin, end - begin), x_rows.narrow(0, begin, end - begin), w_t, b);
  });
  return y;
}

// One pass over grad and y for both results. The panels, and so the order of the additions, depend only on the shape.
// The bias gradient is therefore bitwise the same for any number of threads, and with or without dz.
std::tuple<Tensor, Tensor> dense_backward_cpu(const Tensor& grad, const Tensor& y, std::array<bool, 2> output_mask) {
  detail::check_dense_backward(grad, y);
  const bool dz_wanted = output_mask[0], db_wanted = output_mask[1];
  const auto empty = [&](at::IntArrayRef sizes) -> Tensor { return at::detail::empty_cpu(sizes, y.options()); };
  Tensor dz = dz_wanted ? empty(y.sizes()) : empty({0});
  if (!db_wanted) {
    if (dz_wanted) at::cpu::sigmoid_backward_out(dz, grad, y);
    return {dz, empty({0})};
  }
  const int64_t out_features = y.size(-1);
  if (y.numel() == 0) return {dz, at::zeros({out_features}, y.options())};
  const Tensor grad_rows = detail::as_rows(grad), y_rows = detail::as_rows(y);
  const int64_t rows = y_rows.size(0);
  const Tensor dz_rows = dz_wanted ? dz.view({rows, out_features}) : Tensor();
  const int64_t rows_per_panel = std::max(kPanelBytes / (out_features * y.element_size()), int64_t{1});
  const auto accumulate = y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (rows <= rows_per_panel) {
    Tensor panel = dz_wanted ? dz_rows : empty({rows, out_features});
    at::cpu::sigmoid_backward_out(panel, grad_rows, y_rows);
    return {dz, at::cpu::sum(panel, {0}, /*keepdim=*/false, accumulate).to(y.scalar_type())};
  }
  const Tensor partial = at::empty({ceil_div(rows, rows_per_panel), out_features}, y.options().dtype(accumulate));
  for_each_panel(rows, rows_per_panel, [&](int64_t begin, int64_t end) {
    Tensor panel = dz_wanted ? dz_rows.narrow(0, begin, end - begin) : empty({end - begin, out_features});
    at::cpu::sigmoid_backward_out(panel, grad_rows.narrow(0, begin, end - begin), y_rows.narrow(0, begin, end - begin));
    Tensor sum = partial.select(0, begin / rows_per_panel);
    at::cpu::sum_out(sum, panel, {0}, /*keepdim=*/false, accumulate);
  });
  return {dz, at::cpu::sum(partial, {0}, /*keepdim=*/false, accumulate).to(y.scalar_type())};
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("dense", dense_cpu);
  m.impl("_dense_backward", dense_backward_cpu);
}

}  // namespace
}  // namespace torchops::cpu
