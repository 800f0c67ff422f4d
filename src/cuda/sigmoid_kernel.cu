#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid_cuda_dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>

#include "cuda/base/activation.cuh"
#include "cuda/base/vector.cuh"
#include "cuda/passes/sigmoid.h"
#include "ops/sigmoid.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

constexpr int kThreads = 256;
// Vectors that a thread has in flight. Fewer hide less of the latency of memory, and more are slower.
constexpr int kUnroll = 2;

template <class T, int N>
__device__ inline Packed<T, N> sigmoid_of_each(const Packed<T, N>& x) {
  Accumulate<T> values[N];
  unpack(x, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = activate<Sigmoid, T>(values[i]);
  return pack<T, N>(values);
}

// y[i] = sigmoid(x[i]) in vectors of N elements, except for `head` elements before them and the rest after them,
// together fewer than 2 N. y may be x.
template <class T, int N>
__global__ __launch_bounds__(kThreads) void sigmoid_kernel(const T* x, T* y, int64_t elements, int head) {
  const int64_t vectors = (elements - head) / N;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  const T* const from = x + head;
  T* const to = y + head;
  Packed<T, N> packed[kUnroll];
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    if (const int64_t i = first + k * kThreads; i < vectors) packed[k] = load<T, N>(from + i * N);
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    if (const int64_t i = first + k * kThreads; i < vectors) store(to + i * N, sigmoid_of_each(packed[k]));
  }
  if (blockIdx.x == 0 && threadIdx.x < elements - vectors * N) {
    const int64_t i = static_cast<int>(threadIdx.x) < head ? threadIdx.x : threadIdx.x + vectors * N;
    y[i] = static_cast<T>(activate<Sigmoid, T>(static_cast<Accumulate<T>>(x[i])));
  }
}

template <class T, int N>
void launch(const T* x, T* y, int64_t elements, int head) {
  const int64_t blocks = std::max(ceil_div((elements - head) / N, kThreads * kUnroll), int64_t{1});
  sigmoid_kernel<T, N>
      <<<static_cast<unsigned>(blocks), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(x, y, elements, head);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void sigmoid_without_gaps(const Tensor& x, const Tensor& y) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "sigmoid", [&] {
    const auto* const from = x.const_data_ptr<scalar_t>();
    auto* const to = y.mutable_data_ptr<scalar_t>();
    const auto misaligned = [](const void* p) {
      return static_cast<int>(reinterpret_cast<uintptr_t>(p) % kVectorBytes / sizeof(scalar_t));
    };
    constexpr int kSize = kVectorSize<scalar_t>;
    const int64_t elements = x.numel();
    if (misaligned(from) == misaligned(to)) {
      const int head = static_cast<int>(std::min<int64_t>((kSize - misaligned(from)) % kSize, elements));
      launch<scalar_t, kSize>(from, to, elements, head);
    } else {
      launch<scalar_t, 1>(from, to, elements, 0);
    }
  });
}

namespace {

Tensor sigmoid_cuda(const Tensor& x) {
  check_sigmoid(x);
  const c10::cuda::CUDAGuard on_device(x.device());
  Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() == 0) return y;
  if (x.is_contiguous()) {
    sigmoid_without_gaps(x, y);
  } else {
    at::cuda::sigmoid_out(y, x);
  }
  return y;
}

void sigmoid_cuda_(Tensor& x) {
  check_sigmoid_(x);
  const c10::cuda::CUDAGuard on_device(x.device());
  if (x.numel() == 0) return;
  if (x.is_non_overlapping_and_dense()) {
    sigmoid_without_gaps(x, x);
  } else {
    at::cuda::sigmoid_(x);
  }
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("sigmoid", sigmoid_cuda);
  m.impl("sigmoid_", sigmoid_cuda_);
}

}  // namespace
}  // namespace torchops::cuda
