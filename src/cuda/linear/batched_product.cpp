#include "cuda/linear/batched_product.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/bmm_cuda_dispatch.h>
#include <cublas_v2.h>

#include <optional>

#include "cuda/base/device.h"
#include "cuda/gemm/ways.h"
#include "cuda/linear/launch.h"
#include "cuda/linear/split_product.h"

// torch has loaded cuBLAS. The symbols are weak because to link to the same library, both the build and the process
// would have to find it.
#pragma weak cublasGemmStridedBatchedEx_64
#pragma weak cublasSetStream_v2
#pragma weak cublasSetWorkspace_v2

namespace torchops::cuda {
namespace {

using at::Tensor;

// A batch of matrices in memory, column by column, transposed or not.
struct Factor {
  const void* data;
  cublasOperation_t operation;
  int64_t stride, batch_stride;
};

// The transposed matrices of t.
std::optional<Factor> transposed_factor(const Tensor& t) {
  const bool has_rows = t.stride(2) == 1 && t.stride(1) >= t.size(2);
  const bool has_columns = t.stride(1) == 1 && t.stride(2) >= t.size(1);
  if (!has_rows && !has_columns) return std::nullopt;
  return Factor{t.const_data_ptr(), has_rows ? CUBLAS_OP_N : CUBLAS_OP_T, t.stride(has_rows ? 1 : 2), t.stride(0)};
}

// With a workspace, cuBLAS prefers kernels that hand out tiles at run time, and needs a memset before each of them for
// the counter. Without one, it runs the same kernels with a fixed order of tiles, and there is no memset. Returns
// false, with nothing done, if cuBLAS cannot compute it so, or product_way() is another one. torch's choice among its
// libraries plays no part here.
bool product_without_workspace(const Tensor& out, const Tensor& a, const Tensor& b) {
  const at::ScalarType dtype = out.scalar_type();
  if ((dtype != at::kBFloat16 && dtype != at::kHalf) || a.scalar_type() != dtype || b.scalar_type() != dtype ||
      out.numel() == 0 || a.size(2) == 0 || device_properties().major < 9 || cublasGemmStridedBatchedEx_64 == nullptr) {
    return false;
  }
  const auto of_a = transposed_factor(a), of_b = transposed_factor(b), to = transposed_factor(out);
  const int64_t batch = out.size(0), m = out.size(1), n = out.size(2), k = a.size(2);
  if (!of_a || !of_b || !to || to->operation != CUBLAS_OP_N) return false;
  if (gemm::product_way(gemm::case_of(m, n, k, dtype, batch), /*splits=*/false, /*automatic=*/true) !=
      gemm::ProductWay::kCublasWithoutWorkspace) {
    return false;
  }
  const cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  if (cublasSetWorkspace(handle, nullptr, 0) != CUBLAS_STATUS_SUCCESS) return false;
  const float one = 1.f, zero = 0.f;
  const cudaDataType type = dtype == at::kHalf ? CUDA_R_16F : CUDA_R_16BF;
  const cublasStatus_t status = cublasGemmStridedBatchedEx_64(
      handle, of_b->operation, of_a->operation, n, m, k, &one, of_b->data, type, of_b->stride, of_b->batch_stride,
      of_a->data, type, of_a->stride, of_a->batch_stride, &zero, out.mutable_data_ptr(), type, to->stride,
      to->batch_stride, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT_TENSOR_OP);
  // This resets the workspace to that of cuBLAS; torch sets its own whenever it takes the handle.
  TORCH_CUDABLAS_CHECK(cublasSetStream(handle, at::cuda::getCurrentCUDAStream()));
  return status == CUBLAS_STATUS_SUCCESS;
}

}  // namespace

Tensor& batched_product_out(Tensor& out, const Tensor& a, const Tensor& b) {
  const bool done = split_product(out, a, b) || product_without_workspace(out, a, b);
  return done ? out : at::cuda::bmm_out(out, a, b);
}

}  // namespace torchops::cuda
