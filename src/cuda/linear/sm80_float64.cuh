#pragma once

// From torch to the kernel of sm80/float64_kernel.cuh.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/base/device.h"
#include "cuda/base/per_device.h"
#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm80/float64_kernel.cuh"
#include "cuda/linear/sm80_arguments.cuh"
#include "cuda/passes/channel_transpose.cuh"
#include "ops/kernel_path.h"

namespace torchops::cuda::gemm {

/// Whether to use the kernel for a dtype: for float64, where tensor cores multiply it. kPortable is for what any GPU
/// can do.
inline bool wants_float64(at::ScalarType dtype) {
  const cudaDeviceProp& device = device_properties();
  const detail::KernelPath path = detail::kernel_path();
  return dtype == at::kDouble && (device.major == 8 || device.major == 9) && device.minor == 0 &&
         (path == detail::KernelPath::kAuto || path == detail::KernelPath::kFused) && !is_refused(Family::kSm80);
}

/// A gated linear unit whose output has channels first; t.d is not used. Returns false, with nothing done, if the
/// kernel cannot read the operands.
template <class F>
bool run_float64_to_channels(const RuleTensors& t, const ChannelPanel<double>& to) {
  auto p = full_arguments<double, GluRule<F>>(t);
  if (!p) return false;
  static PerDevice granted;
  int multiprocessors = 0;
  const auto kernel = glu_to_channels_float64_kernel<F>;
  begin_launch(Family::kSm80);
  check_launch(Family::kSm80, granted_multiprocessors(granted, kernel, kFloat64SharedBytes, multiprocessors));
  p->tiles_n = static_cast<int>(ceil_div(p->n, kFloat64Rows));
  const int workers =
      std::clamp(multiprocessors * kFloat64Ctas / p->tiles_n, 1, static_cast<int>(ceil_div(p->m, kFloat64Rows)));
  kernel<<<static_cast<unsigned>(workers * p->tiles_n), kFloat64Threads, kFloat64SharedBytes,
           at::cuda::getCurrentCUDAStream()>>>(
      *p, {to.channels.mutable_data_ptr<double>(), to.channels.stride(0), to.positions, to.factors});
  check_launch(Family::kSm80, cudaGetLastError());
  return true;
}

}  // namespace torchops::cuda::gemm
