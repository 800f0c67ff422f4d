#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchops::cuda {

/// out = a @ b in float32 by split products (gemm/split_tf32.cuh), or out += a @ b with `accumulate`. These are
/// matrices, or batches of as many; either dimension of a and b may be contiguous. Returns false, with nothing done, if
/// torch's settings or those of kernel_path() or the device want another way, if it cannot read or write the tensors,
/// or if product_way() is another one.
bool split_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate = false);

/// out = x @ w.T + b for matrices, by sm90/products/split_float32.cuh. Returns false, with nothing done, in the same
/// cases.
bool split_linear(const at::Tensor& out, const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

}  // namespace torchops::cuda
