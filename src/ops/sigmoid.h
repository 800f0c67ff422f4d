#pragma once

#include <ATen/core/Tensor.h>

#include "export.h"

namespace torchops {

/// The logistic function 1 / (1 + exp(-x)) of every element. Returns a new contiguous tensor.
/// x: any shape, floating-point. Throws c10::Error for other dtypes.
TORCHOPS_API at::Tensor sigmoid(const at::Tensor& x);

/// Overwrites x with sigmoid(x) and returns x. Training saves no second tensor: backward needs only the result.
/// Throws c10::Error, with x untouched, for other dtypes and for an x whose elements overlap.
TORCHOPS_API at::Tensor& sigmoid_(at::Tensor& x);

/// The argument checks of sigmoid() and sigmoid_(), for kernels of other backends.
TORCHOPS_API void check_sigmoid(const at::Tensor& x);
TORCHOPS_API void check_sigmoid_(const at::Tensor& x);

}  // namespace torchops
