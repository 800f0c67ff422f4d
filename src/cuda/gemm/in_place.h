#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// Hopper's a = a @ b without a second buffer, without torch headers.
namespace torchops::cuda::gemm {

enum class InPlaceType { kFloat16, kBFloat16 };
/// The tilings, by rows x columns of the output tile. Of the first two, one tile spans a row, and b stays in shared
/// memory: n is at most 192 and 256. In the last one, two neighbours in a row share what they load of a.
enum class InPlaceTiling { k64x192, k64x256, k128x256, k128x128, k128x128SharedA };

/// a: rows x n, row_stride elements apart; b: n x n, its rows (or with b_k_major its columns) contiguous and b_stride
/// apart. Pointers and strides are multiples of 16 bytes.
struct InPlaceProblem {
  void* a;
  const void* b;
  int64_t a_stride, b_stride;
  int rows, n;
};

/// The counters that a problem needs, one for each panel of rows, to be zero at the launch; 0 if the panels need none.
/// -1 if the kernel cannot be proven to make progress on the current device: then it must not be launched.
template <InPlaceType type, InPlaceTiling tiling, bool b_k_major>
int64_t in_place_counters(const InPlaceProblem& problem);

template <InPlaceType type, InPlaceTiling tiling, bool b_k_major>
cudaError_t run_in_place(const InPlaceProblem& problem, unsigned* counters, cudaStream_t stream);

}  // namespace torchops::cuda::gemm
