#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "cuda/base/device.h"
#include "cuda/base/refusal.h"
#include "cuda/gemm/plan.h"

// From torch to the kernels: what a device can run, and launching the chosen kernel.
namespace torchops::cuda::gemm {

/// The element type of a dtype in GEMM kernels; for float32 only if torch allows TF32 in products, for float64 none.
std::optional<Element> element_of(at::ScalarType dtype);

/// The case of products on the current device, by whatever computes them. Other elements than those of kernels count as
/// TF32.
inline Case case_of(int64_t m, int64_t n, int64_t k, at::ScalarType dtype, int64_t batch = 1) {
  const int sm_count = device_properties().multiProcessorCount;
  return {m, n, k, batch, element_of(dtype).value_or(Element::kTF32), sm_count, bytes_per_us()};
}

/// The case of products (m x k) @ (n x k).T for tensors of a dtype on the current device; nullopt if the kernels of
/// sm90/ don't support it, or the thread's KernelPath doesn't allow them. Warns once if they would, but this build
/// lacks them. Afterwards, the calling thread has a CUDA context.
std::optional<Case> sm90_case(int64_t m, int64_t n, int64_t k, at::ScalarType dtype);

/// The same for products of float32 numbers that keep their digits, and sm90/products/split_float32.cuh.
std::optional<Case> split_case(int64_t m, int64_t n, int64_t k, at::ScalarType dtype);

/// The same for linear/sm80.cuh.
inline std::optional<Case> sm80_case(int64_t m, int64_t n, int64_t k, at::ScalarType dtype) {
  const cudaDeviceProp& device = device_properties();
  if (device.major < 8 || is_refused(Family::kSm80) || (dtype != at::kBFloat16 && dtype != at::kHalf))
    return std::nullopt;
  return case_of(m, n, k, dtype);
}

/// The arguments of kernels for gradients of a layer, all matrices, as far as gate() and glu() share them, and their
/// case; nullopt if none can run. Whether one reads a float32 x is up to the caller.
using GradientCall = std::optional<std::pair<GradientProblem, Case>>;
GradientCall gradient_call(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w,
                           const std::optional<at::Tensor>& b);

/// kernel.prepare(). Throws as check_launch() does.
template <class Problem>
Status prepared(const Kernel<Problem>& kernel, const Problem& problem, int64_t& workspace_bytes) {
  const Status status = kernel.prepare(problem, workspace_bytes);
  check_launch(Family::kSm90, status.error);
  return status;
}

/// kernel.run() on the current stream, of a problem that is prepared. False, with nothing done, if it turns out not to
/// support it. Throws as check_launch() does.
template <class Problem>
bool launch(const Kernel<Problem>& kernel, const Problem& problem) {
  begin_launch(Family::kSm90);
  const Status status = kernel.run(problem, at::cuda::getCurrentCUDAStream());
  check_launch(Family::kSm90, status.error);
  return status.done();
}

/// The kernel that run_chosen() would run, and the workspace that it needs; null if there is none.
template <class Operation>
const Kernel<typename Operation::Problem>* chosen(const typename Operation::Problem& problem, const Case& c,
                                                  int64_t& workspace_bytes) {
  const Kernel<typename Operation::Problem>* found = nullptr;
  const bool any = attempt(Family::kSm90, [&] {
    return any_kernel<Operation>(c, [&](const auto& kernel) {
      found = &kernel;
      return prepared(kernel, problem, workspace_bytes).done();
    });
  });
  return any ? found : nullptr;
}

/// The most workspace that any of the kernels needs among which run_chosen() chooses.
template <class Operation>
int64_t most_workspace_bytes(const typename Operation::Problem& problem, const Case& c) {
  int64_t most = 0;
  attempt(Family::kSm90, [&] {
    return any_kernel<Operation>(c, [&](const auto& kernel) {
      int64_t bytes = 0;
      if (prepared(kernel, problem, bytes).done()) most = std::max(most, bytes);
      return false;
    });
  });
  return most;
}

/// Runs a kernel on the current stream. Its workspace is `workspace`, or allocated on the device of `like` if that is
/// undefined or too small. Returns false, with nothing done, if it doesn't support the problem.
template <class Problem>
bool run_kernel(const Kernel<Problem>& kernel, Problem problem, const at::Tensor& like, at::Tensor workspace = {}) {
  int64_t workspace_bytes = 0;
  if (!prepared(kernel, problem, workspace_bytes).done()) return false;
  if (workspace_bytes > 0) {
    if (!workspace.defined() || workspace.numel() < workspace_bytes)
      workspace = at::detail::empty_cuda({workspace_bytes}, like.options().dtype(at::kByte));
    problem.workspace = workspace.mutable_data_ptr();
  }
  return launch(kernel, problem);
}

/// Runs the first kernel in the operation's rules that this build has and that supports the problem, as run_kernel()
/// does. Returns false, with nothing done, if there is none, or if its launch is refused.
template <class Operation>
bool run_chosen(const typename Operation::Problem& problem, const Case& c, const at::Tensor& like,
                const at::Tensor& workspace = {}) {
  return attempt(Family::kSm90, [&] {
    return any_kernel<Operation>(c, [&](const auto& kernel) { return run_kernel(kernel, problem, like, workspace); });
  });
}

/// The same for the kernel of a candidate.
template <class Operation>
bool run_candidate(const Candidate& candidate, const typename Operation::Problem& problem, const Case& c,
                   const at::Tensor& like) {
  const auto* const kernel = find<Operation>(c.element, candidate.as<typename Operation::Tiling>());
  return kernel != nullptr && attempt(Family::kSm90, [&] { return run_kernel(*kernel, problem, like); });
}

}  // namespace torchops::cuda::gemm
