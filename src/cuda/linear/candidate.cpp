#include <torch/library.h>

#include "cuda/gemm/plan.h"

// For `python -m benchmarks candidates`, which measures each candidate of a rule by itself.
namespace torchops::cuda::gemm {
namespace {

// Restricts this thread's plans to a candidate, by the numbers of its way and tiling; to none for way -1, which leaves
// cuBLAS; and no longer for -2. Returns both numbers of what computed its last rule, -1 for cuBLAS.
std::vector<int64_t> only_candidate(int64_t way, int64_t tiling) {
  Measured& of_thread = measured();
  of_thread.restricts = way >= -1;
  of_thread.only =
      way < 0 ? std::nullopt : std::optional(Candidate{static_cast<Way>(way), static_cast<uint8_t>(tiling)});
  if (!of_thread.taken) return {-1, 0};
  return {static_cast<int64_t>(of_thread.taken->way), of_thread.taken->tiling};
}

TORCH_LIBRARY_FRAGMENT(myops, m) { m.impl("_only_candidate", only_candidate); }

}  // namespace
}  // namespace torchops::cuda::gemm
