#pragma once

#include <ATen/core/Tensor.h>

namespace torchops::detail {

/// A copy of `x` with identity gradient that no compiler pass can see through.
///
/// A traced in-place operator whose gradient needs the old value saves this copy: Inductor drops a plain clone of a
/// graph input that is later mutated, and the gradient then reads the new value.
at::Tensor keep(const at::Tensor& x);

}  // namespace torchops::detail
