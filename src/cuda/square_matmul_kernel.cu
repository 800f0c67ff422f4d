#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>

#include "cuda/gemm/in_place.h"
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
  Tensor out_rows = detail::as_rows(out);
  at::cuda::mm_out(out_rows, detail::as_rows(a), transpose_b ? b.t() : b);
  return out;
}

#ifdef TORCHOPS_WITH_SM90A
using gemm::InPlaceProblem;
using gemm::InPlaceTiling;
using gemm::InPlaceType;

template <InPlaceType type, InPlaceTiling tiling, bool b_k_major>
bool launch_in_place(const InPlaceProblem& problem, const Tensor& a) {
  const int64_t count = gemm::in_place_counters<type, tiling, b_k_major>(problem);
  if (count < 0) return false;
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const Tensor counters = at::detail::empty_cuda({count}, a.options().dtype(at::kInt));
  if (count > 0) C10_CUDA_CHECK(cudaMemsetAsync(counters.mutable_data_ptr(), 0, counters.nbytes(), stream));
  const cudaError_t error =
      gemm::run_in_place<type, tiling, b_k_major>(problem, static_cast<unsigned*>(counters.mutable_data_ptr()), stream);
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    // This process has only a part of the device, and the occupancy query did not say so. Nothing was launched.
    cudaGetLastError();
    return false;
  }
  C10_CUDA_CHECK(error);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

// The fastest tiling on an H100, of those measured from n = 64 to 16384. With one tile for a row there is no barrier.
// Otherwise two small tiles in flight hide the wait at the barrier, until, in long products, the traffic of small tiles
// costs more than the wait. There the large ones are faster, if whole panels keep nine of ten clusters busy.
InPlaceTiling choose_tiling(int n) {
  if (n > 128 && n <= 192) return InPlaceTiling::k64x192;
  if (n > 128 && n <= 256) return InPlaceTiling::k64x256;
  const int small_tiles = (n + 127) / 128, large_tiles = (n + 255) / 256;
  if (n > 256 && n <= 1024 && small_tiles % 2 == 0) return InPlaceTiling::k128x128SharedA;
  const int clusters = at::cuda::getCurrentDeviceProperties()->multiProcessorCount / 2;
  return n >= 4096 && clusters % large_tiles * 10 < clusters ? InPlaceTiling::k128x256 : InPlaceTiling::k128x128;
}

template <InPlaceType type, bool b_k_major>
bool launch_in_place(const InPlaceProblem& problem, const Tensor& a) {
  switch (choose_tiling(problem.n)) {
    case InPlaceTiling::k64x192:
      return launch_in_place<type, InPlaceTiling::k64x192, b_k_major>(problem, a);
    case InPlaceTiling::k64x256:
      return launch_in_place<type, InPlaceTiling::k64x256, b_k_major>(problem, a);
    case InPlaceTiling::k128x128SharedA:
      return launch_in_place<type, InPlaceTiling::k128x128SharedA, b_k_major>(problem, a);
    case InPlaceTiling::k128x128:
      if (launch_in_place<type, InPlaceTiling::k128x128, b_k_major>(problem, a)) return true;
      // Too many tiles in a row to be resident; half as many may be.
      [[fallthrough]];
    default:
      return launch_in_place<type, InPlaceTiling::k128x256, b_k_major>(problem, a);
  }
}

bool aligned(const Tensor& t, int64_t stride) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && stride * t.element_size() % 16 == 0 &&
         stride * t.element_size() < int64_t{1} << 40;
}

// a = a @ b with the kernel that needs no second buffer; false, with nothing done, where it cannot run.
bool fused_(const Tensor& a, const Tensor& b) {
  const int64_t rows = a.size(0), n = a.size(1);
  const bool bfloat16 = a.scalar_type() == at::kBFloat16;
  if (!bfloat16 && a.scalar_type() != at::kHalf) return false;
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  constexpr int64_t most = std::numeric_limits<int>::max();
  if (device.major != 9 || device.minor != 0 || n % 8 != 0 || n > most || rows > most) return false;
  const int64_t a_stride = rows == 1 ? n : a.stride(0);
  const bool b_k_major = b.stride(0) == 1;
  const int64_t b_stride = b.stride(b_k_major ? 1 : 0);
  if (a.stride(1) != 1 || a_stride < n || b.stride(b_k_major ? 0 : 1) != 1 || b_stride < n || !aligned(a, a_stride) ||
      !aligned(b, b_stride)) {
    return false;
  }
  const InPlaceProblem problem{a.mutable_data_ptr(),   b.const_data_ptr(), a_stride, b_stride,
                               static_cast<int>(rows), static_cast<int>(n)};
  if (bfloat16) {
    return b_k_major ? launch_in_place<InPlaceType::kBFloat16, true>(problem, a)
                     : launch_in_place<InPlaceType::kBFloat16, false>(problem, a);
  }
  return b_k_major ? launch_in_place<InPlaceType::kFloat16, true>(problem, a)
                   : launch_in_place<InPlaceType::kFloat16, false>(problem, a);
}
#else
bool fused_(const Tensor&, const Tensor&) { return false; }
#endif

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
  const Tensor right = detail::may_alias(a, b) ? b.clone() : b;
  const Tensor factor = transpose_b ? right.t() : right;
  detail::for_each_matrix({a}, 1, [&](const detail::Operands& matrix) {
    if (!fused_(matrix[0], factor)) multiply_panels_(matrix[0], factor);
  });
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("square_matmul", square_matmul_cuda);
  m.impl("square_matmul_", square_matmul_cuda_);
}

}  // namespace
}  // namespace torchops::cuda
