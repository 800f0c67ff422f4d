#include "cuda/linear/launch.h"

#include <ATen/Context.h>
#include <cudaTypedefs.h>

#include "cuda/base/device.h"
#include "cuda/gemm/driver.h"
#include "cuda/linear/operand.h"
#include "ops/kernel_path.h"

namespace torchops::cuda::gemm {
namespace {

// The driver encodes TMA descriptors only on a thread that has a context. The runtime binds one at the first launch,
// but that launch may be ours: an autograd thread whose memory comes from the caching allocator has called nothing
// before.
void bind_context() {
  static DriverFunction<PFN_cuCtxGetCurrent_v4000> known("cuCtxGetCurrent", 4000);
  PFN_cuCtxGetCurrent_v4000 get_current = nullptr;
  C10_CUDA_CHECK(known.get(get_current));
  TORCH_CHECK(get_current != nullptr, "the CUDA driver has no cuCtxGetCurrent");
  CUcontext context = nullptr;
  if (get_current(&context) == CUDA_SUCCESS && context != nullptr) return;
  int device = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaSetDevice(device));
}

// Whether the kernels of sm90/ are for the current device and the thread's KernelPath allows them. Warns once if they
// are, but this build lacks them. Afterwards, the calling thread has a CUDA context.
bool runs_sm90() {
  const cudaDeviceProp& device = device_properties();
  if (device.major != 9 || device.minor != 0 || detail::kernel_path() == detail::KernelPath::kPortable ||
      is_refused(Family::kSm90)) {
    return false;
  }
  if (!has_sm90_kernels()) {
    TORCH_WARN_ONCE(
        "torchops was built without its kernels for this GPU (compute capability 9.0), so its products take slower "
        "ways. Rebuild it with 9.0 in TORCH_CUDA_ARCH_LIST; `python -m torchops` shows what it was built for.");
    return false;
  }
  bind_context();
  return true;
}

}  // namespace

std::optional<Element> element_of(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return Element::kBFloat16;
  if (dtype == at::kHalf) return Element::kFloat16;
  if (dtype == at::kFloat8_e4m3fn) return Element::kFloat8;
  if (dtype != at::kFloat) return std::nullopt;
  // Both of torch's interfaces set this. allowTF32CuBLAS() is the old one, which throws if the new one has been used.
  const auto precision = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::TF32 ? std::optional(Element::kTF32) : std::nullopt;
}

std::optional<Case> sm90_case(int64_t m, int64_t n, int64_t k, at::ScalarType dtype) {
  const auto element = element_of(dtype);
  return element && runs_sm90() ? std::optional(case_of(m, n, k, dtype)) : std::nullopt;
}

std::optional<Case> split_case(int64_t m, int64_t n, int64_t k, at::ScalarType dtype) {
  if (dtype != at::kFloat || element_of(dtype) || k > kMostSplitColumns || !runs_sm90()) return std::nullopt;
  Case c = case_of(m, n, k, dtype);
  c.element = Element::kFloat32;
  return c;
}

GradientCall gradient_call(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w,
                           const std::optional<at::Tensor>& b) {
  if (detail::kernel_path() == detail::KernelPath::kCublas || w.size(0) % 8 != 0 || w.size(1) == 0) return std::nullopt;
  const auto from_grad = operand(grad), from_x = operand(x), from_w = operand(w);
  const auto c = sm90_case(x.size(0), w.size(0), w.size(1), w.scalar_type());
  if (!from_grad || !from_x || !from_w || !c) return std::nullopt;
  GradientProblem problem;
  problem.m = static_cast<int>(c->m);
  problem.n = static_cast<int>(c->n);
  problem.k = static_cast<int>(c->k);
  problem.grad = *from_grad;
  problem.x = *from_x;
  problem.w = *from_w;
  problem.bias = b ? b->const_data_ptr() : nullptr;
  problem.x_is_float32 = x.scalar_type() != w.scalar_type();
  return std::pair(problem, *c);
}

}  // namespace torchops::cuda::gemm
