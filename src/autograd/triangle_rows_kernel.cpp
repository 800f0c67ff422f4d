#include "autograd/lazy.h"
#include "ops/triangle_rows.h"

namespace torchops::autograd {
namespace {

using detail::OptionalTensor;
using detail::TriangleParameterList;
using detail::TriangleParameterOutputMask;

bool rows_in(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, double scale,
             double eps, Tensor& a, Tensor& b) {
  const at::AutoDispatchBelowADInplaceOrView below_version_counter;
  const at::DisableRecordFunctionGuard not_recorded;
  if (is_lazy(a) || is_lazy(b)) return false;
  return detail::triangle_rows_in(materialize(x), materialize(mask), materialize(parameters), scale, eps, a, b);
}

bool rows_out(const Tensor& o, const Tensor& x, const TriangleParameterList& parameters, double eps, double eps_out,
              Tensor& out, bool add_residual) {
  const at::AutoDispatchBelowADInplaceOrView below_version_counter;
  const at::DisableRecordFunctionGuard not_recorded;
  if (is_lazy(out)) return false;
  return detail::triangle_rows_out(materialize(o), materialize(x), materialize(parameters), eps, eps_out, out,
                                   add_residual);
}

bool rows_out_backward(const Tensor& grad, const Tensor& o, const Tensor& x, const TriangleParameterList& parameters,
                       double eps, double eps_out, Tensor& d_o, Tensor& dz, Tensor& moments, Tensor& sums) {
  const at::AutoDispatchBelowADInplaceOrView below_version_counter;
  const at::DisableRecordFunctionGuard not_recorded;
  if (is_lazy(d_o) || is_lazy(dz) || is_lazy(moments) || is_lazy(sums)) return false;
  return detail::triangle_rows_out_backward(materialize(grad), materialize(o), materialize(x), materialize(parameters),
                                            eps, eps_out, d_o, dz, moments, sums);
}

bool rows_in_backward(const Tensor& da, const Tensor& db, const Tensor& x, const OptionalTensor& mask,
                      const TriangleParameterList& parameters, double scale, double eps, const Tensor& moments,
                      Tensor& dz, const OptionalTensor& residual, Tensor& sums) {
  const at::AutoDispatchBelowADInplaceOrView below_version_counter;
  const at::DisableRecordFunctionGuard not_recorded;
  if (is_lazy(dz) || is_lazy(sums)) return false;
  return detail::triangle_rows_in_backward(materialize(da), materialize(db), materialize(x), materialize(mask),
                                           materialize(parameters), scale, eps, materialize(moments), dz,
                                           materialize(residual), sums);
}

std::vector<Tensor> parameter_gradients(const Tensor& sums, const TriangleParameterList& parameters,
                                        TriangleParameterOutputMask output_mask) {
  const at::AutoDispatchBelowADInplaceOrView below_version_counter;
  const at::DisableRecordFunctionGuard not_recorded;
  return detail::triangle_rows_parameter_gradients(materialize(sums), materialize(parameters), output_mask);
}

void register_lazy(torch::Library& m) {
  m.impl("_triangle_rows_in", rows_in);
  m.impl("_triangle_rows_out", rows_out);
  m.impl("_triangle_rows_out_backward", rows_out_backward);
  m.impl("_triangle_rows_in_backward", rows_in_backward);
  m.impl("_triangle_rows_parameter_gradients", parameter_gradients);
}

TORCH_LIBRARY_IMPL(myops, Negative, m) { register_lazy(m); }
TORCH_LIBRARY_IMPL(myops, Conjugate, m) { register_lazy(m); }
TORCH_LIBRARY_IMPL(myops, ZeroTensor, m) { register_lazy(m); }

}  // namespace
}  // namespace torchops::autograd
