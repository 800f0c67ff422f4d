#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "cuda/base/device.h"
#include "cuda/base/per_device.h"
#include "cuda/gemm/sm80/triangle_in.cuh"
#include "cuda/gemm/sm80/triangle_out.cuh"
#include "cuda/gemm/ways.h"
#include "cuda/triangle/centered.h"
#include "cuda/triangle/problem.h"

// The input and output steps of a triangle update by kernels. Up to 128 features and channels, each is one pass over
// memory: by the kernels for compute capability 9.0, or by those for all from 8.0 on. Beyond that, there are only
// kernels for 9.0.
namespace torchops::cuda {

namespace pair_steps {

/// The kernels for a call with x in the dtype of the products. Those of sm90/ also need chosen_case().
inline gemm::PairWays ways(const TriangleUpdate& t, bool has_sm90) {
  const bool has_sm80 = may_run(t) && device_properties().major >= 8 && gemm::element_of(t.dtype());
  return gemm::pair_ways(t.x.size(-1), t.weight(detail::kPA).size(0), has_sm90, has_sm80);
}

/// Runs one of those kernels.
template <class Spec, auto kernel>
void launch_portable(const gemm::PairProblem& p) {
  static PerDevice granted;
  int multiprocessors = 0;
  begin_launch(Family::kSm80);
  check_launch(Family::kSm80, granted_multiprocessors(granted, kernel, Spec::kSharedBytes, multiprocessors));
  kernel<<<static_cast<unsigned>(Spec::Tile::count(p.n)), gemm::kSm80Threads, Spec::kSharedBytes,
           at::cuda::getCurrentCUDAStream()>>>(p);
  check_launch(Family::kSm80, cudaGetLastError());
}

/// A float32 x, centred so that both steps can read it; nullopt for another x, and if there are no such kernels.
inline std::optional<Centered> centered(const TriangleUpdate& t) {
  if (!Centered::takes(t.x, t.dtype()) || !ways(t, /*has_sm90=*/false).sm80) return std::nullopt;
  return Centered(t.x, t.dtype(), t.eps);
}

}  // namespace pair_steps

/// Both steps of a call, one batch element at a time. What the elements share is looked up once: for small N, host time
/// counts. Both steps return false, with nothing done, if the kernels cannot run.
class PairSteps {
 public:
  explicit PairSteps(const detail::TriangleUpdate& t)
      : t_(t),
        case_(pair_steps::chosen_case(t)),
        ways_(t.x.scalar_type() == t.dtype() ? pair_steps::ways(t, case_.has_value()) : gemm::PairWays{}) {}

  /// Whether there are kernels for these sizes and dtypes, and whether they include those for gradients.
  bool have_kernels() const { return ways_.any(); }
  bool stream_weights() const { return ways_.streams; }
  bool have_gradient_kernels() const { return case_.has_value(); }
  /// From x (N, N, c) and the mask (N, N), or none, both in the direction of the update: a and b, with zeros in their
  /// padded columns, and perhaps in the memory between these and the next row.
  bool in(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& a, const at::Tensor& b, double scale) const;
  /// From the product o and x (N, N, c): `out` = the update, plus `residual` if it is defined. `residual` is x; or,
  /// with up to 128 features and channels, a float32 tensor, in which case `out` is float32 too and may be `residual`.
  /// `out` may be x if x is added, or if c and d are at most 128.
  bool out(const at::Tensor& o, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& out,
           double eps_out) const;

 private:
  bool streamed_in(gemm::PairProblem& problem, const at::Tensor& a) const;
  bool streamed_out(gemm::PairProblem& problem, const at::Tensor& x, const at::Tensor& out) const;
  /// Calls f(T()) for the type of the elements, if a kernel of sm80/triangle.cuh can compute this call.
  template <class F>
  bool run_portable(const F& f) const {
    return ways_.sm80 && attempt(Family::kSm80, [&] {
             t_.dtype() == at::kFloat ? f(float{}) : t_.dtype() == at::kBFloat16 ? f(at::BFloat16{}) : f(at::Half{});
             return true;
           });
  }

  const detail::TriangleUpdate& t_;
  std::optional<gemm::Case> case_;  // on compute capability 9.0
  gemm::PairWays ways_;
  // (N, N, 2): the layer norm's moments of the element last passed to in(), in the direction of the update.
  mutable at::Tensor moments_;
};

inline bool PairSteps::streamed_in(gemm::PairProblem& p, const at::Tensor& a) const {
  moments_ = at::detail::empty_cuda({p.n, p.n, 2}, a.options().dtype(at::kFloat));
  p.moments = moments_.mutable_data_ptr();
  p.moments_row_stride = p.n;
  p.moments_stride = 1;
  if (gemm::run_chosen<gemm::StreamedTriangleIn>(p, *case_, a)) return true;
  moments_.reset();
  return false;
}

// Several CTAs may read the same rows of x, so the update cannot overwrite x before it is complete.
inline bool PairSteps::streamed_out(gemm::PairProblem& p, const at::Tensor& x, const at::Tensor& out) const {
  if (!moments_.defined()) return false;
  p.moments = moments_.mutable_data_ptr();
  p.moments_row_stride = t_.outgoing ? p.n : 1;
  p.moments_stride = t_.outgoing ? 1 : p.n;
  const bool add_residual = std::exchange(p.add_residual, false), overwrites = add_residual && p.out == p.x.data;
  const at::Tensor update = overwrites ? at::Tensor(at::detail::empty_cuda(out.sizes(), out.options())) : out;
  p.out = update.mutable_data_ptr();
  p.out_row_stride = update.stride(1);
  p.out_stride = update.stride(0);
  if (!gemm::run_chosen<gemm::StreamedTriangleOut>(p, *case_, update)) return false;
  at::Tensor target = out;
  if (add_residual) target.add_(overwrites ? update : x);
  return true;
}

inline bool PairSteps::in(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& a, const at::Tensor& b,
                          double scale) const {
  if (!have_kernels()) return false;
  pair_steps::Step step(t_, x);
  gemm::PairProblem& p = step.problem;
  step.set_input(t_, mask, a, b, scale, /*owns_gaps=*/true);
  if (!step.fits || a.stride(0) != b.stride(0)) return false;
  if (ways_.streams) return streamed_in(p, a);
  if (ways_.one_pass && gemm::run_chosen<gemm::TriangleIn>(p, *case_, a)) return true;
  return run_portable(
      [&]<class T>(T) { pair_steps::launch_portable<gemm::PairIn80<T>, gemm::sm80_pair_in_kernel<T>>(p); });
}

inline bool PairSteps::out(const at::Tensor& o, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& out,
                           double eps_out) const {
  const auto to = have_kernels() ? pair_steps::positions(out) : std::nullopt;
  if (!to) return false;
  pair_steps::Step step(t_, x);
  gemm::PairProblem& p = step.problem;
  step.set_output(t_, o, out, *to, eps_out, residual.defined());
  if (!step.fits) return false;
  if (residual.defined() && residual.scalar_type() != t_.dtype()) {
    const auto from = pair_steps::positions(residual);
    if (!from || ways_.streams) return false;
    p.residual = *from;
  }
  if (ways_.streams) return streamed_out(p, x, out);
  if (ways_.one_pass && gemm::run_chosen<gemm::TriangleOut>(p, *case_, out)) return true;
  return run_portable(
      [&]<class T>(T) { pair_steps::launch_portable<gemm::PairOut80<T>, gemm::sm80_pair_out_kernel<T>>(p); });
}

}  // namespace torchops::cuda
