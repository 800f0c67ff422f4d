#include "cuda/base/refusal.h"

#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace torchops::cuda {
namespace {

struct State {
  const char *name, *needs;
  std::atomic<bool> refused = false, warned = false;
};

State& state(Family family) {
  static State sm90{"sm90", "compute capability 9.0"}, sm80{"sm80", "compute capability 8.0 and above"};
  return family == Family::kSm90 ? sm90 : sm80;
}

// Errors that a call returns without having started anything. Those of kernels that ran, and of the memory, are not
// among them.
bool means_refusal(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidClusterSize:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorNotSupported:
    case cudaErrorSharedObjectInitFailed:
    case cudaErrorUnsupportedPtxVersion:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool is_refused(Family family) { return state(family).refused.load(std::memory_order_relaxed); }

void check_launch(Family family, cudaError_t error) {
  if (error == cudaSuccess) return;
  if (!means_refusal(error)) {
    C10_CUDA_CHECK(error);
    return;
  }
  cudaGetLastError();  // or the next check of a launch would find it
  State& of_family = state(family);
  of_family.refused = true;
  if (!of_family.warned.exchange(true)) {
    TORCH_WARN(
        "torchops: this GPU or its driver refuses the kernels for ", of_family.needs, " (", cudaGetErrorString(error),
        "), so slower ones run in this process. Please report it, with what `python -m torchops --check` prints.");
  }
  throw Refused();
}

void begin_launch(Family family) {
  C10_CUDA_CHECK(cudaGetLastError());
  static const std::string_view named = [] {
    const char* const names = std::getenv("TORCHOPS_PRETEND_REFUSED");
    return std::string_view(names == nullptr ? "" : names);
  }();
  if (named.find(state(family).name) != std::string_view::npos) check_launch(family, cudaErrorNoKernelImageForDevice);
}

}  // namespace torchops::cuda
