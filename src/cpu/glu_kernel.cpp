#include <ATen/EmptyTensor.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <torch/library.h>

#include "cpu/gated.h"
#include "cpu/linear.h"
#include "ops/common.h"
#include "ops/glu.h"

namespace torchops::cpu {
namespace {

using OptionalTensor = std::optional<Tensor>;
using detail::GluActivation;

constexpr int64_t kFewestRows = 128;  // of a panel; with fewer, packing the weights dominates

// Whether one product of both weights is faster than two: where beginning one, which takes oneDNN about 20 microseconds
// in 16 bits, or reading x counts beside a scratch of twice the result. x is not copied.
bool multiplies_both(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& wg) {
  constexpr int64_t most_elements = int64_t{1} << 16;
  return y.numel() > 0 && y.numel() <= most_elements && x.is_contiguous() && x.scalar_type() == w.scalar_type() &&
         detail::are_halves(w, wg);
}

void glu_of_both(const Tensor& y, const Tensor& x, const Tensor& w, const OptionalTensor& b, const OptionalTensor& bg,
                 GluActivation activation) {
  const int64_t n = w.size(0);
  Tensor both = at::empty({y.size(0), 2 * n}, w.options());
  const Tensor value = both.narrow(1, 0, n), gate = both.narrow(1, n, n);
  const Tensor weights_t = transposed(both_halves(w));
  if (b || bg) {
    b ? value.copy_(*b) : value.zero_();
    bg ? gate.copy_(*bg) : gate.zero_();
    at::cpu::addmm_(both, x, weights_t);
  } else {
    at::cpu::mm_out(both, x, weights_t);
  }
  gated_out(y, value, gate, activation);
}

// Eager writes both products and the activation, three tensors the size of the result. Here the second product is a
// panel of scratch, and the result is computed while both are in the cache.
Tensor glu_cpu(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg,
               std::string_view activation) {
  check_glu(x, w, wg, b, bg, activation);
  const GluActivation act = detail::glu_activation(activation);
  Tensor y = at::detail::empty_cpu(detail::with_last(x.sizes(), w.size(0)), w.options());
  if (multiplies_both(y, x, w, wg)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    glu_of_both(detail::as_rows(y), detail::as_rows(x), w, b, bg, act);
    return y;
  }
  const Tensor w_t = transposed(w), wg_t = transposed(wg);
  const RowPanels panels{.min_rows = kFewestRows, .scratch = 1, .row_temporaries = copied_row_bytes(x, w)};
  for_each_row_panel(y, {y, x}, panels, [&](const Operands& panel, const Operands& scratch) {
    Tensor out = panel[0], gate = scratch[0];
    const Tensor x_panel = panel[1].to(w.scalar_type());
    linear_out(gate, x_panel, wg_t, bg);
    linear_out(out, x_panel, w_t, b);
    gated_out(out, out, gate, act);
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> glu_with_products_cpu(const Tensor& x, const Tensor& w, const Tensor& wg,
                                                         const OptionalTensor& b, const OptionalTensor& bg,
                                                         std::string_view activation) {
  detail::check_glu_with_products(x, w, wg, b, bg, activation);
  const GluActivation act = detail::glu_activation(activation);
  const auto empty = [&] { return at::detail::empty_cpu(detail::with_last(x.sizes(), w.size(0)), w.options()); };
  Tensor y = empty(), z = empty(), u = empty();
  const Tensor w_t = transposed(w), wg_t = transposed(wg);
  const RowPanels panels{.min_rows = kFewestRows, .row_temporaries = copied_row_bytes(x, w)};
  for_each_row_panel(y, {y, x, z, u}, panels, [&](const Operands& panel, const Operands&) {
    const Tensor x_panel = panel[1].to(w.scalar_type());
    linear_out(panel[2], x_panel, w_t, b);
    linear_out(panel[3], x_panel, wg_t, bg);
    gated_out(panel[0], panel[2], panel[3], act);
  });
  return {y, z, u};
}

// With z = x @ w.T + b, u = x @ wg.T + bg and the cotangent g:
//   dz = g * act(u),  du = g * z * act'(u),  dx = dz @ w + du @ wg,
//   dw = dz.T @ x,  dwg = du.T @ x,  db and dbg are dz and du summed over the rows.
detail::GluGradients glu_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg,
                                      const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation,
                                      std::array<bool, 5> output_mask, const OptionalTensor& z,
                                      const OptionalTensor& u) {
  detail::check_glu_backward(grad, x, w, wg, b, bg, activation, output_mask, z, u);
  const GluActivation act = detail::glu_activation(activation);
  const detail::GluGradients gradients = detail::empty_glu_gradients(x, w, output_mask);
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  if (grad.numel() == 0) {
    for (const Tensor& t : {dx, dw, dwg, db, dbg}) t.zero_();
    return gradients;
  }
  const Tensor grad_rows = detail::as_rows(grad), x_rows = detail::as_rows(x);
  const Tensor dx_rows = output_mask[0] ? detail::as_rows(dx) : dx;
  const auto rows_of = [](const OptionalTensor& t) { return t ? OptionalTensor(detail::as_rows(*t)) : t; };
  const OptionalTensor z_rows = rows_of(z), u_rows = rows_of(u);
  const Tensor w_t = transposed(w), wg_t = transposed(wg);
  const Chunks chunks(x_rows, w, 2);
  const WeightGradient value(dw, output_mask[1], db, output_mask[3], chunks),
      gate(dwg, output_mask[2], dbg, output_mask[4], chunks);
  const bool needs_dz = output_mask[0] || output_mask[1] || output_mask[3],
             needs_du = output_mask[0] || output_mask[2] || output_mask[4];
  chunks.for_each_panel([&](int64_t chunk, int64_t begin, int64_t end) {
    const auto panel_of = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    const Tensor g = panel_of(grad_rows), x_panel = panel_of(x_rows).to(w.scalar_type());
    const Tensor dx_panel = output_mask[0] ? panel_of(dx_rows) : dx_rows;
    const auto empty = [&] { return at::empty(g.sizes(), w.options()); };
    const auto product = [&](const OptionalTensor& kept, const Tensor& weight_t, const OptionalTensor& bias) {
      if (kept) return panel_of(*kept);
      const Tensor out = empty();
      linear_out(out, x_panel, weight_t, bias);
      return out;
    };
    const Tensor u_panel = product(u_rows, wg_t, bg), z_panel = needs_du ? product(z_rows, w_t, b) : Tensor();
    const Tensor dz = needs_dz ? empty() : Tensor(), du = !needs_du ? Tensor() : u ? empty() : u_panel;
    gated_backward_out(dz, du, g, z_panel, u_panel, act);
    if (needs_dz) {
      if (output_mask[0]) input_gradient(dx_panel, dz, w);
      value.add(chunk, dz, x_panel);
    }
    if (needs_du) {
      if (output_mask[0]) input_gradient(dx_panel, du, wg, /*accumulate=*/true);
      gate.add(chunk, du, x_panel);
    }
  });
  value.finish();
  gate.finish();
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("glu", glu_cpu);
  m.impl("_glu", glu_with_products_cpu);
  m.impl("_glu_backward", glu_backward_cpu);
}

}  // namespace
}  // namespace torchops::cpu
