#pragma once

#include <ATen/core/Tensor.h>

namespace torchops::detail {

/// A copy of `x` with identity gradient that no compiler pass can see through.
///
/// Saved by a traced in-place operator whose gradient needs the old value. Before torch 2.15, Inductor drops a plain
/// clone of a graph input that is mutated later, and the gradient would then read the new value.
at::Tensor saved_copy(const at::Tensor& x);

}  // namespace torchops::detail
