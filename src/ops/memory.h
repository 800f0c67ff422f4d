#pragma once

#include <ATen/core/Tensor.h>

// Which tensors share memory.
namespace torchops::detail {

enum class Overlap { kNo, kYes, kUnknown };

/// Whether two indices of a tensor with these sizes and strides are the same memory location. Exact, except for
/// kUnknown: three or more dimensions are interleaved, and the search has taken too many steps.
Overlap internal_overlap(at::IntArrayRef sizes, at::IntArrayRef strides);

/// The same for a tensor. If its sizes are symbolic, only expansion is detected.
Overlap internal_overlap(const at::Tensor& tensor);

/// What functorch's wrappers hold. Under vmap, that is all examples, which may be none and may overlap each other.
at::Tensor unwrapped(at::Tensor tensor);

/// Whether the address ranges of their elements meet. Without addresses, they do not.
bool may_overlap(const at::Tensor& written, const at::Tensor& read);

/// Whether writing `written` could change the values of `read`: they have the same storage, or two over the same memory
/// (two from_dlpack() of one array), and their address ranges meet.
bool may_alias(const at::Tensor& written, const at::Tensor& read);

}  // namespace torchops::detail
