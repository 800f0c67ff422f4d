#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace torchops::detail {

/// Which kernels dense() and its gradients take on CUDA: the fused ones where they are faster, wherever they can run,
/// or never.
enum class DensePath { kAuto, kFused, kCublas };

/// The path of this thread: what the operator _dense_path or a DensePathGuard has set, else what TORCHOPS_DENSE_PATH
/// says (auto, fused or cublas), else auto. Kernels of dense() ask here.
DensePath dense_path();

/// Only what has been set for this thread.
std::optional<DensePath> dense_path_of_thread();

std::string to_string(DensePath path);

/// Throws c10::ValueError for a name that is none.
DensePath parse_dense_path(const char* op, const std::string& name);

/// Sets this thread's path while it lives; to the process's, that of TORCHOPS_DENSE_PATH, where there is none to set.
class DensePathGuard {
 public:
  explicit DensePathGuard(std::optional<DensePath> path);
  ~DensePathGuard();
  DensePathGuard(const DensePathGuard&) = delete;
  DensePathGuard& operator=(const DensePathGuard&) = delete;

 private:
  std::optional<DensePath> former_;
};

/// dense() on a path of its own, whatever that of the thread is: what a graph holds, which runs anywhere at any time.
at::Tensor dense_on_path(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                         std::string_view path);

}  // namespace torchops::detail
