#include "ops/triangle_rows.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>

#include "cuda/pair_step.h"
#include "ops/common.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleParameterList;
using detail::TriangleUpdate;

// The case of the kernels if they are for these arguments. Weights become readable, as copies if need be: other ranks'
// may be as they are.
std::optional<gemm::Case> readable_case(TriangleUpdate& t) {
  constexpr int64_t most = std::numeric_limits<int>::max() - 1024;  // an int still has room for a tile
  const auto chosen = pair_steps::chosen_case(t);
  if (!chosen || t.x.size(0) > most || t.x.size(1) > most) return std::nullopt;
  for (const auto layer : {detail::kPA, detail::kPB, detail::kGA, detail::kGB, detail::kPOut, detail::kGOut}) {
    t.parameters[layer] = gemm::readable(t.weight(layer));
  }
  return chosen;
}

// Channels whose rows TMA can read and write.
bool fit(const Tensor& channels) {
  const int64_t size = channels.element_size(), most = (int64_t{1} << 40) / size;
  const auto fits = [&](int64_t stride) { return stride > 0 && stride < most && stride % (16 / size) == 0; };
  return channels.stride(2) == 1 && fits(channels.stride(0)) && fits(channels.stride(1)) &&
         gemm::is_aligned(channels.const_data_ptr());
}

bool rows_in_cuda(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, double scale,
                  double eps, Tensor& a, Tensor& b) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_rows_in(x, mask, parameters, eps, a, b);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto chosen = readable_case(t);
  if (!chosen || !fit(a) || !fit(b)) return false;
  const Tensor rows = pair_steps::readable(x);
  pair_steps::Step step(t, rows);
  const Tensor factors = mask ? mask->to(t.dtype()) : Tensor();
  step.set_input(t, factors, a, b, scale);
  return step.fits && gemm::run_chosen<gemm::TriangleIn>(step.problem, *chosen, a);
}

bool rows_out_cuda(const Tensor& o, const Tensor& x, const TriangleParameterList& parameters, double eps,
                   double eps_out, Tensor& out, bool adds) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_rows_out(o, x, parameters, eps, out);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto chosen = readable_case(t);
  const auto to = chosen ? pair_steps::positions(out) : std::nullopt;
  if (!to || !fit(o)) return false;
  const Tensor rows = pair_steps::readable(x);
  pair_steps::Step step(t, rows);
  step.set_output(t, o, out, *to, eps_out, adds);
  return step.fits && gemm::run_chosen<gemm::TriangleOut>(step.problem, *chosen, out);
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("_triangle_rows_in", rows_in_cuda);
  m.impl("_triangle_rows_out", rows_out_cuda);
}

}  // namespace
}  // namespace torchops::cuda
