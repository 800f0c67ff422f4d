#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/clone.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/gemm/ways.h"
#include "cuda/linear/batched_product.h"
#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/products.h"
#include "ops/common.h"
#include "ops/kernel_path.h"
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
    product_out(out_rows, detail::as_rows(a), factor);
  } else {
    Tensor matrices = out.flatten(0, -3);
    batched_product_out(matrices, a.flatten(0, -3), factor.flatten(0, -3));
  }
  return out;
}

// a = a @ b by the kernel that needs no second buffer, for matrices or batches of them; nullopt if none can run.
struct FusedProduct {
  gemm::Problem problem;
  gemm::Case of_sizes;
  bool b_k_major;

  int64_t workspace_bytes() const {
    return b_k_major ? gemm::most_workspace_bytes<gemm::SquareMatmulT>(problem, of_sizes)
                     : gemm::most_workspace_bytes<gemm::SquareMatmul>(problem, of_sizes);
  }

  // Returns false, with nothing done, if it cannot run.
  bool run(const Tensor& a, const Tensor& workspace) const {
    return b_k_major ? gemm::run_chosen<gemm::SquareMatmulT>(problem, of_sizes, a, workspace)
                     : gemm::run_chosen<gemm::SquareMatmul>(problem, of_sizes, a, workspace);
  }
};

std::optional<FusedProduct> fused_product(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == at::kFloat || a.size(-1) % 8 != 0) return std::nullopt;  // there is no kernel for TF32
  const bool b_k_major = b.stride(-2) == 1;
  const auto rows = gemm::operand(a), factor = gemm::operand(b_k_major ? b.mT() : b);
  auto c = gemm::sm90_case(a.size(-2), a.size(-1), a.size(-1), a.scalar_type());
  if (!c || !rows || !factor) return std::nullopt;
  c->batch = a.dim() == 3 ? a.size(0) : 1;
  if (c->batch > std::numeric_limits<int>::max()) return std::nullopt;
  const bool automatic = detail::is_automatic(detail::kernel_path());
  if (automatic && gemm::copies_overwritten_rows(*c)) return std::nullopt;
  gemm::Problem problem;
  problem.m = static_cast<int>(c->m);
  problem.n = problem.k = static_cast<int>(c->n);
  problem.batch = static_cast<int>(c->batch);
  problem.a = problem.d = *rows;
  problem.b = *factor;
  return FusedProduct{problem, *c, b_k_major};
}

constexpr int64_t kPanelBytes = int64_t{16} << 20;

// Scratch for a panel of `a`: its copy and, if cuBLAS cannot write to `a` directly, the product. A panel has rows of a
// matrix or, if several matrices of a batch fit, those. At most 32 MiB, or two rows.
Tensor panel_scratch(const Tensor& a) {
  const int64_t row_bytes = a.size(-1) * static_cast<int64_t>(a.element_size());
  const int64_t rows = std::clamp(kPanelBytes / row_bytes, int64_t{1}, a.size(-2));
  const int64_t matrices = a.dim() == 3 ? std::min(kPanelBytes / (row_bytes * a.size(-2)), a.size(0)) : 1;
  at::DimVector sizes{detail::has_unit_stride(a) ? 1 : 2, rows, a.size(-1)};
  if (matrices > 1) sizes.insert(sizes.begin() + 1, matrices);
  return at::detail::empty_cuda(sizes, a.options());
}

// A panel is copied, and the product of the copy overwrites it.
void multiply_panels_(const Tensor& a, const Tensor& b, const Tensor& scratch) {
  const bool direct = scratch.size(0) == 1, whole_matrices = scratch.dim() == 4;
  if (a.dim() == 3 && !whole_matrices) {
    for (int64_t i = 0; i < a.size(0); ++i) multiply_panels_(a.select(0, i), b.select(0, i), scratch);
    return;
  }
  const int64_t step = scratch.size(1);
  for (int64_t begin = 0; begin < a.size(0); begin += step) {
    const int64_t count = std::min(step, a.size(0) - begin);
    const Tensor panel = a.narrow(0, begin, count), copy = scratch.select(0, 0).narrow(0, 0, count);
    copy.copy_(panel);
    Tensor product = direct ? panel : scratch.select(0, 1).narrow(0, 0, count);
    if (whole_matrices) {
      batched_product_out(product, copy, b.narrow(0, begin, count));
    } else {
      product_out(product, copy, b);
    }
    if (!direct) panel.copy_(product);
  }
}

// All scratch is allocated before anything is written, so that running out of memory can't stop it halfway.
void square_matmul_cuda_(Tensor& a, const Tensor& b, bool transpose_b) {
  check_square_matmul_(a, b);
  if (a.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(a.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool one_factor = b.dim() == 2, copied = detail::may_alias(a, b) || (one_factor && !detail::has_unit_stride(b));
  const Tensor right = copied ? b.clone(at::MemoryFormat::Contiguous) : b;
  const Tensor factor = transpose_b ? right.mT() : right;
  std::vector<std::pair<Tensor, Tensor>> products;
  Tensor packed;
  if (one_factor) {
    detail::for_each_matrix({a}, 1, [&](const detail::Operands& part) { products.emplace_back(part[0], factor); });
  } else {
    // Matrices with gaps are packed, as many at a time as fit into a panel.
    const bool gaps = !detail::has_unit_stride(factor);
    const int64_t matrix_bytes = b.size(-2) * b.size(-1) * static_cast<int64_t>(b.element_size());
    const int64_t most = std::max(kPanelBytes / matrix_bytes, int64_t{1});
    detail::for_each_matrix({a, factor}, 2, [&](const detail::Operands& part) {
      const int64_t count = part[0].size(0), step = gaps ? std::min(most, count) : count;
      for (int64_t begin = 0; begin < count; begin += step) {
        const auto matrices = [&](const Tensor& t) { return t.narrow(0, begin, std::min(step, count - begin)); };
        products.emplace_back(matrices(part[0]), matrices(part[1]));
      }
    });
    if (gaps) packed = at::detail::empty_cuda(products[0].second.sizes(), b.options());
  }
  const auto factor_of = [&](const Tensor& matrices) {
    return packed.defined() ? packed.narrow(0, 0, matrices.size(0)) : matrices;
  };
  // Several products run one after the other in the same scratch; all panels have one shape. A single one allocates
  // what it needs, before it writes.
  Tensor scratch, workspace;
  if (products.size() > 1) {
    int64_t bytes = 0;
    for (const auto& [rows, matrices] : products) {
      const auto fused = fused_product(rows, factor_of(matrices));
      if (fused) bytes = std::max(bytes, fused->workspace_bytes());
    }
    workspace = at::detail::empty_cuda({bytes}, a.options().dtype(at::kByte));
    scratch = panel_scratch(products[0].first);
  }
  for (const auto& [rows, matrices] : products) {
    const Tensor by = factor_of(matrices);
    if (packed.defined()) by.copy_(matrices);
    const auto fused = fused_product(rows, by);
    if (fused && fused->run(rows, workspace)) continue;
    if (!scratch.defined()) scratch = panel_scratch(rows);
    multiply_panels_(rows, by, scratch);
  }
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("square_matmul", square_matmul_cuda);
  m.impl("square_matmul_", square_matmul_cuda_);
}

}  // namespace
}  // namespace torchops::cuda
