#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/triangle/gradient_problem.h"
#include "ops/common.h"
#include "ops/triangle_rows.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleParameterList;
using detail::TriangleParameterOutputMask;
using detail::TriangleUpdate;

// Weights become readable, as copies if need be: other ranks' may be as they are.
void make_readable(TriangleUpdate& t) {
  for (const auto layer : detail::kSummedLayers) t.parameters[layer] = gemm::readable(t.weight(layer));
}

// The case of the kernels if they are for these arguments.
std::optional<gemm::Case> readable_case(TriangleUpdate& t) {
  const auto chosen = pair_steps::chosen_case(t);
  if (!chosen || t.x.size(0) > gemm::kMostExtent || t.x.size(1) > gemm::kMostExtent) return std::nullopt;
  make_readable(t);
  return chosen;
}

bool rows_in_cuda(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, double scale,
                  double eps, Tensor& a, Tensor& b) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_rows_in(x, mask, parameters, eps, a, b);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto chosen = readable_case(t);
  if (!chosen || !pair_steps::has_whole_rows(a) || !pair_steps::has_whole_rows(b)) return false;
  const Tensor rows = pair_steps::readable(x);
  pair_steps::Step step(t, rows);
  const Tensor factors = mask ? mask->to(t.dtype()) : Tensor();
  step.set_input(t, factors, a, b, scale, /*owns_gaps=*/false);
  return step.fits && gemm::run_chosen<gemm::TriangleIn>(step.problem, *chosen, a);
}

bool rows_out_cuda(const Tensor& o, const Tensor& x, const TriangleParameterList& parameters, double eps,
                   double eps_out, Tensor& out, bool add_residual) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_rows_out(o, x, parameters, eps, out);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto chosen = readable_case(t);
  const auto to = chosen ? pair_steps::positions(out) : std::nullopt;
  if (!to || !pair_steps::has_whole_rows(o)) return false;
  const Tensor rows = pair_steps::readable(x);
  pair_steps::Step step(t, rows);
  step.set_output(t, o, out, *to, eps_out, add_residual);
  return step.fits && gemm::run_chosen<gemm::TriangleOut>(step.problem, *chosen, out);
}

// The gradient kernels and the memory that they share, if they are for these arguments.
struct GradientStep {
  pair_steps::GradientKernels kernels;
  Tensor workspace;
  pair_steps::GradientMemory memory{};

  GradientStep(const TriangleUpdate& t, const std::optional<gemm::Case>& chosen) : kernels(t, chosen) {}

  // `pairs` is the memory of the moments, of which kernels read and write two floats at once.
  bool choose(const TriangleUpdate& t, const Tensor& x, const Tensor& dz, const Tensor& moments, float* pairs,
              const Tensor& sums) {
    if (!pair_steps::positions(dz) || moments.stride(0) % 2 != 0 || moments.stride(1) % 2 != 0 ||
        moments.stride(2) != 1 || reinterpret_cast<uintptr_t>(pairs) % (2 * sizeof(float)) != 0 ||
        sums.stride(0) != 1 || !kernels.choose(pair_steps::Step(t, x))) {
      return false;
    }
    workspace = at::detail::empty_cuda({kernels.workspace_size()}, sums.options());
    memory = {sums.mutable_data_ptr<float>(), pairs, moments.stride(0) / 2, moments.stride(1) / 2,
              workspace.mutable_data_ptr()};
    return true;
  }
};

bool rows_out_backward_cuda(const Tensor& grad, const Tensor& o, const Tensor& x,
                            const TriangleParameterList& parameters, double eps, double eps_out, Tensor& d_o,
                            Tensor& dz, Tensor& moments, Tensor& sums) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_rows_out_backward(grad, o, x, parameters, eps, d_o, dz, moments, sums);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto chosen = readable_case(t);
  if (!chosen || !pair_steps::has_whole_rows(o) || !pair_steps::has_whole_rows(d_o)) return false;
  const Tensor rows = pair_steps::readable(x);
  GradientStep step(t, chosen);
  if (!step.choose(t, rows, dz, moments, moments.mutable_data_ptr<float>(), sums)) return false;
  return attempt(Family::kSm90, [&] {
    step.kernels.out(rows, grad, o, eps_out, dz, d_o, step.memory);
    return true;
  });
}

bool rows_in_backward_cuda(const Tensor& da, const Tensor& db, const Tensor& x, const OptionalTensor& mask,
                           const TriangleParameterList& parameters, double scale, double eps, const Tensor& moments,
                           Tensor& dz, const OptionalTensor& residual, Tensor& sums) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t =
      detail::checked_triangle_rows_in_backward(da, db, x, mask, parameters, eps, moments, dz, residual, sums);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto chosen = readable_case(t);
  if (!chosen || !pair_steps::has_whole_rows(da) || !pair_steps::has_whole_rows(db)) return false;
  const Tensor rows = pair_steps::readable(x);
  GradientStep step(t, chosen);
  auto* const pairs = const_cast<float*>(moments.const_data_ptr<float>());  // only read
  if (!step.choose(t, rows, dz, moments, pairs, sums)) return false;
  const Tensor of_edges = mask ? mask->to(t.dtype()) : Tensor();
  return attempt(Family::kSm90, [&] {
    step.kernels.in(rows, of_edges, da, db, scale, dz, residual.value_or(Tensor()), step.memory);
    return true;
  });
}

std::vector<Tensor> parameter_gradients_cuda(const Tensor& sums, const TriangleParameterList& parameters,
                                             TriangleParameterOutputMask output_mask) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_rows_parameter_gradients(sums, parameters, output_mask);
  constexpr const char* op = "_triangle_rows_parameter_gradients";
  TORCH_CHECK(t.dtype() == at::kHalf || t.dtype() == at::kBFloat16, op,
              ": expected parameters of dtype float16 or bfloat16, got ", detail::to_string(t.dtype()));
  TORCH_CHECK(t.weight(detail::kPA).numel() > 0, op, ": expected weights with elements, got none");
  const c10::cuda::CUDAGuard guard(sums.device());
  make_readable(t);
  const std::vector<Tensor> gradients = detail::empty_triangle_parameter_gradients(
      t, output_mask, [](c10::SymIntArrayRef shape, const at::TensorOptions& options) -> Tensor {
        return at::detail::empty_cuda(C10_AS_INTARRAYREF_SLOW(shape), options);
      });
  const Tensor contiguous = sums.contiguous();
  pair_steps::unfold_norms(t, detail::gradients_apart(t, gradients, output_mask), contiguous.const_data_ptr<float>(),
                           sums.size(0));
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("_triangle_rows_in", rows_in_cuda);
  m.impl("_triangle_rows_out", rows_out_cuda);
  m.impl("_triangle_rows_out_backward", rows_out_backward_cuda);
  m.impl("_triangle_rows_in_backward", rows_in_backward_cuda);
  m.impl("_triangle_rows_parameter_gradients", parameter_gradients_cuda);
}

}  // namespace
}  // namespace torchops::cuda
