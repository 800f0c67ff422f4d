#pragma once

#include <ATen/core/Tensor.h>

// Who shares memory with whom.
namespace torchops::detail {

enum class Overlap { kNo, kYes, kUnknown };

/// Whether two indices of a tensor of these sizes and strides are one memory location. Exact; kUnknown only where three
/// or more dimensions are interleaved and the search has taken too many steps.
Overlap internal_overlap(at::IntArrayRef sizes, at::IntArrayRef strides);

/// The same for a tensor. Where its sizes are symbolic, only an expanded one is found.
Overlap internal_overlap(const at::Tensor& tensor);

/// Whether writing `written` could change what `read` holds: they are of one storage, or of two over the same memory
/// (two from_dlpack() of one array) and the ranges of their addresses meet.
bool may_alias(const at::Tensor& written, const at::Tensor& read);

}  // namespace torchops::detail
