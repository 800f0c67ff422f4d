#pragma once

namespace torchops::detail {

/// Which kernels dense() and its gradients take on CUDA: the fused ones where they are faster, wherever they can run,
/// or never.
enum class DensePath { kAuto, kFused, kCublas };

/// The path in force: that of TORCHOPS_DENSE_PATH (auto, fused or cublas) until the operator _dense_path sets another.
DensePath dense_path();

}  // namespace torchops::detail
