#include <ATen/EmptyTensor.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_cpu_dispatch.h>
#include <ATen/ops/silu_backward_cpu_dispatch.h>
#include <ATen/ops/silu_cpu_dispatch.h>
#include <ATen/ops/sum_cpu_dispatch.h>
#include <torch/library.h>

#include "cpu/gated.h"
#include "cpu/layer_norm.h"
#include "cpu/linear.h"
#include "ops/common.h"
#include "ops/transition.h"

// A panel of rows is normalised and multiplied to the hidden features and back while it is in the cache. Eager writes
// z, both factors, the activation and the product; all but z have the hidden features.
namespace torchops::cpu {
namespace {

using detail::Transition;
using detail::TransitionGradients;
using detail::TransitionOutputMask;
using detail::TransitionProducts;

// Shared by all panels of a call.
class Layers {
 public:
  explicit Layers(const Transition& t)
      : t_(t),
        affine_(t.x, t.x.sizes().slice(t.x.dim() - 1), t.norm_weight, t.norm_bias),
        gate_t_(transposed(t.gate_weight)),
        up_t_(transposed(t.up_weight)),
        down_t_(transposed(t.down_weight)) {}

  const Transition& arguments() const { return t_; }
  const Affine& affine() const { return affine_; }

  /// The layer norm of contiguous rows, with mean and rstd.
  using Normalized = std::tuple<Tensor, Tensor, Tensor>;
  Normalized normalized(const Tensor& rows) const {
    return at::cpu::native_layer_norm(rows, {rows.size(1)}, affine_.weight, affine_.bias, t_.eps);
  }
  /// z in the dtype of the products.
  Tensor z(const Normalized& normalized) const { return std::get<0>(normalized).to(t_.dtype()); }

  Tensor gate(const Tensor& z) const { return linear(z, gate_t_, t_.gate_bias); }
  Tensor up(const Tensor& z) const { return linear(z, up_t_, t_.up_bias); }
  /// up and gate of rows, into `up` and `gate`.
  void products_out(const Tensor& up, const Tensor& gate, const Tensor& rows) const {
    const Tensor z = this->z(normalized(rows.contiguous()));
    linear_out(up, z, up_t_, t_.up_bias);
    linear_out(gate, z, gate_t_, t_.gate_bias);
  }
  /// The rest of transition() of these rows, into `out`; `h` is scratch of hidden features, and may be `gate`.
  void down_out(const Tensor& out, const Tensor& h, const Tensor& up, const Tensor& gate) const {
    gated_out(h, up, gate, detail::GluActivation::kSilu);
    linear_out(out, h, down_t_, t_.down_bias);
  }
  /// transition() of rows, into `out`.
  void forward(const Tensor& out, const Tensor& rows) const {
    const Tensor z = this->z(normalized(rows.contiguous())), gate = this->gate(z);
    down_out(out, gate, up(z), gate);
  }

  /// The number of rows follows from the hidden features of a panel, since these have to stay in the cache.
  RowPanels panels() const {
    const auto element = static_cast<int64_t>(t_.gate_weight.element_size());
    const int64_t hidden_bytes = t_.gate_weight.size(0) * element;
    const int64_t row_bytes = t_.x.size(-1) * static_cast<int64_t>(t_.x.element_size());
    return {.min_rows = 64,  // with fewer, packing the weights dominates
            .row_temporaries = 2 * hidden_bytes + 3 * row_bytes,
            .widest_row_bytes = hidden_bytes};
  }

 private:
  static Tensor linear(const Tensor& rows, const Tensor& w_t, const std::optional<Tensor>& b) {
    Tensor out = at::empty({rows.size(0), w_t.size(1)}, w_t.options());
    linear_out(out, rows, w_t, b);
    return out;
  }

  const Transition& t_;
  Affine affine_;
  Tensor gate_t_, up_t_, down_t_;
};

Tensor transition_cpu(const Transition& t) {
  detail::check_transition(t);
  const Layers layers(t);
  Tensor y = at::detail::empty_cpu(t.x.sizes(), t.gate_weight.options());
  for_each_row_panel(y, {y, t.x}, layers.panels(),
                     [&](const Operands& panel, const Operands&) { layers.forward(panel[0], panel[1]); });
  return y;
}

// sum = x + transition(x), panel by panel. `sum` may be x.
void add_to(const Tensor& sum, const Transition& t) {
  const Layers layers(t);
  for_each_row_panel(sum, {sum, t.x}, layers.panels(), [&](const Operands& panel, const Operands&) {
    const Tensor update = at::empty(panel[1].sizes(), t.gate_weight.options());
    layers.forward(update, panel[1]);
    Tensor target = panel[0];
    at::cpu::add_out(target, panel[1], update);
  });
}

void transition_cpu_(const Transition& arguments) {
  detail::check_transition_(arguments);
  add_to(arguments.x, detail::read_first(arguments));
}

Tensor add_transition_cpu(const Transition& t) {
  detail::check_transition(t);
  Tensor sum = at::detail::empty_cpu(t.x.sizes(), t.x.options());
  add_to(sum, t);
  return sum;
}

std::tuple<Tensor, Tensor, Tensor> transition_with_products_cpu(const Transition& t, bool add_residual) {
  detail::check_transition_with_products(t);
  const Layers layers(t);
  const at::TensorOptions options = t.gate_weight.options();
  Tensor y = at::detail::empty_cpu(t.x.sizes(), add_residual ? t.x.options() : options);
  const auto hidden = detail::with_last(t.x.sizes(), t.gate_weight.size(0));
  const Tensor up = at::detail::empty_cpu(hidden, options), gate = at::detail::empty_cpu(hidden, options);
  for_each_row_panel(y, {y, t.x, up, gate}, layers.panels(), [&](const Operands& panel, const Operands&) {
    Tensor out = panel[0];
    const Tensor &rows = panel[1], &up_rows = panel[2], &gate_rows = panel[3];
    layers.products_out(up_rows, gate_rows, rows);
    const Tensor h = at::empty(gate_rows.sizes(), options);
    const Tensor update = add_residual ? at::empty(rows.sizes(), options) : out;
    layers.down_out(update, h, up_rows, gate_rows);
    if (add_residual) at::cpu::add_out(out, rows, update);
  });
  return {y, up, gate};
}

// --- gradients

// With u = gate(z), v = up(z), h = silu(u) * v and the cotangent g:
//   dh = g @ down,  dv = dh * silu(u),  du = dh * v * silu'(u),  dz = dv @ up + du @ gate, then back through the norm;
//   ddown = g.T @ h,  dup = dv.T @ z,  dgate = du.T @ z, and the bias gradients are sums over the rows.
TransitionGradients transition_backward_cpu(const Tensor& grad, const Transition& t,
                                            const TransitionOutputMask& output_mask, bool add_residual,
                                            const TransitionProducts& products) {
  detail::check_transition_backward(grad, t, output_mask, products);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TransitionGradients gradients = detail::empty_transition_gradients(t, output_mask);
  const auto& [dx, dnorm_weight, dnorm_bias, dgate, dgate_bias, dup, dup_bias, ddown, ddown_bias] = gradients;
  if (grad.numel() == 0) {
    std::apply([](const auto&... gradient) { (gradient.zero_(), ...); }, gradients);
    return gradients;
  }
  const detail::TransitionNeeds needs(output_mask);
  const Layers layers(t);
  const Tensor grad_rows = detail::as_rows(grad), x_rows = detail::as_rows(t.x);
  const Tensor dx_rows = output_mask[0] ? detail::as_rows(dx) : dx;
  const bool kept = products.up.has_value();
  const Tensor up_rows = kept ? detail::as_rows(*products.up) : Tensor(),
               gate_rows = kept ? detail::as_rows(*products.gate) : Tensor();
  const Chunks chunks(x_rows, t.gate_weight, 3);
  const WeightGradient gate(dgate, output_mask[3], dgate_bias, output_mask[4], chunks),
      up(dup, output_mask[5], dup_bias, output_mask[6], chunks),
      down(ddown, output_mask[7], ddown_bias, output_mask[8], chunks);
  const PanelSum norm_weight(dnorm_weight, output_mask[1], chunks), norm_bias(dnorm_bias, output_mask[2], chunks);
  chunks.for_each_panel([&](int64_t chunk, int64_t begin, int64_t end) {
    const auto panel_of = [&](const Tensor& rows) { return rows.narrow(0, begin, end - begin); };
    const Tensor g = panel_of(grad_rows);
    if (!needs.gate && !needs.value && !output_mask[7]) return down.add(chunk, g, {});
    // At least float32, for the sums over rows: in 16 bits, ATen's layer norm would add up the gradients of its
    // parameters in 16 bits too.
    const Tensor rows = panel_of(x_rows).to(detail::moments_dtype(t.x.scalar_type())).contiguous();
    const Layers::Normalized normalized = layers.normalized(rows);
    const Tensor z = layers.z(normalized), u = kept ? panel_of(gate_rows) : layers.gate(z);
    const bool reads_up = needs.gate || output_mask[7];
    const Tensor v = !reads_up ? Tensor() : kept ? panel_of(up_rows) : layers.up(z);
    const Tensor a = needs.value || output_mask[7] ? at::cpu::silu(u) : Tensor();
    down.add(chunk, g, output_mask[7] ? at::cpu::mul(a, v) : Tensor());
    if (!needs.gate && !needs.value) return;
    const Tensor dh = at::cpu::mm(g, t.down_weight);
    const Tensor dz = needs.z ? at::empty(rows.sizes(), rows.options()) : Tensor();
    if (needs.value) {
      const Tensor dv = at::cpu::mul(dh, a);
      up.add(chunk, dv, z);
      if (needs.z) input_gradient(dz, dv, t.up_weight);
    }
    if (needs.gate) {
      Tensor du = at::cpu::mul(dh, v);
      at::cpu::silu_backward_out(du, du, u);
      gate.add(chunk, du, z);
      if (needs.z) input_gradient(dz, du, t.gate_weight, /*accumulate=*/true);
    }
    if (!needs.z) return;
    const auto& [y, mean, rstd] = normalized;
    const auto [dx_panel, dweight, dbias] = layer_norm_gradients(dz, rows, {rows.size(1)}, mean, rstd, layers.affine(),
                                                                 {output_mask[0], output_mask[1], output_mask[2]});
    if (output_mask[0]) panel_of(dx_rows).copy_(add_residual ? dx_panel.add_(g) : dx_panel);
    norm_weight.add(chunk, dweight);
    norm_bias.add(chunk, dbias);
  });
  for (const PanelSum* sum : {&norm_weight, &norm_bias}) sum->finish();
  for (const WeightGradient* gradient : {&gate, &up, &down}) gradient->finish();
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("transition", detail::TransitionKernel::functional<transition_cpu>);
  m.impl("add_transition_", detail::TransitionKernel::in_place<transition_cpu_>);
  m.impl("_add_transition", detail::TransitionKernel::functional<add_transition_cpu>);
  m.impl("_transition", detail::transition_with_products_kernel<transition_with_products_cpu>);
  m.impl("_transition_backward", detail::transition_backward_kernel<transition_backward_cpu>);
}

}  // namespace
}  // namespace torchops::cpu
