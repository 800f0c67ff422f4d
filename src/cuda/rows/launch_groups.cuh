#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "cuda/base/vector.cuh"
#include "cuda/rows/groups.cuh"

namespace torchops::cuda {

/// The threads of each of `blocks` blocks that share a row of so many vectors, with up to `each` per thread: whole
/// warps.
inline int threads_of_row(int64_t vectors, int each, int blocks) {
  return static_cast<int>(ceil_div(ceil_div(vectors, int64_t{each} * blocks), kWarp) * kWarp);
}

/// Launches that many blocks, in clusters of `cluster`, on the current stream. A grid with more of them than its x
/// dimension allows continues along y, where the last ones may be too many.
template <class... Parameters, class... Arguments>
void launch_groups(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, int cluster,
                   const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  constexpr int64_t most_along_x = int64_t{1} << 30;
  const int64_t along_x = std::min(blocks, most_along_x);
  config.gridDim = dim3(static_cast<unsigned>(along_x), static_cast<unsigned>((blocks + along_x - 1) / along_x));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = c10::cuda::getCurrentCUDAStream();
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// Calls f<lanes, vectors of each>() for rows of so many vectors. Returns false, with nothing done, if a warp is too
/// short for them. Idle lanes cost most, and the more the operator reduces; and lanes should read 32 bytes side by
/// side.
template <int reductions, class F>
bool with_lanes(int64_t vectors, const F& f) {
  if (vectors <= 1 * 2) return f.template operator()<1, 2>(), true;
  if (vectors <= 2 * 2) return f.template operator()<2, 2>(), true;
  if constexpr (reductions > 2) {
    if (vectors <= 6) return f.template operator()<2, 4>(), true;
    if (vectors <= 4 * 2) return f.template operator()<4, 2>(), true;
    if (vectors <= 4 * 4) return f.template operator()<4, 4>(), true;
  } else {
    if (vectors <= 4 * 2) return f.template operator()<4, 2>(), true;
    if (vectors <= 8 * 2) return f.template operator()<8, 2>(), true;
  }
  if (vectors <= 8 * 4) return f.template operator()<8, 4>(), true;
  if (vectors <= 16 * 4) return f.template operator()<16, 4>(), true;
  if (vectors <= 32 * 4) return f.template operator()<32, 4>(), true;
  return false;
}

/// What with_lanes() counts, in vectors of `size` elements: if columns are no whole vectors, single elements before and
/// after them take about as long as two.
inline int64_t lane_vectors(int64_t columns, int size) { return columns / size + (columns % size == 0 ? 0 : 2); }

}  // namespace torchops::cuda
