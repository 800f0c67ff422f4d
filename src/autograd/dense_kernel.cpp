#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/linear.h"
#include "autograd/path.h"
#include "autograd/recipe.h"
#include "ops/dense.h"

namespace torchops::autograd {
namespace {

struct DenseFunctional : FunctionalOp<DenseFunctional, dense> {
  static void check(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) { check_dense(x, w, b); }
  static Tensor decomposed(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
    return at::sigmoid(linear(x, w, b));
  }
  static Tensor train(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b);
};

struct DenseOnPath : FunctionalOp<DenseOnPath, detail::dense_on_path> {
  static void check(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, std::string_view path) {
    detail::parse_kernel_path("_dense_on_path", std::string(path));
    check_dense(x, w, b);
  }
  static Tensor decomposed(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, std::string_view) {
    return DenseFunctional::decomposed(x, w, b);
  }
  static Tensor train(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, std::string_view path);
};

// With y = sigmoid(z), z = x @ w.T + b and the cotangent g of y:
//   dz = g * y * (1 - y),  dx = dz @ w,  dw = dz.T @ x,  db = dz summed over the rows.
// Saves y and whichever of x and w the requested gradients need; never z.
template <bool has_bias>
struct Dense : torch::autograd::Function<Dense<has_bias>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, const std::optional<Tensor>& b,
                        OptionalPath path) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    save_path(ctx, path);
    Tensor y = path ? detail::dense_on_path(x, w, b, detail::to_string(*path)) : dense(x, w, b);
    ctx->save_for_backward({y, w.requires_grad() ? x : Tensor(), x.requires_grad() ? w : Tensor()});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &y = saved[0], &x = saved[1], &w = saved[2];
    const detail::KernelPathGuard on_path(saved_path(ctx));
    const std::array<bool, 3> output_mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                          has_bias && ctx->needs_input_grad(2)};
    // With one of them, the other operand was not saved. A graph keeps the path on which it was traced.
    if (output_mask[0] && output_mask[1] && detail::kernel_path() != detail::KernelPath::kCublas) {
      const auto [dx, dw, db] = detail::dense_gradients(grads[0], y, x, w, output_mask);
      return {dx, dw, output_mask[2] ? db : Tensor(), Tensor()};
    }
    const auto [dx, dw, db] = detail::dense_gradients_in_parts(grads[0], y, x, w, output_mask);
    return {dx, dw, db, Tensor()};
  }
};

Tensor train_dense(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, OptionalPath path) {
  return b ? Dense<true>::apply(x, w, b, path) : Dense<false>::apply(x, w, b, path);
}

Tensor DenseFunctional::train(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  return train_dense(x, w, b, std::nullopt);
}

Tensor DenseOnPath::train(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, std::string_view path) {
  return train_dense(x, w, b, detail::parse_kernel_path("_dense_on_path", std::string(path)));
}

// Differentiated only by double backward.
struct DenseBackward : FunctionalOp<DenseBackward, detail::dense_backward> {
  static void check(const Tensor& grad, const Tensor& y, std::array<bool, 2>) { detail::check_dense_backward(grad, y); }
  static std::tuple<Tensor, Tensor> decomposed(const Tensor& grad, const Tensor& y, std::array<bool, 2> output_mask) {
    const Tensor none = at::empty({0}, y.options());
    if (!output_mask[0] && !output_mask[1]) return {none, none};
    const Tensor dz = at::sigmoid_backward(grad, y).contiguous();
    return {output_mask[0] ? dz : none, output_mask[1] ? bias_gradient(dz) : none};
  }
};

struct DenseGradients : FunctionalOp<DenseGradients, detail::dense_gradients> {
  static void check(const Tensor& grad, const Tensor& y, const Tensor& x, const Tensor& w, std::array<bool, 3>) {
    detail::check_dense_gradients(grad, y, x, w);
  }
  static std::tuple<Tensor, Tensor, Tensor> decomposed(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                       const Tensor& w, std::array<bool, 3> output_mask) {
    auto out = detail::dense_gradients_in_parts(grad, y, x, w, output_mask);
    for (Tensor& t : out) {
      if (!t.defined()) t = at::empty({0}, y.options());
    }
    return {out[0], out[1], out[2]};
  }
};

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("dense", DenseFunctional::autograd);
  m.impl("_dense_on_path", DenseOnPath::autograd);
  m.impl("_dense_backward", DenseBackward::autograd);
  m.impl("_dense_gradients", DenseGradients::autograd);
}

TORCHOPS_AUTOCAST(m) {
  m.impl("dense", autocast<CastTo::kLowerPrecision, dense>);
  m.impl("_dense_on_path", autocast<CastTo::kLowerPrecision, detail::dense_on_path>);
}

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("dense", autocast<CastTo::kLowerPrecision, DenseFunctional::batched>);
  m.impl("_dense_on_path", autocast<CastTo::kLowerPrecision, DenseOnPath::batched>);
  m.impl("_dense_backward", DenseBackward::batched);
  m.impl("_dense_gradients", DenseGradients::batched);
}

// For backends that implement only dense.
TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) {
  m.impl("_dense_backward", DenseBackward::batched);
  m.impl("_dense_gradients", DenseGradients::batched);
}

}  // namespace
}  // namespace torchops::autograd

namespace torchops {

std::array<at::Tensor, 3> detail::dense_gradients_in_parts(const at::Tensor& grad, const at::Tensor& y,
                                                           const at::Tensor& x, const at::Tensor& w,
                                                           std::array<bool, 3> output_mask) {
  at::Tensor dz, dx, dw, db;
  const bool dz_wanted = output_mask[0] || output_mask[1];
  // In 16 bits on CUDA, at::sigmoid_backward() rounds three times.
  if (output_mask[2] || (dz_wanted && y.element_size() == 2 && autograd::is_eager_on_cuda(grad, y))) {
    at::Tensor sum;
    std::tie(dz, sum) = dense_backward(grad, y, {dz_wanted, output_mask[2]});
    if (output_mask[2]) db = sum;
  } else if (dz_wanted) {
    dz = at::sigmoid_backward(grad, y);
  }
  if (output_mask[0]) dx = autograd::matmul(dz, w);
  if (output_mask[1]) dw = autograd::weight_gradient(dz, x);
  return {dx, dw, db};
}

}  // namespace torchops
