#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// The fused y = sigmoid(x @ w.T + bias) of Hopper, without torch headers.
namespace torchops::cuda::gemm {

enum class DenseType { kFloat16, kBFloat16, kTF32 };

/// Pointers, and strides (in elements) between rows, are multiples of 16 bytes; elements of a row are contiguous.
/// y has contiguous rows and no gaps between them. bias may be null and has no alignment.
struct DenseProblem {
  const void* x;
  const void* w;
  const void* bias;
  void* y;
  int64_t x_stride, w_stride;
  int m, n, k;
};

/// The tilings, by rows x columns of the output tile. In kSharedX two neighbours in a row share what they load of x,
/// elsewhere two in a column what they load of w. In kResidentW w stays in shared memory: k is at most 256. TF32 has
/// neither of those two.
enum class DenseTiling { k128x256, k128x128, k64x128, k128x64, k128x128SharedX, k128x128ResidentW };

/// cudaErrorNotSupported, with nothing launched, if the kernel does not fit the current device or the problem.
template <DenseType type, DenseTiling tiling>
cudaError_t run_dense(const DenseProblem& problem, cudaStream_t stream);

}  // namespace torchops::cuda::gemm
