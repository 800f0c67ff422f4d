#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <optional>

#include "cuda/gemm/choose.h"

// From torch to the kernels: what a device can run, and the launch of what was chosen.
namespace torchops::cuda::gemm {

/// The element type that stands for a dtype in GEMM kernels: for float32 only where torch lets products be computed in
/// TF32, for float64 none.
std::optional<Element> element_of(at::ScalarType dtype);

/// The multiprocessors of the current device if the kernels of sm90/ are for it, otherwise nothing. Warns once if they
/// would be, but this build lacks them. The calling thread has a context then.
std::optional<int> sm90_multiprocessors();

/// The case of products (m x k) @ (n x k).T for tensors of a dtype on the current device; nothing where the kernels of
/// sm90/ are not for that.
inline std::optional<Case> sm90_case(int64_t m, int64_t n, int64_t k, at::ScalarType dtype) {
  const auto sm_count = sm90_multiprocessors();
  const auto element = sm_count ? element_of(dtype) : std::nullopt;
  return element ? std::optional(Case{m, n, k, 1, *element, *sm_count}) : std::nullopt;
}

/// Whether this build has a kernel that the rules of the operation name for such a case.
template <class Operation>
bool has_kernel(const Case& c) {
  return std::ranges::any_of(rules<Operation>(), [&](const auto& rule) {
    return rule.suits(c) && find<Operation>(c.element, rule.tiling) != nullptr;
  });
}

/// The kernel that run_chosen() would run, and how much workspace it wants; null if there is none.
template <class Operation>
const Kernel<typename Operation::Problem>* chosen(const typename Operation::Problem& problem, const Case& c,
                                                  int64_t& workspace_bytes) {
  for (const auto& rule : rules<Operation>()) {
    const auto* const kernel = rule.suits(c) ? find<Operation>(c.element, rule.tiling) : nullptr;
    if (kernel != nullptr && kernel->prepare(problem, workspace_bytes).done()) return kernel;
  }
  return nullptr;
}

/// Runs the first kernel that the rules of the operation name, this build has and the problem fits, on the current
/// stream. `like` tells where its workspace belongs. False, with nothing done, if there is none.
template <class Operation>
bool run_chosen(typename Operation::Problem problem, const Case& c, const at::Tensor& like) {
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  for (const auto& rule : rules<Operation>()) {
    const auto* const kernel = rule.suits(c) ? find<Operation>(c.element, rule.tiling) : nullptr;
    if (kernel == nullptr) continue;
    int64_t workspace_bytes = 0;
    Status status = kernel->prepare(problem, workspace_bytes);
    if (status.done()) {
      at::Tensor workspace;
      if (workspace_bytes > 0) {
        workspace = at::detail::empty_cuda({workspace_bytes}, like.options().dtype(at::kByte));
        problem.workspace = workspace.mutable_data_ptr();
      }
      status = kernel->run(problem, stream);
    }
    if (status.kind == Status::kNotForMe) continue;
    C10_CUDA_CHECK(status.error);
    return true;
  }
  return false;
}

}  // namespace torchops::cuda::gemm
