#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace torchops::detail {

/// When dense() and its gradients use the fused kernels on CUDA: where they are faster, wherever they can run, or
/// never; kPortable is kAuto without kernels for a single architecture.
enum class KernelPath { kAuto, kFused, kPortable, kCublas };

/// Whether measurements choose between a fused kernel and cuBLAS.
inline bool is_automatic(KernelPath path) { return path == KernelPath::kAuto || path == KernelPath::kPortable; }

/// The path of this thread: as set by the operator _kernel_path or a KernelPathGuard, else by the environment variable
/// TORCHOPS_KERNEL_PATH, else auto. The kernels of dense() call this.
KernelPath kernel_path();

/// The path set for this thread, if any.
std::optional<KernelPath> kernel_path_of_thread();

std::string to_string(KernelPath path);

/// Throws c10::ValueError if there is no path of this name.
KernelPath parse_kernel_path(const char* op, const std::string& name);

/// Sets this thread's path while it lives; nullopt resets it to the process's, that of TORCHOPS_KERNEL_PATH.
class KernelPathGuard {
 public:
  explicit KernelPathGuard(std::optional<KernelPath> path);
  ~KernelPathGuard();
  KernelPathGuard(const KernelPathGuard&) = delete;
  KernelPathGuard& operator=(const KernelPathGuard&) = delete;

 private:
  std::optional<KernelPath> former_;
};

/// dense() on a given path, whatever that of the thread is. For graphs, which run anywhere at any time.
at::Tensor dense_on_path(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                         std::string_view path);

}  // namespace torchops::detail
