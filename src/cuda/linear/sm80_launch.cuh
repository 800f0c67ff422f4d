#pragma once

#include <ATen/cuda/CUDAContext.h>

#include <limits>

#include "cuda/base/per_device.h"
#include "cuda/base/refusal.h"
#include "cuda/gemm/sm80/kernel.cuh"

namespace torchops::cuda::gemm {

/// Runs a kernel whose CTAs have a tile of p.m x p.n outputs each, in row-major order, for each of a batch; sets
/// p.tiles_n.
template <auto kernel, class Arguments, class... Others>
void launch_tiles(Arguments p, int tile_m, int tile_n, size_t shared_bytes, unsigned batch, const Others&... others) {
  static PerDevice granted;
  int multiprocessors = 0;
  begin_launch(Family::kSm80);
  check_launch(Family::kSm80, granted_multiprocessors(granted, kernel, shared_bytes, multiprocessors));
  p.tiles_n = static_cast<int>(ceil_div(p.n, tile_n));
  const int64_t tiles = ceil_div(p.m, tile_m) * p.tiles_n;
  TORCH_INTERNAL_ASSERT(tiles <= std::numeric_limits<int>::max());
  kernel<<<dim3(static_cast<unsigned>(tiles), batch), kSm80Threads, shared_bytes, at::cuda::getCurrentCUDAStream()>>>(
      p, others...);
  check_launch(Family::kSm80, cudaGetLastError());
}

}  // namespace torchops::cuda::gemm
