#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/cat_cuda_dispatch.h>
#include <ATen/ops/empty_like.h>

#include "cuda/gemm/ways.h"
#include "cuda/linear/launch.h"
#include "cuda/linear/layer_gradients.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/products.h"
#include "cuda/linear/run.cuh"
#include "cuda/passes/glu.h"
#include "cuda/passes/pass.cuh"
#include "ops/common.h"
#include "ops/glu.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using detail::GluActivation;
using Products = std::optional<GluPair>;

// The operands of gradients: matrices, and contiguous biases.
struct BackwardRows {
  Tensor g, x;  // g has contiguous rows; it is undefined if a kernel reads the cotangent elsewhere
  const Tensor &w, &wg;
  OptionalTensor b, bg;
  GluActivation activation;
  std::array<bool, 5> output_mask;
  Products kept;
  bool accumulate;  // to dx

  bool rounds_x() const { return x.scalar_type() != w.scalar_type(); }
};

using gemm::GradientCall;

// The arguments of the gradient kernels; nullopt if none can run. With a float32 x, only in_one_pass() can use them.
GradientCall gradient_call(const BackwardRows& a) {
  GradientCall call = a.kept ? std::nullopt : gemm::gradient_call(a.g, a.x, a.w, a.b);
  const auto from_wg = call ? gemm::operand(a.wg) : std::nullopt;
  if (!from_wg) return std::nullopt;
  call->first.w2 = *from_wg;
  call->first.bias2 = a.bg ? a.bg->const_data_ptr() : nullptr;
  return call;
}

// All gradients in one pass over the rows. Returns false, with nothing done, if that kernel cannot run or not all
// gradients are wanted. The gradients are contiguous.
bool in_one_pass(const detail::GluGradients& gradients, const BackwardRows& a, const GradientCall& call) {
  if (!call || !a.output_mask[0] || !a.output_mask[1] || !a.output_mask[2] || call->second.k % 8 != 0) return false;
  auto [problem, c] = *call;
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  const Tensor own = a.accumulate ? at::empty_like(a.x, at::MemoryFormat::Contiguous) : dx;
  problem.dx = own.mutable_data_ptr();
  problem.dw = dw.mutable_data_ptr();
  problem.dw2 = dwg.mutable_data_ptr();
  problem.dbias = a.output_mask[3] ? db.mutable_data_ptr() : nullptr;
  problem.dbias2 = a.output_mask[4] ? dbg.mutable_data_ptr() : nullptr;
  const bool done = a.activation == GluActivation::kSilu ? gemm::run_chosen<gemm::GluSiluGradients>(problem, c, own)
                                                         : gemm::run_chosen<gemm::GluSigmoidGradients>(problem, c, own);
  if (done && a.accumulate) dx.add_(own);
  return done;
}

// All gradients but dx by a kernel that recomputes both products; if dx is wanted, also dz and du in alternating groups
// of columns. False, with nothing done, if it cannot run or not all are wanted. The gradients are contiguous.
bool weights_in_one_pass(const detail::GluGradients& gradients, const Tensor& cotangents, const BackwardRows& a,
                         const GradientCall& call) {
  if (!call || !a.output_mask[1] || !a.output_mask[2] || call->second.k % 8 != 0) return false;
  auto [problem, c] = *call;
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  if (a.output_mask[0]) problem.dz = *gemm::operand(cotangents);
  problem.dw = dw.mutable_data_ptr();
  problem.dw2 = dwg.mutable_data_ptr();
  problem.dbias = a.output_mask[3] ? db.mutable_data_ptr() : nullptr;
  problem.dbias2 = a.output_mask[4] ? dbg.mutable_data_ptr() : nullptr;
  problem.has_float32_sums = dw.scalar_type() != a.w.scalar_type();
  return a.activation == GluActivation::kSilu ? gemm::run_chosen<gemm::GluSiluWeightGradients>(problem, c, dw)
                                              : gemm::run_chosen<gemm::GluSigmoidWeightGradients>(problem, c, dw);
}

// The rows of w and wg in the alternating order in which weights_in_one_pass() writes their cotangents.
Tensor interleaved(const Tensor& w, const Tensor& wg) {
  const auto groups = [](const Tensor& t) { return t.reshape({-1, gemm::GradientProblem::kTurn, t.size(1)}); };
  return at::cuda::cat(at::TensorList({groups(w), groups(wg)}), 1).view({-1, w.size(1)});
}

// The gradients of biases, if they are wanted.
void sum_cotangents(const detail::GluGradients& gradients, const GluPair& cotangents, std::array<bool, 5> output_mask) {
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  if (output_mask[3]) sum_columns(db, cotangents.z);
  if (output_mask[4]) sum_columns(dbg, cotangents.u);
}

// dz, du and the gradients of biases by a kernel that recomputes both products without storing them. Returns false,
// with nothing done, if it cannot run or cuBLAS is faster.
bool fused_cotangents(const detail::GluGradients& gradients, const GluPair& cotangents, const BackwardRows& a,
                      const GradientCall& call) {
  const auto& [dz, du] = cotangents;
  const auto to_dz = gemm::operand(dz), to_du = gemm::operand(du);
  if (!call || !to_dz || !to_du) return false;
  auto [problem, c] = *call;
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  const bool kernel_sums = db.scalar_type() == a.w.scalar_type();  // it cannot write float32
  problem.dz = *to_dz;
  problem.dz2 = *to_du;
  problem.dbias = kernel_sums && a.output_mask[3] ? db.mutable_data_ptr() : nullptr;
  problem.dbias2 = kernel_sums && a.output_mask[4] ? dbg.mutable_data_ptr() : nullptr;
  const bool done = a.activation == GluActivation::kSilu
                        ? gemm::run_cotangents<gemm::GluSiluCotangents>(problem, c, dz)
                        : gemm::run_cotangents<gemm::GluSigmoidCotangents>(problem, c, dz);
  if (done && !kernel_sums) sum_cotangents(gradients, cotangents, a.output_mask);
  return done;
}

// The same on every GPU from compute capability 8.0 on. Other passes sum dz and du, as they are rounded.
bool portable_cotangents(const detail::GluGradients& gradients, const GluPair& cotangents, const BackwardRows& a) {
  if (a.kept) return false;
  const auto& [dz, du] = cotangents;
  const gemm::RuleTensors tensors{
      .d = dz, .a = a.x, .b = a.w, .bias = a.b, .b2 = &a.wg, .bias2 = &a.bg, .g = &a.g, .d2 = &du};
  const bool done = a.activation == GluActivation::kSilu
                        ? gemm::run<gemm::CotangentsOf<gemm::GluRule<Silu>>>(tensors)
                        : gemm::run<gemm::CotangentsOf<gemm::GluRule<Sigmoid>>>(tensors);
  if (done) sum_cotangents(gradients, cotangents, a.output_mask);
  return done;
}

// dz and du in a tensor for both: side by side, so that stacked products that make or read them are one call of cuBLAS
// each, or one after the other for two calls, which are more exact if each result is contiguous (linear/products.h).
struct Cotangents : GluPair {
  Tensor both;
  gemm::StackedProducts stacked;

  Cotangents(const Tensor& both, const Tensor& w) : Cotangents(both, stacked_products(both.size(0), w)) {}

 private:
  Cotangents(const Tensor& both, const gemm::StackedProducts& stacked)
      : GluPair(stacked.of_inputs ? GluPair::halves(both) : parts(both.view({2, both.size(0), both.size(1) / 2}))),
        both(both),
        stacked(stacked) {}
  static GluPair parts(const Tensor& both) { return {both.select(0, 0), both.select(0, 1)}; }
  static gemm::StackedProducts stacked_products(int64_t rows, const Tensor& w) {
    const bool is_exact_float32 = w.scalar_type() == at::kFloat && !gemm::element_of(at::kFloat);
    return gemm::stacked_products(gemm::case_of(rows, w.size(0), w.size(1), w.scalar_type()), is_exact_float32);
  }
};

// dz, du and the gradients of biases by cuBLAS and a pass, or by the pass alone if the products were kept. `stack` has
// both weights, or is undefined.
void cotangents_from_products(const detail::GluGradients& gradients, const Cotangents& cotangents,
                              const BackwardRows& a, const Tensor& stack) {
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  const int64_t rows = a.x.size(0);
  const bool wants_sums = a.output_mask[3] || a.output_mask[4];
  const OptionalTensor stacked_bias = stack.defined() && !a.kept ? stacked(a.b, a.bg) : std::nullopt;
  const int64_t step = rows_of_panel(rows, a.w, !a.kept && (a.b || a.bg), rounded_row_bytes(a.x, a.w));
  PassSums sums(wants_sums, a.w, 2, rows, step, a.w.size(0));
  for_each_panel_of(rows, step, [&](int64_t begin, int64_t end) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    const GluPair to = cotangents.narrow(begin, end);
    if (a.kept) {
      glu_backward_rows(sums, to, panel(a.g), a.kept->narrow(begin, end), a.activation);
      return;
    }
    const Tensor x = panel(a.x).to(a.w.scalar_type());
    if (stack.defined()) {
      linear_out(panel(cotangents.both), x, stack, stacked_bias);
    } else {
      linear_out(to.z, x, a.w, a.b);
      linear_out(to.u, x, a.wg, a.bg);
    }
    glu_backward_rows(sums, to, panel(a.g), to, a.activation);
  });
  sums.finish(a.output_mask[3] ? db : Tensor(), a.output_mask[4] ? dbg : Tensor());
}

// The gradients of x and of the weights, if they are wanted, from both cotangents. `stack` has both weights, or is
// undefined.
void from_cotangents(const detail::GluGradients& gradients, const Cotangents& cotangents, const BackwardRows& a,
                     const Tensor& stack) {
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  const auto& [dz, du] = static_cast<const GluPair&>(cotangents);
  const Tensor& both = cotangents.both;
  const int64_t n = a.w.size(0);
  if (a.output_mask[0] && cotangents.stacked.of_inputs) {
    input_gradient(detail::as_rows(dx), both, stack.defined() ? stack : stacked(a.w, a.wg), a.accumulate);
  } else if (a.output_mask[0]) {
    const Tensor dx_rows = detail::as_rows(dx);
    input_gradient(dx_rows, dz, a.w, a.accumulate);
    input_gradient(dx_rows, du, a.wg, /*accumulate=*/true);
  }
  if (a.output_mask[1] && a.output_mask[2] && cotangents.stacked.of_weights) {
    // Copies round, so that the product need not.
    const bool wide = detail::is_product_rounded_in_parts(both, a.x);
    const Tensor both_weights =
        at::detail::empty_cuda({2 * n, a.w.size(1)}, wide ? dw.options().dtype(at::kFloat) : dw.options());
    weight_gradient_out(both_weights, both, a.x);
    dw.copy_(both_weights.narrow(0, 0, n));
    dwg.copy_(both_weights.narrow(0, n, n));
  } else {
    if (a.output_mask[1]) weight_gradient_out(dw, dz, a.x);
    if (a.output_mask[2]) weight_gradient_out(dwg, du, a.x);
  }
}

// The gradients by way of the cotangents of both products. The gradients of weights and biases may be float32.
void by_cotangents(const detail::GluGradients& gradients, const BackwardRows& a, const GradientCall& call) {
  const Tensor both = at::detail::empty_cuda({a.g.size(0), 2 * a.w.size(0)}, a.w.options());
  if (weights_in_one_pass(gradients, both, a, call)) {
    if (a.output_mask[0])
      input_gradient(detail::as_rows(std::get<0>(gradients)), both, interleaved(a.w, a.wg), a.accumulate);
    return;
  }
  const Cotangents cotangents(both, a.w);
  const bool are_complete =
      fused_cotangents(gradients, cotangents, a, call) || portable_cotangents(gradients, cotangents, a);
  const bool recomputes = !are_complete && !a.kept;
  const bool stacks = cotangents.stacked.of_inputs && (a.output_mask[0] || recomputes);
  const Tensor stack = stacks ? stacked(a.w, a.wg) : Tensor();
  if (!are_complete) cotangents_from_products(gradients, cotangents, a, stack);
  from_cotangents(gradients, cotangents, a, stack);
}

// The gradients by way of the cotangents, for a float32 x that is a factor of those of weights.
void by_rounded_panels(const detail::GluGradients& gradients, const BackwardRows& a) {
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  const Tensor dx_rows = a.output_mask[0] ? detail::as_rows(dx) : dx;
  for_each_rounded_panel(a.x, {dw, dwg, db, dbg}, [&](int64_t begin, const Tensor& x, const auto& parts) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, x.size(0)); };
    BackwardRows rows = a;
    rows.g = panel(a.g);
    rows.x = x;
    if (a.kept) rows.kept = a.kept->narrow(begin, begin + x.size(0));
    by_cotangents({a.output_mask[0] ? panel(dx_rows) : dx, parts[0], parts[1], parts[2], parts[3]}, rows,
                  gradient_call(rows));
  });
}

}  // namespace

// The formulas are in src/cpu/glu_kernel.cpp.
void glu_gradients(detail::GluGradients gradients, const Tensor& grad, const Tensor& x, const Tensor& w,
                   const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation,
                   std::array<bool, 5> output_mask, const OptionalTensor& z, const OptionalTensor& u, bool accumulate) {
  auto& [dx, dw, dwg, db, dbg] = gradients;
  if (grad.numel() == 0) {
    for (const Tensor& t : {dw, dwg, db, dbg}) t.zero_();
    if (!accumulate) dx.zero_();
    return;
  }
  const BackwardRows rows{
      .g = unit_columns(detail::as_rows(grad)),
      .x = detail::as_rows(x),
      .w = w,
      .wg = wg,
      .b = contiguous(b),
      .bg = contiguous(bg),
      .activation = detail::glu_activation(activation),
      .output_mask = output_mask,
      .kept = z ? Products({unit_columns(detail::as_rows(*z)), unit_columns(detail::as_rows(*u))}) : std::nullopt,
      .accumulate = accumulate};
  const GradientCall call = gradient_call(rows);
  if (in_one_pass(gradients, rows, call)) return;
  if (!rows.rounds_x()) return by_cotangents(gradients, rows, call);
  output_mask[1] || output_mask[2] ? by_rounded_panels(gradients, rows) : by_cotangents(gradients, rows, std::nullopt);
}

bool glu_gradients_from_channels(const detail::GluGradients& gradients, const ChannelPanel<float>& grad,
                                 const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                                 const OptionalTensor& bg, std::array<bool, 5> output_mask, bool accumulate) {
  const BackwardRows rows{.g = {},
                          .x = x,
                          .w = w,
                          .wg = wg,
                          .b = contiguous(b),
                          .bg = contiguous(bg),
                          .activation = GluActivation::kSigmoid,
                          .output_mask = output_mask,
                          .kept = {},
                          .accumulate = accumulate};
  const Cotangents cotangents(at::detail::empty_cuda({x.size(0), 2 * w.size(0)}, w.options()), w);
  const gemm::RuleTensors tensors{
      .d = cotangents.z, .a = x, .b = w, .bias = rows.b, .b2 = &wg, .bias2 = &rows.bg, .d2 = &cotangents.u};
  using Rule = gemm::CotangentsOf<gemm::GluRule<Sigmoid>>;
  if (!attempt(Family::kSm80, [&] { return gemm::run_float32_from_channels<Rule>(tensors, grad); })) return false;
  sum_cotangents(gradients, cotangents, output_mask);
  from_cotangents(gradients, cotangents, rows, {});
  return true;
}

}  // namespace torchops::cuda
