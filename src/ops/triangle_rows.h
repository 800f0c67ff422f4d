#pragma once

#include "ops/triangle_multiplicative_update.h"

// Private operators for a rank that holds some rows of a pair tensor: the steps of a triangle update before and after
// its product. For an incoming update, the first one is given rows of the transpose of x. They return false, with
// nothing done, if there are no kernels for these arguments: other kernels than those for compute capability 9.0 need
// whole matrices. What that depends on is the device, dense_path(), and the dtypes and sizes, which ranks share; but
// also whether a, b, o or `out` are aligned to 16 bytes, with such strides.
namespace torchops::detail {

/// Writes these rows of a and b, channels first, from x (rows, N, c) and the mask (rows, N): a, times `scale`, and b
/// are (d, rows, padded_size(N)), with zeros after N, and may have different strides of channels.
bool triangle_rows_in(const at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                      double scale, double eps, at::Tensor& a, at::Tensor& b);

/// Writes to `out` (rows, N, c), which may be x, the update of x from these rows of the product, (d, rows, N); plus x
/// if `adds`.
bool triangle_rows_out(const at::Tensor& o, const at::Tensor& x, const TriangleParameterList& parameters, double eps,
                       double eps_out, at::Tensor& out, bool adds);

/// The argument checks of these operators, for every backend; they return the arguments as one struct.
TriangleUpdate checked_triangle_rows_in(const at::Tensor& x, const OptionalTensor& mask,
                                        const TriangleParameterList& parameters, double eps, const at::Tensor& a,
                                        const at::Tensor& b);
TriangleUpdate checked_triangle_rows_out(const at::Tensor& o, const at::Tensor& x,
                                         const TriangleParameterList& parameters, double eps, const at::Tensor& out);

}  // namespace torchops::detail
