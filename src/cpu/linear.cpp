#include "cpu/linear.h"

#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/sum_cpu_dispatch.h>
#include <c10/util/strides.h>

namespace torchops::cpu {

Tensor transposed(const Tensor& w) {
  return at::cpu::as_strided(w, {w.size(1), w.size(0)}, {w.stride(1), w.stride(0)}, w.storage_offset());
}

Tensor both_halves(const Tensor& first) {
  at::DimVector sizes(first.sizes());
  sizes[0] *= 2;
  return at::cpu::as_strided(first, sizes, c10::contiguous_strides(sizes), first.storage_offset());
}

void linear_out(Tensor out, const Tensor& x, const Tensor& w_t, const std::optional<Tensor>& b) {
  b ? at::cpu::addmm_(out.copy_(*b), x, w_t) : at::cpu::mm_out(out, x, w_t);
}

namespace {

at::ScalarType accumulate_dtype(const Tensor& w) { return w.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace

Chunks::Chunks(const Tensor& x, const Tensor& w, int64_t weights) : rows_(x.size(0)) {
  constexpr int64_t most_partial_bytes = int64_t{16} << 20, most_chunks = 64, fewest_chunks = 8;
  const int64_t out_features = w.size(0), in_features = w.size(1);
  const int64_t row_bytes = std::max(out_features * static_cast<int64_t>(w.element_size()), int64_t{1});
  const int64_t partial_bytes =
      std::max(weights * w.numel() * static_cast<int64_t>(c10::elementSize(accumulate_dtype(w))), int64_t{1});
  // Each panel's product packs w again and adds to all of dw.
  const int64_t fewest_rows = std::clamp(in_features, int64_t{1}, int64_t{512});
  const int64_t most_rows = kMaxScratchBytes / std::max(2 * rounded_row_bytes(x, w), int64_t{1});
  const auto divide = [&](int64_t panel_bytes) {
    panel_rows_ = std::max(std::min(std::max(panel_bytes / row_bytes, fewest_rows), most_rows), int64_t{1});
    panels_ = ceil_div(rows_, panel_rows_);
  };
  divide(kPanelBytes);
  count_ = std::min({panels_, most_chunks, most_partial_bytes / partial_bytes});
  if (count_ < fewest_chunks) {
    divide(kMaxScratchBytes);
    count_ = 1;
  }
}

void Chunks::for_each_panel(c10::function_ref<void(int64_t, int64_t, int64_t)> f) const {
  // Not through at::parallel_for, which would make ATen's primitives run on one thread.
  if (count_ == 1) return for_each_panel_of(0, f);
  cpu::for_each_panel(count_, 1, [&](int64_t chunk, int64_t) { for_each_panel_of(chunk, f); });
}

void Chunks::for_each_panel_of(int64_t chunk, c10::function_ref<void(int64_t, int64_t, int64_t)> f) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (int64_t panel = panels_ * chunk / count_; panel < panels_ * (chunk + 1) / count_; ++panel) {
    f(chunk, panel * panel_rows_, std::min(rows_, (panel + 1) * panel_rows_));
  }
}

PanelSum::PanelSum(const Tensor& result, bool wanted, const Chunks& chunks) : result_(result) {
  if (!wanted) return;
  const at::ScalarType dtype = accumulate_dtype(result);
  const bool is_result = chunks.panels() == 1 || (chunks.count() == 1 && result.scalar_type() == dtype);
  if (is_result) {
    partial_ = result.unsqueeze(0);
  } else {
    at::DimVector sizes(result.sizes());
    sizes.insert(sizes.begin(), chunks.count());
    partial_ = at::empty(sizes, result.options().dtype(dtype));
  }
  begun_.resize(chunks.count());
}

std::pair<Tensor, bool> PanelSum::next(int64_t chunk) const {
  return {partial_.select(0, chunk), !std::exchange(begun_[chunk], true)};
}

void PanelSum::add(int64_t chunk, const Tensor& part) const {
  if (!wanted()) return;
  auto [sum, is_first] = next(chunk);
  is_first ? sum.copy_(part) : sum.add_(part);
}

void PanelSum::finish() const {
  if (!wanted() || partial_.is_alias_of(result_)) return;
  result_.copy_(partial_.size(0) == 1 ? partial_.select(0, 0)
                                      : at::cpu::sum(partial_, {0}, /*keepdim=*/false, partial_.scalar_type()));
}

void WeightGradient::add(int64_t chunk, const Tensor& dz, const Tensor& x) const {
  if (dw_.wanted()) {
    const Tensor dz_t = transposed(dz);
    if (dw_.scalar_type() == x.scalar_type()) {
      auto [dw, is_first] = dw_.next(chunk);
      is_first ? at::cpu::mm_out(dw, dz_t, x) : at::cpu::addmm_(dw, dz_t, x);
    } else {
      dw_.add(chunk, at::cpu::mm(dz_t, x));
    }
  }
  if (db_.wanted()) db_.add(chunk, at::cpu::sum(dz, {0}, /*keepdim=*/false, accumulate_dtype(dz)));
}

void input_gradient(Tensor dx, const Tensor& dz, const Tensor& w, bool accumulate) {
  if (dx.scalar_type() != w.scalar_type()) {
    const Tensor product = at::cpu::mm(dz, w);
    accumulate ? dx.add_(product) : dx.copy_(product);
  } else if (accumulate) {
    at::cpu::addmm_(dx, dz, w);
  } else {
    at::cpu::mm_out(dx, dz, w);
  }
}

}  // namespace torchops::cpu
