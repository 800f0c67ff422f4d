#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/linear.h"
#include "autograd/recipe.h"
#include "ops/outer_product_mean.h"

namespace torchops::autograd {
namespace {

using OptionalTensor = std::optional<Tensor>;
using detail::of_batch;
using detail::OuterProductGradients;
using detail::OuterProductOutputMask;

// The operator and its gradients in differentiable ATen operators, for which the outer products of all pairs exist.
class WrittenOut {
 public:
  WrittenOut(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& norm)
      : a_(a), b_(b), weight_(weight), norm_(norm) {
    const c10::SymInt n = a.sym_size(-2), m = b.sym_size(-2), c = a.sym_size(-1), d = b.sym_size(-1);
    const Tensor outer = matmul(matrix(a).mT(), matrix(b));
    const Tensor pairs = outer.reshape_symint(of_batch(a_, {n, c, m, d})).transpose(-3, -2);
    h_ = divided(pairs.reshape_symint(of_batch(a_, {n, m, c * d})));
  }

  Tensor result(const OptionalTensor& bias) const { return linear(h_, weight_, bias).contiguous(); }

  OuterProductGradients gradients(const Tensor& grad, const OuterProductOutputMask& output_mask) const {
    const Tensor dh = matmul(grad, weight_);
    const c10::SymInt n = a_.sym_size(-2), m = b_.sym_size(-2), c = a_.sym_size(-1), d = b_.sym_size(-1);
    const Tensor pairs = divided(dh).reshape_symint(of_batch(a_, {n, m, c, d})).transpose(-3, -2);
    const Tensor d_outer = pairs.reshape_symint(of_batch(a_, {n * c, m * d}));
    const auto none = [](const Tensor& like) { return at::empty({0}, like.options()); };
    return {output_mask[0] ? matmul(matrix(b_), d_outer.mT()).reshape_symint(a_.sym_sizes()) : none(a_),
            output_mask[1] ? matmul(matrix(a_), d_outer).reshape_symint(b_.sym_sizes()) : none(b_),
            output_mask[2] ? weight_gradient(grad, h_) : none(weight_),
            output_mask[3] ? ((dh * h_).sum(-1) / *norm_).neg().to(norm_->scalar_type()) : none(norm_.value_or(a_))};
  }

 private:
  Tensor matrix(const Tensor& t) const {
    return t.reshape_symint(of_batch(a_, {t.sym_size(-3), t.sym_size(-2) * t.sym_size(-1)}));
  }

  Tensor divided(const Tensor& pairs) const {
    return norm_ ? (pairs / norm_->unsqueeze(-1)).to(a_.scalar_type()) : pairs;
  }

  Tensor a_, b_, weight_;
  OptionalTensor norm_;
  Tensor h_;
};

// Not of a matrix of all pairs: DTensor merges no dimensions of which a later one is sharded unevenly.
Tensor sum_of_pairs(const Tensor& grad) {
  std::vector<int64_t> dims(grad.dim() - 1);
  std::iota(dims.begin(), dims.end(), 0);
  return grad.sum(dims);
}

// Whether training keeps the outer products of all pairs: in the caches of a CPU, they are read in less time than
// computed again.
bool keeps_outer_products(const Tensor& a, const Tensor& b) {
  if (!a.device().is_cpu() || is_traced(a) || is_traced(b)) return false;
  constexpr int64_t most_cached_bytes = int64_t{8} << 20;
  const int64_t of_sequence = b.size(-2) * b.size(-1) * static_cast<int64_t>(b.element_size());
  return a.numel() <= most_cached_bytes / std::max<int64_t>(of_sequence, 1) * a.size(-3);
}

struct OuterProductMean : torch::autograd::Function<OuterProductMean> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const Tensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& norm) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({a, b, weight, norm.value_or(Tensor())});
    ctx->saved_data["has_bias"] = bias.has_value();
    return outer_product_mean(a, b, weight, bias, norm);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor norm = optional_of(saved[3]);
    // Edges are numbered among the tensors that were passed.
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const OuterProductOutputMask output_mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                             ctx->needs_input_grad(2), norm && ctx->needs_input_grad(has_bias ? 4 : 3)};
    const auto [for_a, for_b, for_weight, for_norm] = output_mask;
    Tensor da, db, dweight, dbias, dnorm;
    if (for_a || for_b || for_weight || for_norm) {
      std::tie(da, db, dweight, dnorm) =
          detail::outer_product_mean_backward(grads[0], saved[0], saved[1], saved[2], norm, output_mask);
    }
    if (has_bias && ctx->needs_input_grad(3)) dbias = sum_of_pairs(grads[0]);
    const auto if_asked = [](bool asked, const Tensor& gradient) { return asked ? gradient : Tensor(); };
    return {if_asked(for_a, da), if_asked(for_b, db), if_asked(for_weight, dweight), dbias, if_asked(for_norm, dnorm)};
  }
};

struct Functional : FunctionalOp<Functional, outer_product_mean> {
  static void check(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& norm) {
    check_outer_product_mean(a, b, weight, bias, norm);
  }
  static Tensor decomposed(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& norm) {
    return WrittenOut(a, b, weight, norm).result(bias);
  }
  static Tensor train(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& norm) {
    if (keeps_outer_products(a, b)) return decomposed(a, b, weight, bias, norm);
    return OuterProductMean::apply(a, b, weight, bias, norm);
  }
};

// Differentiated only by double backward.
struct Backward : FunctionalOp<Backward, detail::outer_product_mean_backward> {
  static void check(const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& weight,
                    const OptionalTensor& norm, const OuterProductOutputMask& output_mask) {
    detail::check_outer_product_mean_backward(grad, a, b, weight, norm, output_mask);
  }
  static OuterProductGradients decomposed(const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& weight,
                                          const OptionalTensor& norm, const OuterProductOutputMask& output_mask) {
    return WrittenOut(a, b, weight, norm).gradients(grad, output_mask);
  }
};

// Divisors keep their precision: autocast does not cast those of PyTorch's division either.
template <auto function>
Tensor cast(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
            const OptionalTensor& norm) {
  const Casting cast(CastTo::kLowerPrecision, a);
  return function(cast(a), cast(b), cast(weight), cast(bias), cast.unless_float32(norm));
}

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("outer_product_mean", Functional::autograd);
  m.impl("_outer_product_mean_backward", Backward::autograd);
}

TORCHOPS_AUTOCAST(m) { m.impl("outer_product_mean", cast<outer_product_mean>); }

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("outer_product_mean", cast<Functional::batched>);
  m.impl("_outer_product_mean_backward", Backward::batched);
}

}  // namespace
}  // namespace torchops::autograd
