#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/linear/launch.h"
#include "cuda/linear/layer_gradients.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/products.h"
#include "cuda/linear/run.cuh"
#include "cuda/linear/whole_vectors.h"
#include "cuda/passes/gate.cuh"
#include "ops/common.h"
#include "ops/gate.h"
#include "ops/overwriting.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// y = v * sigmoid(x @ w.T + b) by a fused kernel, if one can run and that is wanted. All are matrices; y may be v.
bool fused(const Tensor& y, const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  return gemm::run<gemm::GateRule>({.d = y, .a = x, .b = w, .bias = b, .c = &v});
}

// y for all rows of v and x; and the product if it is wanted. Both are contiguous.
void gate_out(const Tensor& y, const OptionalTensor& kept, const Tensor& v, const Tensor& x, const Tensor& w,
              const OptionalTensor& b) {
  if (y.numel() == 0) return;
  const Tensor y_rows = detail::as_rows(y), v_rows = unit_columns(detail::as_rows(v)), x_rows = detail::as_rows(x);
  const OptionalTensor bias = contiguous(b);
  const auto whole = WholeVectors::of(gemm::CopiedLayer::kGate, x_rows, w, {v_rows});
  if (!whole && !kept && fused(y_rows, v_rows, x_rows, w, bias)) return;
  const PanelProduct product(whole, w, bias);
  const bool copies_v = whole && !product.has_more_features(), copies = product.copies(x_rows) || copies_v;
  // If v has the dtype of w, the product can be written to the result.
  const bool scratch = (v.scalar_type() != w.scalar_type() && !kept) || product.has_more_features();
  const int64_t scratch_bytes = product.input_bytes(x_rows) + (scratch ? product.product_bytes() : 0) +
                                (copies_v ? whole->output_bytes(v_rows) : 0);
  const int64_t rows = y_rows.size(0), step = rows_of_panel(rows, w, bias.has_value(), scratch_bytes,
                                                            whole ? kMaxCopiedBytes : kMaxScratchBytes);
  for_each_panel_of(rows, step, [&](int64_t begin, int64_t end) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    Copies input_copies;
    const Tensor out = panel(y_rows), input = product.input(panel(x_rows), input_copies);
    const Tensor values = copies_v ? whole->output(panel(v_rows), input_copies) : panel(v_rows);
    input_copies.run();
    if (copies && !kept && !product.has_more_features() && fused(out, values, input, product.w, product.b)) return;
    const Tensor own = kept ? panel(detail::as_rows(*kept)) : out;
    const Tensor z = product(scratch ? product.empty(end - begin) : own, input);
    gate_rows(out, values, z);
    if (kept && scratch) Copies().add(own, z).run();
  });
}

Tensor gate_cuda(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check_gate(v, x, w, b);
  const c10::cuda::CUDAGuard guard(v.device());
  Tensor y = at::detail::empty_cuda(v.sizes(), v.options());
  gate_out(y, std::nullopt, v, x, w, b);
  return y;
}

std::tuple<Tensor, Tensor> gate_with_product_cuda(const Tensor& v, const Tensor& x, const Tensor& w,
                                                  const OptionalTensor& b) {
  detail::check_gate_with_product(v, x, w, b);
  const c10::cuda::CUDAGuard guard(v.device());
  Tensor y = at::detail::empty_cuda(v.sizes(), v.options()), z = at::detail::empty_cuda(v.sizes(), w.options());
  gate_out(y, z, v, x, w, b);
  return {y, z};
}

void gate_cuda_(Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check_gate_(v, x, w, b);
  if (v.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(v.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor input = detail::coincide(v, x) ? x : detail::read_first(v, x), weight = detail::read_first(v, w);
  const OptionalTensor bias = contiguous(detail::read_first(v, b));
  // v is overwritten as it is.
  const auto whole =
      v.scalar_type() == w.scalar_type() ? WholeVectors::of(gemm::CopiedLayer::kGate, input, weight, {}) : std::nullopt;
  const PanelProduct product(whole, weight, bias);
  const bool copies = product.copies(input);
  // Scratch for a panel of rows: the product, and x if it may be copied. It is allocated once, for the first matrix,
  // and gives the panels of all: by itself, a last matrix of fewer rows could have longer ones.
  Tensor products, inputs;
  const auto overwrite = [&](const detail::Operands& matrices) {
    const Tensor &target = matrices[0], &x_rows = matrices[1];
    if (!whole && fused(target, target, x_rows, weight, bias)) return;
    const int64_t scratch_bytes = product.product_bytes() + product.input_bytes(input);
    const int64_t step =
        products.defined() ? products.size(0) : rows_of_panel(target.size(0), w, bias.has_value(), scratch_bytes);
    for_each_panel_of(target.size(0), step, [&](int64_t begin, int64_t end) {
      const int64_t rows = end - begin;
      if (!products.defined()) {
        products = product.empty(rows);
        if (copies) inputs = at::detail::empty_cuda({rows, product.w.size(1)}, w.options());
      }
      const Tensor out = target.narrow(0, begin, rows), x_panel = x_rows.narrow(0, begin, rows);
      const Tensor factor = copies ? product.input(x_panel, inputs.narrow(0, 0, rows)) : x_panel;
      if ((whole || copies) && !product.has_more_features() && fused(out, out, factor, product.w, product.b)) return;
      gate_rows(out, out, product(products.narrow(0, 0, rows), factor));
    });
  };
  detail::overwriting(v, [&] { overwrite_rows({v, input}, 1, overwrite); });
}

using gemm::GradientCall;

// The arguments of the gradient kernels; nullopt if none can run. All tensors are matrices. With a float32 x, only
// in_one_pass() can use them.
GradientCall gradient_call(const Tensor& g, const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b,
                           bool v_is_y) {
  GradientCall call = v.scalar_type() == w.scalar_type() ? gemm::gradient_call(g, x, w, b) : std::nullopt;
  const auto from_v = call ? gemm::operand(v) : std::nullopt;
  if (!from_v) return std::nullopt;
  (v_is_y ? call->first.y : call->first.c) = *from_v;
  return call;
}

// All gradients in one pass over the rows. Returns false, with nothing done, if that kernel cannot run or not all
// gradients are wanted. The gradients are contiguous.
bool in_one_pass(const detail::GateGradients& gradients, const GradientCall& call, std::array<bool, 4> output_mask) {
  if (!call || !output_mask[0] || !output_mask[1] || !output_mask[2] || call->second.k % 8 != 0) return false;
  auto [problem, c] = *call;
  const auto& [dv, dx, dw, db] = gradients;
  problem.dx = dx.mutable_data_ptr();
  problem.dc = dv.mutable_data_ptr();
  problem.dw = dw.mutable_data_ptr();
  problem.dbias = output_mask[3] ? db.mutable_data_ptr() : nullptr;
  return gemm::run_chosen<gemm::GateGradients>(problem, c, dx);
}

// dz, and dv and db if they are wanted, by a kernel that recomputes the product without storing it. Returns false, with
// nothing done, if it cannot run or cuBLAS is faster.
bool fused_cotangents(const Tensor& dz, const Tensor& dv, const Tensor& db, const GradientCall& call,
                      std::array<bool, 4> output_mask) {
  const auto to_dz = gemm::operand(dz);
  if (!call || !to_dz) return false;
  auto [problem, c] = *call;
  const bool kernel_sums = db.scalar_type() == dz.scalar_type();  // it cannot write float32
  problem.dz = *to_dz;
  problem.dc = output_mask[0] ? dv.mutable_data_ptr() : nullptr;
  problem.dbias = kernel_sums && output_mask[3] ? db.mutable_data_ptr() : nullptr;
  if (!gemm::run_cotangents<gemm::GateCotangents>(problem, c, dz)) return false;
  if (!kernel_sums && output_mask[3]) sum_columns(db, dz);
  return true;
}

// The same on every GPU from compute capability 8.0 on. Another pass sums dz, as it is rounded.
bool portable_cotangents(const Tensor& dz, const Tensor& dv, const Tensor& db, const Tensor& g, const Tensor& v,
                         const Tensor& x, const Tensor& w, const OptionalTensor& b, std::array<bool, 4> output_mask,
                         bool v_is_y) {
  if (!gemm::run<gemm::CotangentsOf<gemm::GateRule>>({.d = dz,
                                                      .a = x,
                                                      .b = w,
                                                      .bias = b,
                                                      .c = &v,
                                                      .g = &g,
                                                      .d2 = output_mask[0] ? &dv : nullptr,
                                                      .c_is_y = v_is_y})) {
    return false;
  }
  if (output_mask[3]) sum_columns(db, dz);
  return true;
}

// The gradients by way of dz, the only scratch of the result's size: if cuBLAS computes the product, which may be
// `kept`, that is written there too. All tensors are matrices. The gradients of weights and biases may be float32.
void by_cotangents(const detail::GateGradients& gradients, const Tensor& g, const Tensor& v, const Tensor& x,
                   const Tensor& w, const OptionalTensor& b, std::array<bool, 4> output_mask, bool v_is_y,
                   const OptionalTensor& kept, const GradientCall& call) {
  const auto& [dv, dx, dw, db] = gradients;
  const Tensor dz = at::detail::empty_cuda(v.sizes(), w.options());
  if (kept || (!fused_cotangents(dz, dv, db, call, output_mask) &&
               !portable_cotangents(dz, dv, db, g, v, x, w, b, output_mask, v_is_y))) {
    const int64_t rows = dz.size(0), step = rows_of_panel(rows, w, b && !kept, rounded_row_bytes(x, w));
    PassSums sums(output_mask[3], w, 1, rows, step, dz.size(1));
    for_each_panel_of(rows, step, [&](int64_t begin, int64_t end) {
      const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
      if (!kept) linear_out(panel(dz), panel(x).to(w.scalar_type()), w, b);
      gate_backward_rows(sums, output_mask[0] ? panel(dv) : dv, panel(dz), panel(kept ? *kept : dz), panel(g), panel(v),
                         output_mask[0], v_is_y);
    });
    if (output_mask[3]) sums.finish(db);
  }
  if (output_mask[1]) input_gradient(dx, dz, w);
  if (output_mask[2]) weight_gradient_out(dw, dz, x);
}

}  // namespace

// The formulas are in src/cpu/gate_kernel.cpp.
void gate_gradients(detail::GateGradients gradients, const Tensor& grad, const Tensor& v, const Tensor& x,
                    const Tensor& w, const OptionalTensor& b, std::array<bool, 4> output_mask, bool v_is_y,
                    const OptionalTensor& z) {
  auto& [dv, dx, dw, db] = gradients;
  if (v.numel() == 0) {
    for (const Tensor& t : {dx, dw, db}) t.zero_();
    return;
  }
  const Tensor g_rows = unit_columns(detail::as_rows(grad)), v_rows = unit_columns(detail::as_rows(v));
  const Tensor x_rows = detail::as_rows(x), dv_rows = output_mask[0] ? detail::as_rows(dv) : dv;
  const Tensor dx_rows = output_mask[1] ? detail::as_rows(dx) : dx;
  const OptionalTensor bias = contiguous(b), kept = z ? OptionalTensor(unit_columns(detail::as_rows(*z))) : z;
  const GradientCall call = kept ? std::nullopt : gradient_call(g_rows, v_rows, x_rows, w, bias, v_is_y);
  if (in_one_pass(gradients, call, output_mask)) return;
  const bool rounds_x = x.scalar_type() != w.scalar_type();
  if (!rounds_x || !output_mask[2]) {
    by_cotangents({dv_rows, dx_rows, dw, db}, g_rows, v_rows, x_rows, w, bias, output_mask, v_is_y, kept,
                  rounds_x ? std::nullopt : call);
    return;
  }
  for_each_rounded_panel(x_rows, {dw, db}, [&](int64_t begin, const Tensor& x_panel, const auto& parts) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, x_panel.size(0)); };
    const Tensor g_panel = panel(g_rows), v_panel = panel(v_rows);
    by_cotangents({output_mask[0] ? panel(dv_rows) : dv, output_mask[1] ? panel(dx_rows) : dx, parts[0], parts[1]},
                  g_panel, v_panel, x_panel, w, bias, output_mask, v_is_y, kept ? OptionalTensor(panel(*kept)) : kept,
                  kept ? std::nullopt : gradient_call(g_panel, v_panel, x_panel, w, bias, v_is_y));
  });
}

namespace {

// All gradients, of copies.
detail::GateGradients gradients_of_copies(const WholeVectors& whole, const Tensor& grad, const Tensor& v,
                                          const Tensor& x, const Tensor& w, const OptionalTensor& b,
                                          std::array<bool, 4> output_mask, bool v_is_y, const OptionalTensor& z) {
  Copies copies;
  const Tensor g_copy = whole.output(grad, copies), v_copy = whole.output(v, copies), x_copy = whole.input(x, copies);
  const Tensor w_copy = whole.weight(w, copies);
  const OptionalTensor b_copy = whole.bias(b, copies);
  const OptionalTensor z_copy = z ? OptionalTensor(whole.output(*z, copies)) : z;
  copies.run();
  detail::GateGradients gradients = detail::empty_gate_gradients(v_copy, x_copy, w_copy, output_mask);
  gate_gradients(gradients, g_copy, v_copy, x_copy, w_copy, b_copy, output_mask, v_is_y, z_copy);
  return gradients;
}

detail::GateGradients gate_backward_cuda(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w,
                                         const OptionalTensor& b, std::array<bool, 4> output_mask, bool v_is_y,
                                         const OptionalTensor& z) {
  detail::check_gate_backward(grad, v, x, w, b, output_mask, z);
  const c10::cuda::CUDAGuard guard(v.device());
  if (const auto whole = WholeVectors::of(gemm::CopiedLayer::kGateGradients, x, w, {grad, v})) {
    const auto [dv, dx, dw, db] = gradients_of_copies(*whole, grad, v, x, w, b, output_mask, v_is_y, z);
    Copies copies;
    detail::GateGradients gradients{first_elements(dv, v.sizes(), copies), first_elements(dx, x.sizes(), copies),
                                    first_elements(dw, w.sizes(), copies),
                                    first_elements(db, w.sizes().slice(0, 1), copies)};
    copies.run();
    return gradients;
  }
  detail::GateGradients gradients = detail::empty_gate_gradients(v, x, w, output_mask);
  gate_gradients(gradients, grad, v, x, w, b, output_mask, v_is_y, z);
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("gate", gate_cuda);
  m.impl("gate_", gate_cuda_);
  m.impl("_gate", gate_with_product_cuda);
  m.impl("_gate_backward", gate_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
