#pragma once

#include <ATen/core/Tensor.h>

#include "export.h"

namespace torchops {

/// a @ b, or a @ b.T with transpose_b, for a square b: a (..., n), b (n, n); or a (*batch, m, n), b (*batch, n, n) with
/// exactly these batch sizes, one matrix per batch element. All of one floating-point dtype and device.
/// Returns a new contiguous tensor of a's shape. Throws c10::Error when shapes, dtypes or devices do not fit.
TORCHOPS_API at::Tensor square_matmul(const at::Tensor& a, const at::Tensor& b, bool transpose_b = false);

/// Overwrites a with square_matmul(a, b, transpose_b) and returns a. There is no second buffer of a's size: a panel of
/// rows at a time is multiplied into bounded scratch and written back. b may overlap a; it is then read first.
/// Training copies the old a only if b needs a gradient. A call with wrong arguments leaves a untouched, and so does
/// one without memory: all scratch is allocated before the first panel is written, and for a batch of b, before each
/// matrix.
TORCHOPS_API at::Tensor& square_matmul_(at::Tensor& a, const at::Tensor& b, bool transpose_b = false);

/// The argument checks of square_matmul() and square_matmul_(), for kernels of other backends.
TORCHOPS_API void check_square_matmul(const at::Tensor& a, const at::Tensor& b);
TORCHOPS_API void check_square_matmul_(const at::Tensor& a, const at::Tensor& b);

}  // namespace torchops
