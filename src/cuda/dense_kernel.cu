#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <optional>

#include "cuda/base/activation.cuh"
#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/products.h"
#include "cuda/linear/run.cuh"
#include "cuda/passes/backward.cuh"
#include "cuda/passes/sigmoid.h"
#include "ops/common.h"
#include "ops/dense.h"
#include "ops/kernel_path.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

Tensor dense_cuda(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  check_dense(x, w, b);
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t out_features = w.size(0);
  Tensor y = at::detail::empty_cuda(detail::with_last(x.sizes(), out_features), x.options());
  if (y.numel() == 0) return y;
  const Tensor x_rows = x.dim() == 2 ? x : detail::as_rows(x);
  Tensor y_rows = y.dim() == 2 ? y : y.view({y.numel() / out_features, out_features});
  const std::optional<Tensor> bias = contiguous(b);
  if (gemm::run<gemm::LinearRule<Sigmoid>>({.d = y_rows, .a = x_rows, .b = w, .bias = bias})) return y;
  linear_out(y_rows, x_rows, w, bias);
  sigmoid_without_gaps(y, y);
  return y;
}

std::tuple<Tensor, Tensor> dense_backward_cuda(const Tensor& grad, const Tensor& y, std::array<bool, 2> output_mask) {
  detail::check_dense_backward(grad, y);
  const c10::cuda::CUDAGuard guard(y.device());
  if (output_mask[0] || output_mask[1]) return gemm::backward_pass<Sigmoid>(grad, y, output_mask[0], output_mask[1]);
  const Tensor none = at::detail::empty_cuda({0}, y.options());
  return {none, none};
}

// All gradients by a kernel that makes dx while it reads grad and y: with few features dw, too, otherwise dz for it;
// nullopt if none can run, or none is faster. db may be empty.
std::optional<std::tuple<Tensor, Tensor, Tensor>> fused_gradients(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                                  const Tensor& w, bool db_wanted) {
  const int64_t n = w.size(0), k = w.size(1);
  const detail::KernelPath path = detail::kernel_path();
  if (path == detail::KernelPath::kCublas || n % 8 != 0 || k % 8 != 0 || y.numel() == 0) return std::nullopt;
  const Tensor y_rows = detail::as_rows(y), x_rows = detail::as_rows(x);
  const auto c = gemm::sm90_case(y_rows.size(0), n, k, y.scalar_type());
  if (!c) return std::nullopt;
  const auto way = gemm::dense_gradients_way(*c, detail::is_automatic(path));
  if (!way) return std::nullopt;
  const bool makes_dw = *way == gemm::DenseGradientsWay::kOnePass;
  const Tensor g = gemm::readable(detail::as_rows(grad));  // the cotangent of a sum has strides of 0
  const auto from_g = gemm::operand(g), from_y = gemm::operand(y_rows), from_x = gemm::operand(x_rows),
             from_w = gemm::operand(w);
  if (!from_g || !from_y || !from_w || (makes_dw && !from_x)) return std::nullopt;
  const Tensor dx = at::detail::empty_cuda(x.sizes(), x.options());
  const Tensor db = at::detail::empty_cuda({db_wanted ? n : 0}, w.options());
  gemm::GradientProblem problem;
  problem.m = static_cast<int>(y_rows.size(0));
  problem.n = static_cast<int>(n);
  problem.k = static_cast<int>(k);
  problem.grad = *from_g;
  problem.y = *from_y;
  problem.w = *from_w;
  problem.dx = dx.mutable_data_ptr();
  problem.dbias = db_wanted ? db.mutable_data_ptr() : nullptr;
  if (makes_dw) {
    const Tensor dw = at::detail::empty_cuda({n, k}, w.options());
    problem.x = *from_x;
    problem.dw = dw.mutable_data_ptr();
    if (!gemm::run_chosen<gemm::DenseGradients>(problem, *c, y)) return std::nullopt;
    return std::tuple(dx, dw, db);
  }
  const Tensor dz = at::detail::empty_cuda(y_rows.sizes(), y.options());
  problem.dz = {dz.mutable_data_ptr(), n};
  if (!gemm::run_chosen<gemm::DenseInputGradients>(problem, *c, y)) return std::nullopt;
  return std::tuple(dx, weight_gradient(dz, x_rows), db);
}

std::tuple<Tensor, Tensor, Tensor> dense_gradients_cuda(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                        const Tensor& w, std::array<bool, 3> output_mask) {
  detail::check_dense_gradients(grad, y, x, w);
  const c10::cuda::CUDAGuard guard(y.device());
  if (output_mask[0] && output_mask[1]) {
    if (auto all = fused_gradients(grad, y, x, w, output_mask[2])) return *std::move(all);
  }
  const auto [dx, dw, db] = detail::dense_gradients_in_parts(grad, y, x, w, output_mask);
  const Tensor none = at::detail::empty_cuda({0}, y.options());
  return {output_mask[0] ? dx : none, output_mask[1] ? dw : none, output_mask[2] ? db : none};
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("dense", dense_cuda);
  m.impl("_dense_backward", dense_backward_cuda);
  m.impl("_dense_gradients", dense_gradients_cuda);
}

}  // namespace
}  // namespace torchops::cuda
