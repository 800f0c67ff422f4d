#pragma once

#include <ATen/core/Tensor.h>

namespace torchops::detail {

/// Runs f, which overwrites `self` piece by piece and allocates in between. If f throws, `self` is partly overwritten,
/// and the version counter is moved so that autograd knows. A lazy clone is copied first, which may not happen in the
/// parallel regions of f.
template <class F>
void overwriting(const at::Tensor& self, const F& f) {
  self.mutable_data_ptr();
  try {
    f();
  } catch (...) {
    if (!self.is_inference()) self.unsafeGetTensorImpl()->bump_version();
    throw;
  }
}

}  // namespace torchops::detail
