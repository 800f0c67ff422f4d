#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace torchops::autograd {
namespace {

// As ATen does for _scaled_mm: the call accepts tensors that require grad, and backward raises.
TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  for (const char* const op : {"dense.scaled", "gate.scaled", "glu.scaled"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace
}  // namespace torchops::autograd
