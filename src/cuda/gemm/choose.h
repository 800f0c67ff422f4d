#pragma once

#include <cstddef>
#include <span>

#include "cuda/gemm/spec.h"

// Which kernel for which problem. Host code without torch or CUTLASS; what it knows was measured.
namespace torchops::cuda::gemm {

/// What the choice depends on: the problem, its element type, and how many multiprocessors there are.
struct Case {
  int64_t m, n, k, batch;
  Element element;
  int sm_count;

  int64_t columns(int tile_n) const { return (n + tile_n - 1) / tile_n; }
  int64_t tiles(int tile_m, int tile_n) const { return batch * ((m + tile_m - 1) / tile_m) * columns(tile_n); }
};

/// `tiling` for the cases that it suits. Rules are tried in order; one whose kernel this build lacks, or whose kernel
/// does not take the problem, is passed over.
template <class Tiling>
struct Rule {
  bool (*suits)(const Case&);
  Tiling tiling;
};

/// The rules of an operation on compute capability 9.0.
template <class Operation>
std::span<const Rule<typename Operation::Tiling>> rules();

/// Whether cuBLAS is faster for dense than any of these kernels.
bool prefers_cublas(const Case& c);

/// Whether two products by cuBLAS and a pass over both are faster than WideGluSigmoid and WideGluSilu.
bool prefers_cublas_for_glu(const Case& c);

}  // namespace torchops::cuda::gemm
