#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/sum.h>

#include "autograd/autocast.h"
#include "autograd/recipe.h"
#include "ops/dense.h"

namespace torchops::autograd {
namespace {

Tensor dense_decomposed(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  check_dense(x, w, b);
  if (x.dim() > 1) return at::sigmoid(at::linear(x, w, b));
  const Tensor z = matmul(x, w.t());
  return at::sigmoid(b ? z + *b : z);
}

// Nothing stands between this tensor and a CUDA kernel: no subclass, no lazy negation, no other layout.
bool is_plain_cuda(const Tensor& t) {
  return (t.key_set() & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == c10::DispatchKey::CUDA;
}

// (dx, dw, db) in one pass, or none where operators have to be called one by one: they are recorded or differentiated,
// or there is no such kernel.
auto gradients_at_once(const Tensor& grad, const Tensor& y, const Tensor& x, const Tensor& w)
    -> std::invoke_result_t<detail::DenseGradients, const Tensor&, const Tensor&, const Tensor&, const Tensor&> {
  const detail::DenseGradients kernel = detail::dense_gradients();
  if (kernel == nullptr || at::GradMode::is_enabled() || functorch_active() || is_traced(y)) return std::nullopt;
  if (!is_plain_cuda(grad) || !is_plain_cuda(y) || !is_plain_cuda(x) || !is_plain_cuda(w)) return std::nullopt;
  return kernel(grad, y, x, w);
}

// With y = sigmoid(z), z = x @ w.T + b and the cotangent g of y:
//   dz = g * y * (1 - y),  dx = dz @ w,  dw = dz.T @ x,  db = dz summed over the rows.
// Saves y, and of x and w what the gradients asked for read; never z.
template <bool has_bias>
struct Dense : torch::autograd::Function<Dense<has_bias>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensor y = dense(x, w, b);
    ctx->save_for_backward({y, w.requires_grad() ? x : Tensor(), x.requires_grad() ? w : Tensor()});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &y = saved[0], &x = saved[1], &w = saved[2];
    if (ctx->needs_input_grad(0) && ctx->needs_input_grad(1)) {
      if (auto all = gradients_at_once(grads[0], y, x, w)) {
        auto& [dx, dw, db] = *all;
        return {dx, dw, has_bias && ctx->needs_input_grad(2) ? db : Tensor()};
      }
    }
    Tensor dz, dx, dw, db;
    if (has_bias && ctx->needs_input_grad(2)) {
      std::tie(dz, db) = detail::dense_backward(grads[0], y);
    } else {
      dz = at::sigmoid_backward(grads[0], y);
    }
    if (ctx->needs_input_grad(0)) dx = matmul(dz, w);
    if (ctx->needs_input_grad(1)) dw = at::mm(detail::as_rows(dz).t(), detail::as_rows(x));
    return {dx, dw, db};
  }
};

Tensor dense_autograd(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  check_dense(x, w, b);
  if (needs_decomposition(x, w, b)) return dense_decomposed(x, w, b);
  if (needs_grad(x, w, b)) return b ? Dense<true>::apply(x, w, b) : Dense<false>::apply(x, w, b);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return dense(x, w, b);
}

std::tuple<Tensor, Tensor> dense_backward_decomposed(const Tensor& grad, const Tensor& y) {
  const Tensor dz = at::sigmoid_backward(grad, y);
  return {dz, detail::as_rows(dz).sum(0)};
}

// Only double backward differentiates this one.
std::tuple<Tensor, Tensor> dense_backward_autograd(const Tensor& grad, const Tensor& y) {
  if (needs_decomposition(grad, y) || needs_grad(grad, y)) return dense_backward_decomposed(grad, y);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return detail::dense_backward(grad, y);
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("dense", dense_autograd);
  m.impl("_dense_backward", dense_backward_autograd);
}

TORCHOPS_AUTOCAST(m) { m.impl("dense", autocast<CastTo::kLowerPrecision, dense>); }

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("dense", autocast<CastTo::kLowerPrecision, dense_decomposed>);
  m.impl("_dense_backward", dense_backward_decomposed);
}

// For a backend that has dense alone.
TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { m.impl("_dense_backward", dense_backward_decomposed); }

}  // namespace
}  // namespace torchops::autograd
