#include "cuda/linear/products.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/add_cuda_dispatch.h>
#include <ATen/ops/addmm_cuda_dispatch.h>
#include <ATen/ops/as_strided_cuda_dispatch.h>
#include <ATen/ops/cat_cuda_dispatch.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/strides.h>

#include "cuda/base/device.h"
#include "cuda/linear/split_product.h"

namespace torchops::cuda {

int64_t even_step(int64_t rows, int64_t step) {
  if (step >= rows) return std::max(rows, int64_t{1});
  constexpr int64_t together = 8;
  if (step >= together) step -= step % together;
  const int64_t panels = (rows + step - 1) / step, even = (rows + panels - 1) / panels;
  return std::min((even + together - 1) / together * together, step);
}

int64_t rows_of_panel(int64_t rows, const at::Tensor& w, bool adds_bias, int64_t scratch_bytes, int64_t most_bytes) {
  constexpr int64_t least_cache = int64_t{24} << 20, least_rows = int64_t{1} << 15;
  const int64_t cache = device_properties().l2CacheSize;
  const int64_t within = cache / (3 * product_row_bytes(w));
  const int64_t most = scratch_bytes > 0 ? std::max(most_bytes / scratch_bytes, int64_t{1}) : rows;
  const bool slow_bias = adds_bias && w.element_size() == 2 && w.size(0) >= 128;
  const bool by_cache = cache >= least_cache && within >= least_rows && !slow_bias;
  return even_step(rows, by_cache ? std::min(within, most) : most);
}

at::Tensor& product_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  return split_product(out, a, b) ? out : at::cuda::mm_out(out, a, b);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor out = at::detail::empty_cuda({a.size(0), b.size(1)}, a.options());
  product_out(out, a, b);
  return out;
}

void add_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b) {
  if (!split_product(out, a, b, /*accumulate=*/true)) at::cuda::addmm_(out, a, b);
}

void linear_out(at::Tensor out, const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b) {
  if (split_linear(out, x, w, b)) return;
  // w.t(), without two trips through the dispatcher.
  const at::Tensor w_t =
      at::cuda::as_strided(w, {w.size(1), w.size(0)}, {w.stride(1), w.stride(0)}, w.storage_offset());
  if (!b) {
    product_out(out, x, w_t);
    return;
  }
  if (x.size(0) != 1 || w.element_size() > 2) {
    at::cuda::addmm_out(out, *b, x, w_t);
    return;
  }
  // cuBLAS rounds the product of a single row before it adds the bias. Where that cancels most of it, what a fused
  // kernel has computed from the exact sum, and what follows from this one, would not fit together.
  at::Tensor sum = at::detail::empty_cuda(out.sizes(), w.options().dtype(at::kFloat));
  at::cuda::mm_out(sum, x, w_t, at::kFloat);
  at::cuda::add_out(out, sum, *b);
}

at::Tensor stacked(const at::Tensor& a, const at::Tensor& b) {
  if (!detail::are_halves(a, b)) return at::cuda::cat(at::TensorList({a, b}));
  std::vector<int64_t> sizes = a.sizes().vec();
  sizes[0] *= 2;
  return a.as_strided(sizes, c10::contiguous_strides(sizes));  // that of a single row in a may be any
}

std::optional<at::Tensor> stacked(const std::optional<at::Tensor>& a, const std::optional<at::Tensor>& b) {
  if (!a && !b) return std::nullopt;
  return stacked(a ? *a : at::zeros_like(*b), b ? *b : at::zeros_like(*a));
}

namespace {

// sum += a @ b of 16-bit factors, in float32.
void add_wide_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b) {
  at::cuda::addmm_out(sum, sum, a, b, sum.scalar_type());
}

}  // namespace

void input_gradient(at::Tensor dx, const at::Tensor& dz, const at::Tensor& w, bool accumulate) {
  const bool wide = dx.scalar_type() != w.scalar_type();
  if (accumulate) {
    if (!wide) return add_product(dx, dz, w);
    add_wide_product(dx, dz, w);
  } else {
    wide ? at::cuda::mm_out(dx, dz, w, dx.scalar_type()) : product_out(dx, dz, w);
  }
}

void weight_gradient_out(const at::Tensor& dw, const at::Tensor& dz, const at::Tensor& x) {
  if (dw.numel() == 0) return;  // no features
  const bool wide = dw.scalar_type() != dz.scalar_type();
  const int64_t rows = x.size(0), rest = detail::rows_cublas_may_leave_out(dz, x);
  const auto float32 = [&]() -> at::Tensor {
    return at::detail::empty_cuda(dw.sizes(), dw.options().dtype(at::kFloat));
  };
  const auto product = [&](at::Tensor out, int64_t begin, int64_t end) {
    const at::Tensor left = dz.narrow(0, begin, end - begin).t(), right = x.narrow(0, begin, end - begin);
    const bool widens = out.scalar_type() != dz.scalar_type();
    widens ? at::cuda::mm_out(out, left, right, out.scalar_type()) : product_out(out, left, right);
  };
  if (rest == 0 && (wide || !detail::is_product_rounded_in_parts(dz, x))) return product(dw, 0, rows);
  const at::Tensor sum = wide ? dw : float32();
  product(sum, 0, rows - rest);
  if (rest > 0) add_wide_product(sum, dz.narrow(0, rows - rest, rest).t(), x.narrow(0, rows - rest, rest));
  if (!wide) dw.copy_(sum);
}

at::Tensor weight_gradient(const at::Tensor& dz, const at::Tensor& x) {
  const at::Tensor dw = at::detail::empty_cuda({dz.size(1), x.size(1)}, dz.options());
  weight_gradient_out(dw, dz, x);
  return dw;
}

void for_each_rounded_panel(const at::Tensor& x, at::TensorList totals,
                            c10::function_ref<void(int64_t, const at::Tensor&, const std::vector<at::Tensor>&)> f) {
  constexpr int64_t most_bytes = int64_t{64} << 20;
  constexpr int64_t alignment = 8;  // elements, for kernels that read 16 bytes at once
  const auto aligned = [](int64_t elements) { return (elements + alignment - 1) / alignment * alignment; };
  const at::TensorOptions options = totals[0].options();
  const int64_t rows = x.size(0), row_length = aligned(x.size(1));
  const int64_t row_bytes = std::max(row_length * static_cast<int64_t>(totals[0].element_size()), int64_t{1});
  const int64_t most = std::max(most_bytes / row_bytes, int64_t{1}), tile = detail::kRowsOfCublasTile;
  const int64_t step = most < rows ? (even_step(rows, most) + tile - 1) / tile * tile : rows;
  const at::Tensor padded = at::detail::empty_cuda({std::min(step, rows), row_length}, options);
  const at::Tensor rounded = padded.narrow(1, 0, x.size(1));
  const auto panel_of = [&](int64_t begin, int64_t end) {
    return rounded.narrow(0, 0, end - begin).copy_(x.narrow(0, begin, end - begin));
  };
  if (step >= rows) return f(0, panel_of(0, rows), totals.vec());

  int64_t count = 0;
  for (const at::Tensor& total : totals) count += aligned(total.numel());
  const at::Tensor sums = at::zeros({2, count}, options.dtype(at::kFloat));
  const at::Tensor sum = sums.select(0, 0), part = sums.select(0, 1);
  const auto pieces_of = [&](const at::Tensor& flat) {
    std::vector<at::Tensor> pieces;
    int64_t begin = 0;
    for (const at::Tensor& total : totals) {
      pieces.push_back(flat.narrow(0, begin, total.numel()).view(total.sizes()));
      begin += aligned(total.numel());
    }
    return pieces;
  };
  const std::vector<at::Tensor> parts = pieces_of(part), of_all = pieces_of(sum);
  for_each_panel_of(rows, step, [&](int64_t begin, int64_t end) {
    f(begin, panel_of(begin, end), parts);
    sum.add_(part);
  });
  for (size_t i = 0; i < totals.size(); ++i) totals[i].copy_(of_all[i]);
}

at::Tensor unit_columns(const at::Tensor& t) { return t.stride(1) == 1 || t.size(1) == 1 ? t : t.contiguous(); }

std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& b) {
  return b ? std::optional<at::Tensor>(b->contiguous()) : b;
}

}  // namespace torchops::cuda
