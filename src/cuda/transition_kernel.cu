#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/add_cuda_dispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "cuda/base/vector.cuh"
#include "cuda/linear/launch.h"
#include "cuda/linear/layer_gradients.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/products.h"
#include "cuda/passes/glu.h"
#include "cuda/passes/pass.cuh"
#include "cuda/transition/layers.h"
#include "cuda/triangle/centered.h"
#include "ops/common.h"
#include "ops/glu.h"
#include "ops/kernel_path.h"
#include "ops/layer_norm.h"
#include "ops/overwriting.h"
#include "ops/transition.h"

// If the kernel of transition/forward.cuh can run, one pass over the rows; the rows of a
// float32 x are centred for it first (triangle/centered.h). Otherwise, panels of rows that fit the
// second-level cache go through layer_norm, glu and the product with the down weights. Only the
// hidden features of a panel exist at a time.
namespace torchops::cuda {
namespace {

using at::Tensor;
using detail::Transition;
using detail::TransitionGradients;
using detail::TransitionOutputMask;
using detail::TransitionProducts;

// A call of the kernels for compute capability 9.0, with x as a matrix: the arguments that forward and backward share.
// The kernels may not apply to it.
template <class Problem>
class Fused {
 public:
  Fused(const Tensor& x, const Transition& t) {
    const int64_t c = x.size(1), hidden = t.gate_weight.size(0);
    const auto from = gemm::operand(x), gate = gemm::operand(t.gate_weight), up = gemm::operand(t.up_weight),
               down = gemm::operand(t.down_weight);
    if (detail::kernel_path() == detail::KernelPath::kCublas || x.scalar_type() != t.dtype() || c == 0 || hidden == 0 ||
        c % 8 != 0 || hidden % 8 != 0 || !from || !gate || !up || !down) {
      return;
    }
    case_ = gemm::sm90_case(x.size(0), hidden, c, t.dtype());
    if (!case_) return;
    problem.m = static_cast<int>(case_->m);
    problem.c = static_cast<int>(c);
    problem.hidden = static_cast<int>(hidden);
    problem.x = *from;
    problem.norm = {vectors_.of_norm(t.norm_weight), vectors_.of_norm(t.norm_bias), static_cast<float>(t.eps)};
    problem.gate = {*gate, vectors_.bias(t.gate_bias)};
    problem.up = {*up, vectors_.bias(t.up_bias)};
    problem.down = {*down, vectors_.bias(t.down_bias)};
  }
  Fused(const Fused&) = delete;
  Fused& operator=(const Fused&) = delete;

  bool possible() const { return case_.has_value(); }
  const gemm::Case& of_rows() const { return *case_; }

  Problem problem;

 private:
  std::optional<gemm::Case> case_;
  gemm::Vectors vectors_;
};

// Everything in one pass over the rows; false, with nothing done, if that kernel cannot run. `out`, plus `residual` if
// it is defined, may be x. `residual` is x; or float32, as `out` is then, which may be `residual`. All are matrices.
bool fused(const Tensor& out, const Tensor& x, const Transition& t, const Tensor& residual) {
  Fused<gemm::TransitionProblem> call(x, t);
  const auto to = gemm::operand(out);
  if (!call.possible() || !to) return false;
  call.problem.out = *to;
  call.problem.add_residual = residual.defined();
  if (residual.defined() && residual.scalar_type() != t.dtype()) {
    const auto from = gemm::operand(residual);
    if (!from) return false;
    call.problem.residual = *from;
  }
  return gemm::run_chosen<gemm::Transition>(call.problem, call.of_rows(), out);
}

// Whether fused() can run on such rows, which may still be uninitialised.
bool can_fuse(const Tensor& rows, const Transition& t) {
  const Fused<gemm::TransitionProblem> call(rows, t);
  int64_t bytes = 0;
  return call.possible() && gemm::chosen<gemm::Transition>(call.problem, call.of_rows(), bytes) != nullptr;
}

// The transition of float32 rows, centred for the kernel, which overwrites the centred rows. Returns false, with y_rows
// overwritten, if the kernel cannot run.
bool transition_of_float32(const Tensor& x_rows, const Tensor& y_rows, const Transition& t) {
  if (!Centered::takes(x_rows, t.dtype()) || !can_fuse(y_rows, t)) return false;
  const Centered centered(x_rows, y_rows, t.eps);
  return fused(y_rows, centered.rows(), t, /*residual=*/{});
}

// sum = x + transition(x) for such rows, by panels of about the same size, which are centred in scratch; `sum`
// may be x. The more panels, the more often the kernel waits for its last rows. Returns false, with nothing
// done, if the kernel cannot run.
bool add_float32(const Tensor& sum, const Tensor& x_rows, const Transition& t) {
  constexpr int64_t most_bytes = int64_t{64} << 20;
  if (!Centered::takes(x_rows, t.dtype())) return false;
  const int64_t rows = x_rows.size(0), c = x_rows.size(1);
  const int64_t step = ceil_div(rows, ceil_div(rows, most_bytes / Centered::row_bytes(c, t.dtype())));
  const Tensor scratch = at::detail::empty_cuda({step, c}, t.gate_weight.options());
  if (!can_fuse(scratch, t)) return false;
  bool done = true;
  for_each_panel_of(rows, step, [&](int64_t begin, int64_t end) {
    if (!done) return;
    const auto panel_of = [&](const Tensor& rows) { return rows.narrow(0, begin, end - begin); };
    const Tensor x = panel_of(x_rows);
    Tensor target = panel_of(sum);
    const Centered centered(x, scratch.narrow(0, 0, end - begin), t.eps);
    if (fused(target, centered.rows(), t, x)) return;
    // If the kernel cannot read the strides.
    done = fused(centered.rows(), centered.rows(), t, /*residual=*/{});
    if (!done && begin > 0) throw Refused();  // rows before these are overwritten
    if (done) at::cuda::add_out(target, x, centered.rows());
  });
  return done;
}

// sum = x + transition(x) for matrices; `sum` may be x.
void add_to(const Tensor& sum, const Tensor& x_rows, const Transition& t) {
  if (fused(sum, x_rows, t, /*residual=*/x_rows) || add_float32(sum, x_rows, t)) return;
  const TransitionLayers layers(t);
  for_each_panel(x_rows.size(0), layers.row_bytes(3), [&](int64_t begin, int64_t end) {
    const Tensor rows = x_rows.narrow(0, begin, end - begin);
    layers.add_down(sum.narrow(0, begin, end - begin), rows, layers.hidden_of(rows));
  });
}

Tensor transition_cuda(const Transition& t) {
  detail::check_transition(t);
  const c10::cuda::CUDAGuard guard(t.x.device());
  Tensor y = at::detail::empty_cuda(t.x.sizes(), t.gate_weight.options());
  if (y.numel() == 0) return y;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor x_rows = detail::as_rows(t.x), y_rows = detail::as_rows(y);
  if (fused(y_rows, x_rows, t, /*residual=*/{})) return y;
  if (transition_of_float32(x_rows, y_rows, t)) return y;
  const TransitionLayers layers(t);
  for_each_panel(x_rows.size(0), layers.row_bytes(3), [&](int64_t begin, int64_t end) {
    layers.down(y_rows.narrow(0, begin, end - begin), layers.hidden_of(x_rows.narrow(0, begin, end - begin)));
  });
  return y;
}

void transition_cuda_(const Transition& arguments) {
  detail::check_transition_(arguments);
  if (arguments.x.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(arguments.x.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Transition t = detail::read_first(arguments);
  const auto add = [&](const detail::Operands& matrices) {
    const Tensor& x_rows = matrices[0];
    add_to(x_rows, x_rows, t);
  };
  detail::overwriting(t.x, [&] { overwrite_rows({t.x}, 1, add); });
}

Tensor add_transition_cuda(const Transition& t) {
  detail::check_transition(t);
  const c10::cuda::CUDAGuard guard(t.x.device());
  Tensor sum = at::detail::empty_cuda(t.x.sizes(), t.x.options());
  if (sum.numel() == 0) return sum;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor x_rows = detail::as_rows(t.x), sum_rows = detail::as_rows(sum);
  add_to(sum_rows, x_rows, t);
  return sum;
}

// All rows at once: the products of all are kept, and eager mode keeps two more tensors of their size.
std::tuple<Tensor, Tensor, Tensor> transition_with_products_cuda(const Transition& t, bool add_residual) {
  detail::check_transition_with_products(t);
  const c10::cuda::CUDAGuard guard(t.x.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::TensorOptions options = t.gate_weight.options();
  const Tensor y = at::detail::empty_cuda(t.x.sizes(), add_residual ? t.x.options() : options);
  const Tensor x_rows = detail::as_rows(t.x), y_rows = detail::as_rows(y);
  const TransitionLayers layers(t);
  const auto [h, up, gate] = layers.hidden_with_products(x_rows);
  if (y.numel() > 0) add_residual ? layers.add_down(y_rows, x_rows, h) : layers.down(y_rows, h);
  const auto hidden = detail::with_last(t.x.sizes(), t.gate_weight.size(0));
  return {y, up.view(hidden), gate.view(hidden)};
}

// --- gradients

// A sum over panels in at least float32, if it is wanted.
class Sum {
 public:
  Sum(const Tensor& result, bool wanted) : result_(result) {
    const at::ScalarType dtype = detail::moments_dtype(result.scalar_type());
    if (wanted) sum_ = at::zeros(result.sizes(), result.options().dtype(dtype));
  }
  bool wanted() const { return sum_.defined(); }
  void add(const Tensor& part) const {
    if (wanted()) sum_.add_(part);
  }
  void finish() const {
    if (wanted()) result_.copy_(sum_);
  }

 private:
  Tensor result_, sum_;
};

// dx and, if all of them are wanted, the gradients of the weights and their companions. Returns false, with nothing
// done, if the kernels cannot run or don't apply to what is wanted. All are matrices of rows.
bool fused_backward(const Tensor& grad, const Tensor& x, const Tensor& dx, const Transition& t,
                    const TransitionGradients& gradients, const TransitionOutputMask& output_mask, bool add_residual) {
  const bool weights = output_mask[3] && output_mask[5] && output_mask[7];
  if (!output_mask[0] || (!weights && std::find(output_mask.begin() + 1, output_mask.end(), true) != output_mask.end()))
    return false;
  Fused<gemm::TransitionGradientProblem> call(x, t);
  const Tensor readable = gemm::readable(grad);
  const auto to = gemm::operand(dx), from = gemm::operand(readable);
  if (!call.possible() || !to || !from) return false;
  gemm::TransitionGradientProblem& problem = call.problem;
  problem.grad = *from;
  problem.dx = *to;
  problem.add_residual = add_residual;
  if (weights) {
    const auto result = [&](bool is_wanted, const Tensor& gradient) {
      return is_wanted ? gradient.mutable_data_ptr() : nullptr;
    };
    const auto& [dx_, dnorm_weight, dnorm_bias, dgate, dgate_bias, dup, dup_bias, ddown, ddown_bias] = gradients;
    problem.dnorm_weight = result(output_mask[1], dnorm_weight);
    problem.dnorm_bias = result(output_mask[2], dnorm_bias);
    problem.dweights[0] = dgate.mutable_data_ptr();
    problem.dbiases[0] = result(output_mask[4], dgate_bias);
    problem.dweights[1] = dup.mutable_data_ptr();
    problem.dbiases[1] = result(output_mask[6], dup_bias);
    problem.dweights[2] = ddown.mutable_data_ptr();
    problem.dbiases[2] = result(output_mask[8], ddown_bias);
  }
  return gemm::run_chosen<gemm::TransitionGradients>(problem, call.of_rows(), dx);
}

// The formulas are in src/cpu/transition_kernel.cpp. The hidden features are computed twice if the gradients of down
// and of another layer are wanted: once directly, and once inside glu_backward. Panels may be larger than in a forward
// pass, because each of them adds to all gradients of the weights.
TransitionGradients gradients_of(const Tensor& grad, const Transition& t, const TransitionOutputMask& output_mask,
                                 bool add_residual) {
  TransitionGradients gradients = detail::empty_transition_gradients(t, output_mask);
  const auto& [dx, dnorm_weight, dnorm_bias, dgate, dgate_bias, dup, dup_bias, ddown, ddown_bias] = gradients;
  if (grad.numel() == 0) {
    std::apply([](const auto&... gradient) { (gradient.zero_(), ...); }, gradients);
    return gradients;
  }
  const detail::TransitionNeeds needs(output_mask);
  const TransitionLayers layers(t);
  const Tensor grad_rows = detail::as_rows(grad), x_rows = detail::as_rows(t.x);
  const Tensor dx_rows = output_mask[0] ? detail::as_rows(dx) : dx;
  if (fused_backward(grad_rows, x_rows, dx_rows, t, gradients, output_mask, add_residual)) return gradients;
  const Sum norm_weight(dnorm_weight, output_mask[1]), norm_bias(dnorm_bias, output_mask[2]),
      gate(dgate, output_mask[3]), gate_bias(dgate_bias, output_mask[4]), up(dup, output_mask[5]),
      up_bias(dup_bias, output_mask[6]), down(ddown, output_mask[7]), down_bias(ddown_bias, output_mask[8]);
  constexpr int64_t most_bytes = int64_t{64} << 20;
  const auto of_panel = [&](int64_t begin, int64_t end) {
    const Tensor g = grad_rows.narrow(0, begin, end - begin), rows = x_rows.narrow(0, begin, end - begin);
    if (output_mask[8]) down_bias.add(g.sum(0, false, detail::moments_dtype(g.scalar_type())));
    if (!needs.gate && !needs.value && !output_mask[7]) return;
    const auto [y, mean, rstd] = layers.normalized(rows);
    const Tensor z = y.to(t.dtype());
    if (output_mask[7]) down.add(weight_gradient(g, layers.hidden(z)));
    if (!needs.gate && !needs.value) return;
    const auto [dz, dv_w, du_w, dv_b, du_b] =
        detail::glu_backward(product(g, t.down_weight), z, t.up_weight, t.gate_weight, t.up_bias, t.gate_bias, "silu",
                             {needs.z, output_mask[5], output_mask[3], output_mask[6], output_mask[4]});
    up.add(dv_w);
    gate.add(du_w);
    up_bias.add(dv_b);
    gate_bias.add(du_b);
    if (!needs.z) return;
    const c10::SymInt features = rows.size(1);
    const auto [dx_panel, dweight, dbias] =
        detail::layer_norm_backward(dz.to(rows.scalar_type()), rows, features, mean, rstd, layers.norm_weight(),
                                    {output_mask[0], output_mask[1], output_mask[2]});
    if (output_mask[0]) dx_rows.narrow(0, begin, end - begin).copy_(add_residual ? dx_panel.add_(g) : dx_panel);
    norm_weight.add(dweight);
    norm_bias.add(dbias);
  };
  for_each_panel(x_rows.size(0), layers.row_bytes(4), of_panel, most_bytes);
  for (const Sum* sum : {&norm_weight, &norm_bias, &gate, &gate_bias, &up, &up_bias, &down, &down_bias}) sum->finish();
  return gradients;
}

// The same where the hidden products were kept.
TransitionGradients gradients_of_kept(const Tensor& grad, const Transition& t, const TransitionOutputMask& output_mask,
                                      bool add_residual, const TransitionProducts& products) {
  TransitionGradients gradients = detail::empty_transition_gradients(t, output_mask);
  auto& [dx, dnorm_weight, dnorm_bias, dgate, dgate_bias, dup, dup_bias, ddown, ddown_bias] = gradients;
  if (grad.numel() == 0) {
    std::apply([](const auto&... gradient) { (gradient.zero_(), ...); }, gradients);
    return gradients;
  }
  const detail::TransitionNeeds needs(output_mask);
  const TransitionLayers layers(t);
  const Tensor g = unit_columns(detail::as_rows(grad)), rows = detail::as_rows(t.x);
  const Tensor up = unit_columns(detail::as_rows(*products.up)), gate = unit_columns(detail::as_rows(*products.gate));
  if (output_mask[8]) sum_columns(ddown_bias, g);
  if (output_mask[7]) {
    const Tensor h = at::detail::empty_cuda(up.sizes(), up.options());
    glu_rows(h, up, gate, detail::GluActivation::kSilu);
    weight_gradient_out(ddown, g, h);
  }
  if (!needs.gate && !needs.value) return gradients;
  const auto [y, mean, rstd] = layers.normalized(rows);
  const Tensor z = y.to(t.dtype());
  const Tensor dz = detail::empty_if(needs.z, z.sym_sizes(), z);
  glu_gradients({dz, dup, dgate, dup_bias, dgate_bias}, product(g, t.down_weight), z, t.up_weight, t.gate_weight,
                t.up_bias, t.gate_bias, "silu",
                {needs.z, output_mask[5], output_mask[3], output_mask[6], output_mask[4]}, up, gate);
  if (!needs.z) return gradients;
  const c10::SymInt features = rows.size(1);
  const auto [dx_rows, dweight, dbias] =
      detail::layer_norm_backward(dz.to(rows.scalar_type()), rows, features, mean, rstd, layers.norm_weight(),
                                  {output_mask[0], output_mask[1], output_mask[2]});
  if (output_mask[0]) dx = (add_residual ? dx_rows.add_(g) : dx_rows).view(t.x.sizes());
  if (output_mask[1]) dnorm_weight = dweight.to(dnorm_weight.scalar_type());
  if (output_mask[2]) dnorm_bias = dbias.to(dnorm_bias.scalar_type());
  return gradients;
}

TransitionGradients transition_backward_cuda(const Tensor& grad, const Transition& arguments,
                                             const TransitionOutputMask& output_mask, bool add_residual,
                                             const TransitionProducts& products) {
  detail::check_transition_backward(grad, arguments, output_mask, products);
  const c10::cuda::CUDAGuard guard(arguments.x.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const NoAutocast no_autocast;
  if (products.up) return gradients_of_kept(grad, arguments, output_mask, add_residual, products);
  Transition t = arguments;
  if (!Centered::takes(t.x, t.dtype())) return gradients_of(grad, t, output_mask, add_residual);
  const Tensor rows = at::detail::empty_cuda(t.x.sizes(), t.gate_weight.options());
  if (!can_fuse(detail::as_rows(rows), t)) return gradients_of(grad, t, output_mask, add_residual);
  const Centered centered(t.x, rows, t.eps);
  t.x = rows;
  TransitionGradients gradients = gradients_of(grad, t, output_mask, /*add_residual=*/false);
  Tensor& dx = std::get<0>(gradients);
  if (output_mask[0]) dx = centered.gradient(dx);
  if (output_mask[0] && add_residual) dx.add_(grad);
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("transition", detail::TransitionKernel::functional<transition_cuda>);
  m.impl("add_transition_", detail::TransitionKernel::in_place<transition_cuda_>);
  m.impl("_add_transition", detail::TransitionKernel::functional<add_transition_cuda>);
  m.impl("_transition", detail::transition_with_products_kernel<transition_with_products_cuda>);
  m.impl("_transition_backward", detail::transition_backward_kernel<transition_backward_cuda>);
}

}  // namespace
}  // namespace torchops::cuda
