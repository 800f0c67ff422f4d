#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace torchops::detail {

/// When dense() and its gradients use the fused kernels on CUDA: where they are faster, wherever they can run, or
/// never; kPortable is kAuto without kernels for a single architecture.
enum class DensePath { kAuto, kFused, kPortable, kCublas };

/// Whether measurements choose between a fused kernel and cuBLAS.
inline bool is_automatic(DensePath path) { return path == DensePath::kAuto || path == DensePath::kPortable; }

/// The path of this thread: as set by the operator _dense_path or a DensePathGuard, else by the environment variable
/// TORCHOPS_DENSE_PATH, else auto. The kernels of dense() call this.
DensePath dense_path();

/// The path set for this thread, if any.
std::optional<DensePath> dense_path_of_thread();

std::string to_string(DensePath path);

/// Throws c10::ValueError if there is no path of this name.
DensePath parse_dense_path(const char* op, const std::string& name);

/// Sets this thread's path while it lives; nullopt resets it to the process's, that of TORCHOPS_DENSE_PATH.
class DensePathGuard {
 public:
  explicit DensePathGuard(std::optional<DensePath> path);
  ~DensePathGuard();
  DensePathGuard(const DensePathGuard&) = delete;
  DensePathGuard& operator=(const DensePathGuard&) = delete;

 private:
  std::optional<DensePath> former_;
};

/// dense() on a given path, whatever that of the thread is. For graphs, which run anywhere at any time.
at::Tensor dense_on_path(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                         std::string_view path);

}  // namespace torchops::detail
