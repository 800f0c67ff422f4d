#pragma once

#include <ATen/core/Tensor.h>

namespace torchops::detail {

/// Runs f, which overwrites `self` piece by piece and allocates in between. If f throws, `self` is partly overwritten,
/// and the version counter is moved so that autograd knows.
template <class F>
void overwriting(const at::Tensor& self, const F& f) {
  try {
    f();
  } catch (...) {
    if (!self.is_inference()) self.unsafeGetTensorImpl()->bump_version();
    throw;
  }
}

}  // namespace torchops::detail
