#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/gated.h"
#include "cpu/linear.h"
#include "ops/common.h"
#include "ops/gate.h"

namespace torchops::cpu {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Eager writes the pre-activation, the gate and the product, three tensors of the same size. Here a panel of v is
// multiplied while its gate is in the cache. With fewer rows per panel, packing w would dominate.
constexpr int64_t kFewestRows = 128;

constexpr auto kSigmoid = detail::GluActivation::kSigmoid;

// x @ w.T + b for one panel.
Tensor product(const Tensor& x, const Tensor& w_t, const OptionalTensor& b) {
  const Tensor z = at::empty({x.size(0), w_t.size(1)}, w_t.options());
  linear_out(z, x, w_t, b);
  return z;
}

// Bytes per row that the kernels allocate besides scratch: z if v has another dtype, x as the product reads it, and a
// contiguous copy of v.
int64_t row_temporaries(const Tensor& v, const Tensor& x, const Tensor& w) {
  const bool wider = v.scalar_type() != w.scalar_type();
  return copied_row_bytes(x, w) + (wider ? w.size(0) * static_cast<int64_t>(w.element_size()) : 0) +
         (v.is_contiguous() ? 0 : w.size(0) * static_cast<int64_t>(v.element_size()));
}

Tensor gate_cpu(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check_gate(v, x, w, b);
  Tensor y = at::detail::empty_cpu(v.sizes(), v.options());
  const Tensor w_t = transposed(w);
  const RowPanels panels{.min_rows = kFewestRows, .row_temporaries = row_temporaries(v, x, w)};
  for_each_row_panel(y, {y, v, x}, panels, [&](const Operands& panel, const Operands&) {
    const Tensor& out = panel[0];
    const Tensor x_panel = panel[2].to(w.scalar_type());
    if (out.scalar_type() == w.scalar_type()) {
      // The result's own memory is the scratch.
      linear_out(out, x_panel, w_t, b);
      gated_out(out, panel[1], out, kSigmoid);
    } else {
      gated_out(out, panel[1], product(x_panel, w_t, b), kSigmoid);
    }
  });
  return y;
}

std::tuple<Tensor, Tensor> gate_with_product_cpu(const Tensor& v, const Tensor& x, const Tensor& w,
                                                 const OptionalTensor& b) {
  detail::check_gate_with_product(v, x, w, b);
  Tensor y = at::detail::empty_cpu(v.sizes(), v.options()), z = at::detail::empty_cpu(v.sizes(), w.options());
  const Tensor w_t = transposed(w);
  const RowPanels panels{.min_rows = kFewestRows, .row_temporaries = row_temporaries(v, x, w)};
  for_each_row_panel(y, {y, v, x, z}, panels, [&](const Operands& panel, const Operands&) {
    linear_out(panel[3], panel[2].to(w.scalar_type()), w_t, b);
    gated_out(panel[0], panel[1], panel[3], kSigmoid);
  });
  return {y, z};
}

void gate_cpu_(Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check_gate_(v, x, w, b);
  const Tensor input = detail::coincide(v, x) ? x : detail::read_first(v, x), weight = detail::read_first(v, w);
  const OptionalTensor bias = detail::read_first(v, b);
  const Tensor w_t = transposed(weight);
  // If v has the dtype of w, the products go to preallocated scratch.
  const bool mixed = v.scalar_type() != w.scalar_type();
  const RowPanels panels{
      .min_rows = kFewestRows, .scratch = mixed ? 0 : 1, .row_temporaries = row_temporaries(v, x, w)};
  for_each_row_panel(v, {v, input}, panels, [&](const Operands& panel, const Operands& scratch) {
    const Tensor &out = panel[0], x_panel = panel[1].to(w.scalar_type());
    if (mixed) {
      gated_out(out, out, product(x_panel, w_t, bias), kSigmoid);
    } else {
      linear_out(scratch[0], x_panel, w_t, bias);
      gated_out(out, out, scratch[0], kSigmoid);
    }
  });
}

// With z = x @ w.T + b, s = sigmoid(z) and the cotangent g:
//   dv = g * s,  dz = g * v * s * (1 - s),  dx = dz @ w,  dw = dz.T @ x,  db = dz summed over the rows,
// where v * s is the result y, which is enough.
detail::GateGradients gate_backward_cpu(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w,
                                        const OptionalTensor& b, std::array<bool, 4> output_mask, bool v_is_y,
                                        const OptionalTensor& kept) {
  detail::check_gate_backward(grad, v, x, w, b, output_mask, kept);
  const detail::GateGradients gradients = detail::empty_gate_gradients(v, x, w, output_mask);
  const auto& [dv, dx, dw, db] = gradients;
  if (v.numel() == 0) {
    for (const Tensor& t : {dx, dw, db}) t.zero_();
    return gradients;
  }
  const Tensor grad_rows = detail::as_rows(grad), v_rows = detail::as_rows(v), x_rows = detail::as_rows(x);
  const OptionalTensor kept_rows = kept ? OptionalTensor(detail::as_rows(*kept)) : kept;
  const Tensor dv_rows = output_mask[0] ? detail::as_rows(dv) : dv, dx_rows = output_mask[1] ? detail::as_rows(dx) : dx;
  const Tensor w_t = transposed(w);
  const Chunks chunks(x_rows, w, 1);
  const WeightGradient weight(dw, output_mask[2], db, output_mask[3], chunks);
  chunks.for_each_panel([&](int64_t chunk, int64_t begin, int64_t end) {
    const auto panel_of = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    const Tensor g = panel_of(grad_rows), x_panel = panel_of(x_rows).to(w.scalar_type());
    const Tensor z = kept ? panel_of(*kept_rows) : product(x_panel, w_t, b);
    const bool needs_dz = output_mask[1] || output_mask[2] || output_mask[3];
    const Tensor dz = !needs_dz ? Tensor() : kept ? at::empty(z.sizes(), z.options()) : z;
    gated_backward_out(output_mask[0] ? panel_of(dv_rows) : Tensor(), dz, g, needs_dz ? panel_of(v_rows) : Tensor(), z,
                       kSigmoid, v_is_y);
    if (!needs_dz) return;
    if (output_mask[1]) input_gradient(panel_of(dx_rows), dz, w);
    weight.add(chunk, dz, x_panel);
  });
  weight.finish();
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("gate", gate_cpu);
  m.impl("gate_", gate_cpu_);
  m.impl("_gate", gate_with_product_cpu);
  m.impl("_gate_backward", gate_backward_cpu);
}

}  // namespace
}  // namespace torchops::cpu
