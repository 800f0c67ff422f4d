#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_layer_norm_backward_cpu_dispatch.h>
#include <ATen/ops/sum_cpu_dispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/layer_norm.h"
#include "cpu/layer_norm_vector.h"

namespace torchops::cpu {
namespace {

// A chunk is one thread's work and has its own sums, of less than a thread's scratch.
int64_t chunks_of(int64_t rows, int64_t columns, int64_t row_bytes) {
  constexpr int64_t grain = 8192, most = 16;  // elements, chunks
  const int64_t chunks = std::min(rows * columns / grain, kMaxScratchBytes / (2 * row_bytes));
  return std::clamp(chunks, int64_t{1}, std::min(rows, most));
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> layer_norm_gradients(const Tensor& grad, const Tensor& x,
                                                        at::IntArrayRef normalized_shape, const Tensor& mean,
                                                        const Tensor& rstd, const Affine& affine,
                                                        std::array<bool, 3> output_mask) {
  const auto [wants_dx, wants_dweight, wants_dbias] = output_mask;
  const at::ScalarType wide = detail::moments_dtype(x.scalar_type());
  if (x.scalar_type() == wide || x.numel() == 0) {
    // ATen takes shape and dtype of these gradients from the parameters.
    std::optional<Tensor> weight = affine.weight;
    if (!weight && (wants_dweight || wants_dbias)) weight = at::ones(normalized_shape, x.options());
    return at::cpu::native_layer_norm_backward(grad.contiguous(), x.contiguous(), normalized_shape, mean.contiguous(),
                                               rstd.contiguous(), weight, /*bias=*/weight, output_mask);
  }
  TORCH_INTERNAL_ASSERT(grad.scalar_type() == x.scalar_type() && mean.scalar_type() == wide);
  const int64_t rows = mean.numel(), columns = x.numel() / rows;
  const int64_t chunks = chunks_of(rows, columns, columns * static_cast<int64_t>(c10::elementSize(wide)));
  const auto sums_of = [&](bool wanted) {
    return wanted ? at::zeros({chunks, columns}, x.options().dtype(wide)) : Tensor();
  };
  const Tensor dx = wants_dx ? at::empty(x.sizes(), x.options()) : Tensor(), dweight = sums_of(wants_dweight),
               dbias = sums_of(wants_dbias);
  const Tensor g = grad.contiguous(), from = x.contiguous(), means = mean.contiguous(), rstds = rstd.contiguous();
  const auto written = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
  const auto row_of = [&](const Tensor& sums, int64_t chunk) {
    return sums.defined() ? static_cast<char*>(sums.mutable_data_ptr()) + chunk * columns * sums.element_size()
                          : nullptr;
  };
  const LayerNormGradientRoutine routine =
      TORCHOPS_FOR_THIS_PROCESSOR(find_layer_norm_gradient_routine)(x.scalar_type());
  at::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const LayerNormGradientRows of_chunk{g.const_data_ptr(),
                                           from.const_data_ptr(),
                                           written(dx),
                                           affine.weight ? affine.weight->const_data_ptr() : nullptr,
                                           means.const_data_ptr(),
                                           rstds.const_data_ptr(),
                                           row_of(dweight, chunk),
                                           row_of(dbias, chunk),
                                           columns};
      routine(of_chunk, rows * chunk / chunks, rows * (chunk + 1) / chunks);
    }
  });
  const auto added = [&](const Tensor& sums) {
    if (!sums.defined()) return sums;
    return (chunks == 1 ? sums : at::cpu::sum(sums, {0}, /*keepdim=*/false, wide)).view(normalized_shape);
  };
  return {dx, added(dweight), added(dbias)};
}

}  // namespace torchops::cpu
