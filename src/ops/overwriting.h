#pragma once

#include <ATen/core/Tensor.h>

namespace torchops::detail {

/// Runs f, which overwrites `self` by and by and takes memory meanwhile. If it throws, a part is overwritten: the
/// version counter says so to autograd.
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
