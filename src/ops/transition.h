#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "export.h"

namespace torchops {

/// A gated feed-forward layer after its layer norm (Abramson et al. 2024, supplement, algorithm 11):
///   z = layer_norm(x),  (silu(z @ gate.T + gate_bias) * (z @ up.T + up_bias)) @ down.T + down_bias
///
/// x: (..., c); norms: (c,), or none; gate_weight, up_weight: (hidden, c); down_weight: (c, hidden); each bias: one
/// element per row of its weight, or none. All have one floating-point dtype, except that x and each of the norm's
/// parameters may be float32 if the weights are float16 or bfloat16. Returns a new contiguous tensor of x's shape and
/// the weights' dtype. Without gradients, only the hidden features of a panel of rows exist at a time. Training saves
/// the arguments and, if detail::keeps_products(), both hidden products. Throws c10::Error, with nothing computed, when
/// arguments do not fit.
TORCHOPS_API at::Tensor transition(const at::Tensor& x, const std::optional<at::Tensor>& norm_weight,
                                   const std::optional<at::Tensor>& norm_bias, const at::Tensor& gate_weight,
                                   const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
                                   const std::optional<at::Tensor>& up_bias, const at::Tensor& down_weight,
                                   const std::optional<at::Tensor>& down_bias, double eps = 1e-5);

/// x += transition(x, ...), in x's dtype; returns x. Parameters may overlap x; they are then read first. A
/// call that the checks refuse leaves x untouched; if memory runs out halfway, x may be partly overwritten,
/// and its version counter has moved.
TORCHOPS_API at::Tensor& add_transition_(at::Tensor& x, const std::optional<at::Tensor>& norm_weight,
                                         const std::optional<at::Tensor>& norm_bias, const at::Tensor& gate_weight,
                                         const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
                                         const std::optional<at::Tensor>& up_bias, const at::Tensor& down_weight,
                                         const std::optional<at::Tensor>& down_bias, double eps = 1e-5);

namespace detail {

/// x + transition(x, ...) in x's dtype, as a new contiguous tensor: the residual connection in training,
/// whose backward needs the old x.
at::Tensor add_transition(const at::Tensor& x, const std::optional<at::Tensor>& norm_weight,
                          const std::optional<at::Tensor>& norm_bias, const at::Tensor& gate_weight,
                          const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
                          const std::optional<at::Tensor>& up_bias, const at::Tensor& down_weight,
                          const std::optional<at::Tensor>& down_bias, double eps);

/// The arguments of transition(), in order.
struct Transition {
  at::Tensor x;
  std::optional<at::Tensor> norm_weight, norm_bias;
  at::Tensor gate_weight;
  std::optional<at::Tensor> gate_bias;
  at::Tensor up_weight;
  std::optional<at::Tensor> up_bias;
  at::Tensor down_weight;
  std::optional<at::Tensor> down_bias;
  double eps;

  /// The dtype of the products and of the result.
  at::ScalarType dtype() const { return gate_weight.scalar_type(); }
};

/// Raises unless the arguments fit.
void check_transition(const Transition& t);
/// The same for add_transition_(), which also writes x.
void check_transition_(const Transition& t);

/// The arguments, with copies of those that could change as x is written.
Transition read_first(Transition t);

/// Gradients are numbered in the order of the arguments.
constexpr size_t kTransitionGradients = 9;
using TransitionOutputMask = std::array<bool, kTransitionGradients>;
using TransitionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                       at::Tensor, at::Tensor, at::Tensor>;

/// Which intermediate gradients the wanted ones depend on: that of z, for x and its norm; those of the two factors,
/// value (up) and gate, for z and for their own layers.
struct TransitionNeeds {
  bool z, value, gate;

  explicit TransitionNeeds(const TransitionOutputMask& output_mask)
      : z(output_mask[0] || output_mask[1] || output_mask[2]),
        value(z || output_mask[5] || output_mask[6]),
        gate(z || output_mask[3] || output_mask[4]) {}
};

/// The hidden products, up = z @ up_weight.T + up_bias and gate = z @ gate_weight.T + gate_bias: (..., hidden), both or
/// neither.
struct TransitionProducts {
  std::optional<at::Tensor> up, gate;
};

/// transition(), or add_transition() with `add_residual`, and its hidden products (up, gate).
std::tuple<at::Tensor, at::Tensor, at::Tensor> transition_with_products(
    const at::Tensor& x, const std::optional<at::Tensor>& norm_weight, const std::optional<at::Tensor>& norm_bias,
    const at::Tensor& gate_weight, const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
    const std::optional<at::Tensor>& up_bias, const at::Tensor& down_weight, const std::optional<at::Tensor>& down_bias,
    double eps, bool add_residual);

/// The gradients of transition() where `output_mask` asks for them, and empty tensors elsewhere. Recomputes the hidden
/// products, unless they are given; no gradient depends on down_bias. With `add_residual`, dx is the gradient of
/// x + transition(x), so it includes grad itself.
TransitionGradients transition_backward(const at::Tensor& grad, const at::Tensor& x,
                                        const std::optional<at::Tensor>& norm_weight,
                                        const std::optional<at::Tensor>& norm_bias, const at::Tensor& gate_weight,
                                        const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
                                        const std::optional<at::Tensor>& up_bias, const at::Tensor& down_weight,
                                        double eps, TransitionOutputMask output_mask, bool add_residual,
                                        const std::optional<at::Tensor>& up = {},
                                        const std::optional<at::Tensor>& gate = {});

void check_transition_with_products(const Transition& t);
/// t has no down_bias.
void check_transition_backward(const at::Tensor& grad, const Transition& t, const TransitionOutputMask& output_mask,
                               const TransitionProducts& products);

/// Allocates the gradients, uninitialised.
TransitionGradients empty_transition_gradients(const Transition& t, const TransitionOutputMask& output_mask);

/// Turns functions that take a Transition into functions with the signatures of the operators.
template <class Signature>
struct TransitionSignature;

template <class... Args>
struct TransitionSignature<at::Tensor(const at::Tensor&, Args...)> {
  template <auto kernel>
  static at::Tensor functional(const at::Tensor& x, Args... args) {
    return kernel(Transition{x, args...});
  }
  template <auto kernel>
  static void in_place(at::Tensor& x, Args... args) {
    kernel(Transition{x, args...});
  }
};
using TransitionKernel = TransitionSignature<decltype(transition)>;

template <auto kernel>
std::tuple<at::Tensor, at::Tensor, at::Tensor> transition_with_products_kernel(
    const at::Tensor& x, const std::optional<at::Tensor>& norm_weight, const std::optional<at::Tensor>& norm_bias,
    const at::Tensor& gate_weight, const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
    const std::optional<at::Tensor>& up_bias, const at::Tensor& down_weight, const std::optional<at::Tensor>& down_bias,
    double eps, bool add_residual) {
  return kernel(
      Transition{x, norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, eps},
      add_residual);
}

template <auto kernel>
TransitionGradients transition_backward_kernel(
    const at::Tensor& grad, const at::Tensor& x, const std::optional<at::Tensor>& norm_weight,
    const std::optional<at::Tensor>& norm_bias, const at::Tensor& gate_weight,
    const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight, const std::optional<at::Tensor>& up_bias,
    const at::Tensor& down_weight, double eps, TransitionOutputMask output_mask, bool add_residual,
    const std::optional<at::Tensor>& up, const std::optional<at::Tensor>& gate) {
  return kernel(
      grad,
      Transition{x, norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, std::nullopt, eps},
      output_mask, add_residual, TransitionProducts{up, gate});
}

}  // namespace detail
}  // namespace torchops
