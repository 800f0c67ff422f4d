#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/linear/products.h"
#include "ops/common.h"
#include "ops/linear.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

Tensor linear_cuda(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  detail::check_linear_layer(x, w, b);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor y = at::detail::empty_cuda(detail::with_last(x.sizes(), w.size(0)), x.options());
  if (y.numel() > 0) linear_out(detail::as_rows(y), detail::as_rows(x), w, contiguous(b));
  return y;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) { m.impl("_linear", linear_cuda); }

}  // namespace
}  // namespace torchops::cuda
