#include "cuda/gemm/launch.h"

#include <ATen/Context.h>

namespace torchops::cuda::gemm {

std::optional<Element> element_of(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return Element::kBFloat16;
  if (dtype == at::kHalf) return Element::kFloat16;
  if (dtype != at::kFloat) return std::nullopt;
  // Set by both of torch's interfaces. allowTF32CuBLAS() is the old one, and throws where the new one has been used.
  const auto precision = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::TF32 ? std::optional(Element::kTF32) : std::nullopt;
}

std::optional<int> sm90_multiprocessors() {
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  if (device.major != 9 || device.minor != 0) return std::nullopt;
  if (!has_sm90_kernels()) {
    TORCH_WARN_ONCE(
        "torchops was built without its kernels for this GPU (compute capability 9.0), so dense and square_matmul_ "
        "take "
        "slower ways. Rebuild it with 9.0 in TORCH_CUDA_ARCH_LIST; `python -m torchops` shows what it was built for.");
    return std::nullopt;
  }
  return device.multiProcessorCount;
}

}  // namespace torchops::cuda::gemm
