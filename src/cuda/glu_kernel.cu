#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/gemm/ways.h"
#include "cuda/linear/launch.h"
#include "cuda/linear/layer_gradients.h"
#include "cuda/linear/products.h"
#include "cuda/linear/run.cuh"
#include "cuda/linear/whole_vectors.h"
#include "cuda/passes/glu.h"
#include "ops/common.h"
#include "ops/glu.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using detail::GluActivation;
using Products = std::optional<GluPair>;

// glu of the rows of x by a fused kernel, and the products if they are wanted, if one can run and that is wanted. All
// tensors are matrices.
bool fused(const Tensor& y, const Products& products, const Tensor& x, const Tensor& w, const Tensor& wg,
           const OptionalTensor& b, const OptionalTensor& bg, GluActivation activation) {
  gemm::RuleTensors tensors{.d = y, .a = x, .b = w, .bias = b, .b2 = &wg, .bias2 = &bg};
  if (products) {
    tensors.z = &products->z;
    tensors.u = &products->u;
  }
  return activation == GluActivation::kSilu ? gemm::run<gemm::GluRule<Silu>>(tensors)
                                            : gemm::run<gemm::GluRule<Sigmoid>>(tensors);
}

// y for all rows of x, as matrices; and the products if they are wanted.
void glu_out(const Tensor& y, const Products& products, const Tensor& x, const Tensor& w, const Tensor& wg,
             const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation) {
  const GluActivation act = detail::glu_activation(activation);
  const OptionalTensor bias = contiguous(b), gate_bias = contiguous(bg);
  if (fused(y, products, x, w, wg, bias, gate_bias, act)) return;
  const bool rounded = x.scalar_type() != w.scalar_type();
  const int64_t product_bytes = products ? 0 : product_row_bytes(w);
  const int64_t step = rows_of_panel(y.size(0), w, b || bg, product_bytes + rounded_row_bytes(x, w));
  const bool stacks =
      !products &&
      gemm::stacks_products(gemm::case_of(y.size(0), w.size(0), w.size(1), w.scalar_type()), detail::are_halves(w, wg));
  const Tensor stack = stacks ? stacked(w, wg) : Tensor();
  const OptionalTensor stacked_bias = stacks ? stacked(bias, gate_bias) : std::nullopt;
  for_each_panel_of(y.size(0), step, [&](int64_t begin, int64_t end) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    const Tensor out = panel(y), x_panel = panel(x).to(w.scalar_type());
    const Products products_panel = products ? Products(products->narrow(begin, end)) : std::nullopt;
    if (rounded && fused(out, products_panel, x_panel, w, wg, bias, gate_bias, act)) return;
    if (stacks) {
      const Tensor both = at::detail::empty_cuda({end - begin, 2 * w.size(0)}, w.options());
      linear_out(both, x_panel, stack, stacked_bias);
      const auto [z, u] = GluPair::halves(both);
      glu_rows(out, z, u, act);
      return;
    }
    const auto [z, u] = products ? *products_panel : GluPair{out, at::detail::empty_cuda(out.sizes(), w.options())};
    linear_out(z, x_panel, w, bias);
    linear_out(u, x_panel, wg, gate_bias);
    glu_rows(out, z, u, act);
  });
}

// The same where copies of whole vectors pay: for panels of rows.
bool glu_of_copies(const Tensor& y, const Products& products, const Tensor& x, const Tensor& w, const Tensor& wg,
                   const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation) {
  const auto whole = WholeVectors::of(gemm::CopiedLayer::kGlu, x, w, {wg});
  if (!whole) return false;
  Copies copies;
  const Tensor weight = whole->weight(w, copies), gate_weight = whole->weight(wg, copies);
  const OptionalTensor bias = whole->bias(b, copies), gate_bias = whole->bias(bg, copies);
  const bool copies_out = whole->out_features != w.size(0);
  const int64_t row_bytes = whole->input_bytes(x) + (copies_out ? (products ? 3 : 1) * product_row_bytes(weight) : 0);
  const int64_t rows = x.size(0), step = row_bytes > 0 ? std::max(kMaxCopiedBytes / row_bytes, int64_t{1}) : rows;
  for_each_panel_of(rows, even_step(rows, step), [&](int64_t begin, int64_t end) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    const auto target = [&](const Tensor& t) {
      return copies_out ? Tensor(at::detail::empty_cuda({end - begin, whole->out_features}, t.options())) : panel(t);
    };
    const Tensor out = target(y);
    const Products kept = products ? Products({target(products->z), target(products->u)}) : std::nullopt;
    const Tensor input = whole->input(panel(x), copies);
    copies.run();
    glu_out(out, kept, input, weight, gate_weight, bias, gate_bias, activation);
    if (!copies_out) return;
    copies.add(panel(y), out);
    if (products) copies.add(panel(products->z), kept->z).add(panel(products->u), kept->u);
    copies.run();
  });
  return true;
}

void glu_into(const Tensor& y, const Products& products, const Tensor& x, const Tensor& w, const Tensor& wg,
              const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation) {
  if (y.numel() == 0) return;
  const Tensor y_rows = detail::as_rows(y), x_rows = detail::as_rows(x);
  if (glu_of_copies(y_rows, products, x_rows, w, wg, b, bg, activation)) return;
  glu_out(y_rows, products, x_rows, w, wg, b, bg, activation);
}

Tensor glu_cuda(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg,
                std::string_view activation) {
  check_glu(x, w, wg, b, bg, activation);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor y = at::detail::empty_cuda(detail::with_last(x.sizes(), w.size(0)), w.options());
  glu_into(y, std::nullopt, x, w, wg, b, bg, activation);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> glu_with_products_cuda(const Tensor& x, const Tensor& w, const Tensor& wg,
                                                          const OptionalTensor& b, const OptionalTensor& bg,
                                                          std::string_view activation) {
  detail::check_glu_with_products(x, w, wg, b, bg, activation);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto empty = [&] { return at::detail::empty_cuda(detail::with_last(x.sizes(), w.size(0)), w.options()); };
  Tensor y = empty(), z = empty(), u = empty();
  glu_into(y, GluPair::rows(z, u), x, w, wg, b, bg, activation);
  return {y, z, u};
}

// All gradients, of copies.
detail::GluGradients gradients_of_copies(const WholeVectors& whole, const Tensor& grad, const Tensor& x,
                                         const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                                         const OptionalTensor& bg, std::string_view activation,
                                         std::array<bool, 5> output_mask, const OptionalTensor& z,
                                         const OptionalTensor& u) {
  Copies copies;
  const auto kept = [&](const OptionalTensor& t) { return t ? OptionalTensor(whole.output(*t, copies)) : t; };
  const Tensor g_copy = whole.output(grad, copies), x_copy = whole.input(x, copies);
  const Tensor w_copy = whole.weight(w, copies), wg_copy = whole.weight(wg, copies);
  const OptionalTensor b_copy = whole.bias(b, copies), bg_copy = whole.bias(bg, copies);
  const OptionalTensor z_copy = kept(z), u_copy = kept(u);
  copies.run();
  detail::GluGradients gradients = detail::empty_glu_gradients(x_copy, w_copy, output_mask);
  glu_gradients(gradients, g_copy, x_copy, w_copy, wg_copy, b_copy, bg_copy, activation, output_mask, z_copy, u_copy);
  return gradients;
}

detail::GluGradients glu_backward_cuda(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg,
                                       const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation,
                                       std::array<bool, 5> output_mask, const OptionalTensor& z,
                                       const OptionalTensor& u) {
  detail::check_glu_backward(grad, x, w, wg, b, bg, activation, output_mask, z, u);
  const c10::cuda::CUDAGuard guard(x.device());
  if (const auto whole = WholeVectors::of(gemm::CopiedLayer::kGluGradients, x, w, {wg, grad})) {
    const auto [dx, dw, dwg, db, dbg] =
        gradients_of_copies(*whole, grad, x, w, wg, b, bg, activation, output_mask, z, u);
    const at::IntArrayRef of_bias = w.sizes().slice(0, 1);
    Copies copies;
    detail::GluGradients gradients{first_elements(dx, x.sizes(), copies), first_elements(dw, w.sizes(), copies),
                                   first_elements(dwg, w.sizes(), copies), first_elements(db, of_bias, copies),
                                   first_elements(dbg, of_bias, copies)};
    copies.run();
    return gradients;
  }
  detail::GluGradients gradients = detail::empty_glu_gradients(x, w, output_mask);
  glu_gradients(gradients, grad, x, w, wg, b, bg, activation, output_mask, z, u);
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("glu", glu_cuda);
  m.impl("_glu", glu_with_products_cuda);
  m.impl("_glu_backward", glu_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
