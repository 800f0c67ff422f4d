#include <ATen/TensorOperators.h>
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

// For lines along `dim` that do not fit scratch: y = exp(x - max) / sum(exp(x - max)) in two passes over slices of the
// lines, with scratch of one slice and the two statistics of each line.
void overwrite_long_lines(const Tensor& x, int64_t dim) {
  const auto accumulate = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor max = at::amax(x, {dim}, /*keepdim=*/true).to(accumulate);
  const int64_t length = x.size(dim);
  const int64_t slice_bytes = x.numel() / length * static_cast<int64_t>(c10::elementSize(accumulate));
  const int64_t step = std::max(kSliceBytes / slice_bytes, int64_t{1});
  const auto for_each_slice = [&](const auto& f) {
    for (int64_t begin = 0; begin < length; begin += step) {
      const Tensor slice = x.narrow(dim, begin, std::min(step, length - begin));
      f(slice, (slice.to(accumulate) - max).exp_());
    }
  };
  Tensor sum = at::zeros_like(max);
  for_each_slice([&](const Tensor&, const Tensor& exponentials) { sum.add_(exponentials.sum({dim}, true)); });
  for_each_slice([&](const Tensor& slice, Tensor exponentials) { slice.copy_(exponentials.div_(sum)); });
}

void softmax_cpu_(Tensor& x, int64_t dim) {
  check_softmax_(x, dim);
  if (x.numel() == 0) return;
  const Tensor lines = x.dim() == 0 ? x.view({1, 1}) : x.movedim(dim, -1);
  // A line whose elements lie apart is read by the cache line, so it is worked on together with its neighbours.
  const int64_t together = lines.stride(-1) == 1 || lines.size(-1) == 1 ? 1 : 64 / x.element_size();
  if (lines.size(-1) * x.element_size() * together > kMaxScratchBytes) {
    overwrite_long_lines(x, dim);
    return;
  }
  for_each_row_panel({lines}, 1, together, [](const Operands& panel) {
    panel[0].copy_(at::cpu::_softmax(panel[0], -1, /*half_to_float=*/false));
  });
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("softmax", softmax_cpu);
  m.impl("softmax_", softmax_cpu_);
}

}  // namespace
}  // namespace torchops::cpu
