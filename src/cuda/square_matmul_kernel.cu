#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/bmm_cuda_dispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/gemm/launch.h"
#include "cuda/gemm/operand.h"
#include "ops/common.h"
#include "ops/matrices.h"
#include "ops/square_matmul.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

Tensor square_matmul_cuda(const Tensor& a, const Tensor& b, bool transpose_b) {
  check_square_matmul(a, b);
  const c10::cuda::CUDAGuard guard(a.device());
  Tensor out = at::detail::empty_cuda(a.sizes(), a.options());
  if (out.numel() == 0) return out;
  const Tensor factor = transpose_b ? b.mT() : b;
  if (b.dim() == 2) {
    Tensor out_rows = detail::as_rows(out);
    at::cuda::mm_out(out_rows, detail::as_rows(a), factor);
  } else {
    Tensor matrices = out.flatten(0, -3);
    at::cuda::bmm_out(matrices, a.flatten(0, -3), factor.flatten(0, -3));
  }
  return out;
}

// a = a @ b with the kernel that needs no second buffer; false, with nothing done, where it cannot run.
bool fused_(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == at::kFloat || a.size(1) % 8 != 0) return false;  // there is no kernel for TF32
  const bool b_k_major = b.stride(0) == 1;
  const auto rows = gemm::operand(a), factor = gemm::operand(b_k_major ? b.t() : b);
  const auto c = gemm::sm90_case(a.size(0), a.size(1), a.size(1), a.scalar_type());
  if (!c || !rows || !factor) return false;
  gemm::Problem problem;
  problem.m = static_cast<int>(a.size(0));
  problem.n = problem.k = static_cast<int>(a.size(1));
  problem.a = problem.d = *rows;
  problem.b = *factor;
  return b_k_major ? gemm::run_chosen<gemm::SquareMatmulT>(problem, *c, a)
                   : gemm::run_chosen<gemm::SquareMatmul>(problem, *c, a);
}

// A panel of rows is copied, and the product of the copy goes to where the panel was. cuBLAS makes a copy of its own of
// an output whose rows and columns both have gaps, so that a panel takes half of the promised 32 MiB.
void multiply_panels_(const Tensor& a, const Tensor& b) {
  constexpr int64_t panel_bytes = int64_t{16} << 20;
  const int64_t row_bytes = a.size(1) * static_cast<int64_t>(a.element_size());
  const int64_t step = std::max(panel_bytes / row_bytes, int64_t{1});
  for (int64_t begin = 0; begin < a.size(0); begin += step) {
    Tensor panel = a.narrow(0, begin, std::min(step, a.size(0) - begin));
    at::cuda::mm_out(panel, panel.clone(at::MemoryFormat::Contiguous), b);
  }
}

void square_matmul_cuda_(Tensor& a, const Tensor& b, bool transpose_b) {
  check_square_matmul_(a, b);
  if (a.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(a.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor right = detail::read_first(a, b), factor = transpose_b ? right.mT() : right;
  const auto multiply = [](const Tensor& rows, const Tensor& by) {
    if (!fused_(rows, by)) multiply_panels_(rows, by);
  };
  if (b.dim() == 2) {
    detail::for_each_matrix({a}, 1, [&](const detail::Operands& matrix) { multiply(matrix[0], factor); });
    return;
  }
  detail::for_each_matrix({a, factor}, 2, [&](const detail::Operands& part) {
    for (int64_t i = 0; i < part[0].size(0); ++i) multiply(part[0].select(0, i), part[1].select(0, i));
  });
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("square_matmul", square_matmul_cuda);
  m.impl("square_matmul_", square_matmul_cuda_);
}

}  // namespace
}  // namespace torchops::cuda
