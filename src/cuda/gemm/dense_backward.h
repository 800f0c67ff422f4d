#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/gemm/dense.h"

// All gradients of dense in one pass, on Hopper, without torch headers.
namespace torchops::cuda::gemm {

/// grad and y (m x n), x (m x k) and w (n x k) have rows of contiguous elements, and pointers and strides (in elements)
/// between rows that are multiples of 16 bytes; n and k are multiples of 8. dx (m x k), dw (n x k) and db (n) are
/// contiguous and aligned to 16 bytes.
struct DenseBackwardProblem {
  const void *grad, *y, *x, *w;
  void *dx, *dw, *db;
  /// dense_backward_blocks(m, sm_count) x (n * k + n) floats.
  float* partial;
  int64_t grad_stride, y_stride, x_stride, w_stride;
  int m, n, k;
  int blocks;
};

/// The rows that a CTA takes at a time.
constexpr int kDenseBackwardRows = 64;

/// As many CTAs as run at once, or as have work. On them depends the order of additions, so it is the same for every
/// call with as many rows on the same kind of device.
inline int dense_backward_blocks(int m, int sm_count) {
  const int tiles = static_cast<int>((int64_t{m} + kDenseBackwardRows - 1) / kDenseBackwardRows);
  return tiles < sm_count ? tiles : sm_count;
}

/// With dz = grad * y * (1 - y), rounded to the type of the arguments:
///   dx = dz @ w,  dw = dz.T @ x,  db = dz summed over the rows before it is rounded.
/// Sums are in float32; the same arguments give the same bits.
/// n is at most most_n and k at most most_k. Returns cudaErrorNotSupported, with nothing launched, if the kernel does
/// not fit the current device or the problem.
template <DenseType type, int most_n, int most_k>
cudaError_t run_dense_backward(const DenseBackwardProblem& problem, cudaStream_t stream);

}  // namespace torchops::cuda::gemm
