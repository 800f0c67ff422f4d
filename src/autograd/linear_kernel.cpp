#include <ATen/ops/linear.h>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "ops/linear.h"

namespace torchops::autograd {
namespace {

// Where a gradient is needed, ATen's own.
struct LinearFunctional : FunctionalOp<LinearFunctional, detail::linear> {
  static void check(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
    detail::check_linear_layer(x, w, b);
  }
  static Tensor decomposed(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
    return at::linear(x, w, b);
  }
};

TORCH_LIBRARY_IMPL(myops, Autograd, m) { m.impl("_linear", LinearFunctional::autograd); }

TORCHOPS_AUTOCAST(m) { m.impl("_linear", autocast<CastTo::kLowerPrecision, detail::linear>); }

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("_linear", autocast<CastTo::kLowerPrecision, LinearFunctional::batched>);
}

}  // namespace
}  // namespace torchops::autograd
