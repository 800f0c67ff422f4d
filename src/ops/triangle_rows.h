#pragma once

#include "ops/triangle_multiplicative_update.h"

// Private operators for a rank that holds some rows of a pair tensor: the steps of a triangle update before and after
// its product, and of its backward pass after and before the products there. The products of an incoming update are
// sums over rows, or those of an outgoing one if the input steps are given rows of the transpose of x. They return
// false, with nothing done, if there are no kernels for these arguments: other kernels than those for compute
// capability 9.0 need whole matrices. What that depends on is the device, kernel_path(), and the dtypes and sizes,
// which ranks share; but also whether all channels, `out` and dz are aligned to 16 bytes, with such strides, and
// moments to 8, and whether sums are contiguous.
namespace torchops::detail {

/// Writes these rows of a and b, channels first, from x (rows, N, c) and the mask (rows, N): a, times `scale`, and b
/// are (d, rows, padded_size(N)), with zeros after N, and may have different strides of channels.
bool triangle_rows_in(const at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                      double scale, double eps, at::Tensor& a, at::Tensor& b);

/// Writes to `out` (rows, N, c), which may be x, the update of x from these rows of the product, (d, rows, N); plus x
/// if `add_residual`.
bool triangle_rows_out(const at::Tensor& o, const at::Tensor& x, const TriangleParameterList& parameters, double eps,
                       double eps_out, at::Tensor& out, bool add_residual);

/// From the cotangent of the update (rows, N, c), writes that of o, (d, rows, padded_size(N)), with zeros after N; the
/// gate's part of that of layer_norm(x), before its weight, to dz (rows, N, c); for triangle_rows_in_backward(), the
/// moments of the layer norm of x, (rows, N, 2) in float32; and the first two layers' part of the sums (size,) in
/// float32, of which triangle_sums_begin() knows the size.
bool triangle_rows_out_backward(const at::Tensor& grad, const at::Tensor& o, const at::Tensor& x,
                                const TriangleParameterList& parameters, double eps, double eps_out, at::Tensor& d_o,
                                at::Tensor& dz, at::Tensor& moments, at::Tensor& sums);

/// From the cotangents of a and b, (d, rows, at least N), of which those after N may be anything, and dz so far: dx,
/// plus the residual if there is one, which overwrites dz; and the other layers' part of the sums.
bool triangle_rows_in_backward(const at::Tensor& da, const at::Tensor& db, const at::Tensor& x,
                               const OptionalTensor& mask, const TriangleParameterList& parameters, double scale,
                               double eps, const at::Tensor& moments, at::Tensor& dz, const OptionalTensor& residual,
                               at::Tensor& sums);

/// The gradients of the parameters from the sums (batch, size), over the batch: where `output_mask` asks for them,
/// packed as the parameters are, and empty tensors elsewhere. Raises if there are no kernels.
std::vector<at::Tensor> triangle_rows_parameter_gradients(const at::Tensor& sums,
                                                          const TriangleParameterList& parameters,
                                                          TriangleParameterOutputMask output_mask);

/// The argument checks of these operators, for every backend; they return the arguments as one struct.
TriangleUpdate checked_triangle_rows_in(const at::Tensor& x, const OptionalTensor& mask,
                                        const TriangleParameterList& parameters, double eps, const at::Tensor& a,
                                        const at::Tensor& b);
TriangleUpdate checked_triangle_rows_out(const at::Tensor& o, const at::Tensor& x,
                                         const TriangleParameterList& parameters, double eps, const at::Tensor& out);
TriangleUpdate checked_triangle_rows_out_backward(const at::Tensor& grad, const at::Tensor& o, const at::Tensor& x,
                                                  const TriangleParameterList& parameters, double eps,
                                                  const at::Tensor& d_o, const at::Tensor& dz,
                                                  const at::Tensor& moments, const at::Tensor& sums);
TriangleUpdate checked_triangle_rows_in_backward(const at::Tensor& da, const at::Tensor& db, const at::Tensor& x,
                                                 const OptionalTensor& mask, const TriangleParameterList& parameters,
                                                 double eps, const at::Tensor& moments, const at::Tensor& dz,
                                                 const OptionalTensor& residual, const at::Tensor& sums);
TriangleUpdate checked_triangle_rows_parameter_gradients(const at::Tensor& sums,
                                                         const TriangleParameterList& parameters,
                                                         const TriangleParameterOutputMask& output_mask);

}  // namespace torchops::detail
