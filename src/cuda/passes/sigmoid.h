#pragma once

#include <ATen/core/Tensor.h>

namespace torchops::cuda {

/// y = sigmoid(x). Both hold their elements without gaps and in the same order; y may be x.
void sigmoid_without_gaps(const at::Tensor& x, const at::Tensor& y);

}  // namespace torchops::cuda
