#pragma once

#include <ATen/core/Tensor.h>

#include "export.h"

namespace torchops {

/// exp(x) / sum(exp(x)) along `dim`, shifted by the maximum so that no exponential overflows.
/// x: any shape, floating-point; dim in [-x.dim(), x.dim() - 1] (a 0-dimensional x counts as one of one element).
/// Returns a new contiguous tensor. Throws c10::Error for other dtypes, c10::IndexError for another dim.
TORCHOPS_API at::Tensor softmax(const at::Tensor& x, int64_t dim = -1);

/// Overwrites x with softmax(x, dim) and returns x. Training keeps no second tensor: the gradient reads the result.
/// A failed call (also for an x whose elements overlap) leaves x untouched.
TORCHOPS_API at::Tensor& softmax_(at::Tensor& x, int64_t dim = -1);

/// The argument checks of softmax() and softmax_(), for kernels of other backends.
TORCHOPS_API void check_softmax(const at::Tensor& x, int64_t dim);
TORCHOPS_API void check_softmax_(const at::Tensor& x, int64_t dim);

namespace detail {

/// The gradient of softmax() of which y is the result: y * (grad - sum(grad * y)), a new contiguous tensor.
at::Tensor softmax_backward(const at::Tensor& grad, const at::Tensor& y, int64_t dim);

/// Its argument checks, for every backend.
void check_softmax_backward(const at::Tensor& grad, const at::Tensor& y, int64_t dim);

}  // namespace detail
}  // namespace torchops
