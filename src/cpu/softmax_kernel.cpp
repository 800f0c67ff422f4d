#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_softmax_cpu_dispatch.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "cpu/panels.h"
#include "ops/softmax.h"

namespace torchops::cpu {
namespace {

Tensor softmax_cpu(const Tensor& x, int64_t dim) {
  check_softmax(x, dim);
  Tensor y = at::empty(x.sizes(), x.options());
  at::cpu::_softmax_out(y, x, dim, /*half_to_float=*/false);
  return y;
}

// For lines along `dim` that don't fit scratch: y = exp(x - max) / sum(exp(x - max)) in two passes over slices of the
// lines, with scratch for one slice and the two statistics of each line.
void overwrite_long_lines(const Tensor& x, int64_t dim) {
  const auto accumulate = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor max = at::amax(x, {dim}, /*keepdim=*/true).to(accumulate);
  const int64_t length = x.size(dim);
  const int64_t slice_bytes = x.numel() / length * static_cast<int64_t>(c10::elementSize(accumulate));
  const int64_t step = std::max(kSliceBytes / slice_bytes, int64_t{1});
  at::DimVector slice_shape(x.sizes());
  slice_shape[at::maybe_wrap_dim(dim, x.dim())] = std::min(step, length);
  // Allocated before the second pass starts to overwrite x.
  const Tensor scratch = at::empty(slice_shape, x.options().dtype(accumulate));
  const auto for_each_slice = [&](const auto& f) {
    for (int64_t begin = 0; begin < length; begin += step) {
      const int64_t size = std::min(step, length - begin);
      const Tensor slice = x.narrow(dim, begin, size), exponentials = scratch.narrow(dim, 0, size);
      exponentials.copy_(slice);
      f(slice, exponentials.sub_(max).exp_());
    }
  };
  Tensor sum = at::zeros_like(max);
  for_each_slice([&](const Tensor&, const Tensor& exponentials) { sum.add_(exponentials.sum({dim}, true)); });
  for_each_slice([&](const Tensor& slice, Tensor exponentials) { slice.copy_(exponentials.div_(sum)); });
}

// ATen's kernels read what they overwrite before they write it, so input and output may be the same tensor. One kernel
// is for lines of adjacent elements. The other is for lines side by side, and is fast if they fill at least a cache
// line. Both need a contiguous tensor. For half precision, each thread allocates a line, or a cache line's worth of
// lines, twice in float32.
bool overwrite_contiguous(const Tensor& x, const Tensor& lines, int64_t dim) {
  const int64_t length = lines.size(-1), in_cache_line = 64 / x.element_size();
  const int64_t float_bytes = at::isReducedFloatingType(x.scalar_type()) ? 2 * sizeof(float) : 0;
  const auto overwrite = [&](Tensor view) {
    overwriting(x, [&] { at::cpu::_softmax_out(view, view, 1, /*half_to_float=*/false); });
  };
  if (lines.is_contiguous() && length * float_bytes <= kMaxScratchBytes) {
    overwrite(lines.view({-1, length}));
    return true;
  }
  const int64_t side_by_side = x.stride(dim);
  if (x.is_contiguous() && side_by_side >= in_cache_line && length * in_cache_line * float_bytes <= kMaxScratchBytes) {
    overwrite(x.view({-1, length, side_by_side}));
    return true;
  }
  return false;
}

void softmax_cpu_(Tensor& x, int64_t dim) {
  check_softmax_(x, dim);
  if (x.numel() == 0) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor lines = x.dim() == 0 ? x.view({1, 1}) : x.movedim(dim, -1);
  if (overwrite_contiguous(x.dim() == 0 ? lines : x, lines, dim)) return;
  // If the elements of a line are strided, each read fetches a whole cache line, so the neighbouring lines are
  // processed with it.
  const int64_t together = lines.stride(-1) == 1 || lines.size(-1) == 1 ? 1 : 64 / x.element_size();
  if (lines.size(-1) * x.element_size() * together > kMaxScratchBytes) {
    overwrite_long_lines(x, dim);
    return;
  }
  for_each_row_panel(x, {lines}, {.min_rows = together, .scratch = 1},
                     [](const Operands& panel, const Operands& scratch) {
                       const Tensor& rows = panel[0];
                       Tensor y = scratch[0];
                       // Otherwise ATen would make its own contiguous copy.
                       if (!rows.is_contiguous()) y.copy_(rows);
                       at::cpu::_softmax_out(y, rows.is_contiguous() ? rows : y, -1, /*half_to_float=*/false);
                       rows.copy_(y);
                     });
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("softmax", softmax_cpu);
  m.impl("softmax_", softmax_cpu_);
}

}  // namespace
}  // namespace torchops::cpu
