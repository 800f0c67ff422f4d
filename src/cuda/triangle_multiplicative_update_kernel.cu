#include <ATen/ops/add_cuda_dispatch.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/linear/layer_gradients.h"
#include "cuda/triangle/gradients.cuh"
#include "cuda/triangle/layers.cuh"
#include "ops/gate.h"
#include "ops/layer_norm.h"
#include "ops/overwriting.h"

// For each batch element: a and b from x, channels first; batched products, which overwrite a with o; the update from o
// and x. Besides x, the panels and a spare group of channels, two pair tensors are alive: a and b, then o and the
// update. If the kernels of triangle/forward.cuh can run, the first and the last step are one pass over memory each.
// Otherwise panels that fit the second-level cache go through layer_norm, glu and a transposition in the first step,
// and through a transposition with its layer norm, projection and gate in the last (triangle/layers.cuh). A float32 x
// with 16-bit weights is centred for those kernels first (triangle/centered.h), which takes half its size in addition.
// TriangleGradients::make() has the order of a backward pass, which takes three pair tensors besides x, the cotangent
// and dx, or four if o is held.
namespace torchops::cuda {
namespace {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleElement;
using detail::TriangleGradients;
using detail::TriangleOutputMask;
using detail::TrianglePanel;
using detail::TriangleParameter;
using detail::TriangleParameterList;
using detail::TriangleProduct;
using detail::TriangleUpdate;

void make_a_and_b(const TriangleLayers& layers, const TriangleElement& e, const Tensor& a, const Tensor& b) {
  if (layers.steps().in(e.x, e.mask, a, b, layers.scale())) return;
  for (const Tensor& channels : {a, b}) layers.zero_columns(channels);
  const auto of_a = layers.glu_of(detail::kPA, detail::kGA), of_b = layers.glu_of(detail::kPB, detail::kGB);
  layers.for_each_panel(layers.input_tensors(of_a, of_b, e.x), 0, [&](const TrianglePanel& panel) {
    const Tensor z = layers.z(panel.rows_of(e.x));
    layers.gated_to_channels(panel, z, of_a, a, e.mask, layers.scale());
    layers.gated_to_channels(panel, z, of_b, b, e.mask, 1);
  });
}

// The update of a panel, written to `out`, which may be x_rows.
void update_panel(const TriangleLayers& layers, const TrianglePanel& panel, const Tensor& o, const Tensor& x_rows,
                  Tensor out) {
  const TriangleUpdate& t = layers.update();
  const Tensor z = layers.z(x_rows);
  layers.project(out, layers.normalized_rows_of(o, panel));
  gate_(out, z, t.weight(detail::kGOut), t.bias(detail::kGOut));
}

// Computes the product of each batch element and calls finish(index, o) on it.
template <class Finish>
Tensor for_each_product(const TriangleLayers& layers, bool keep_product, const Finish& finish) {
  const auto make = [&](const TriangleElement& e, const Tensor& a, const Tensor& b) {
    make_a_and_b(layers, e, a, b);
    // Sums of padding that is infinite or NaN would be right, but slow (sum_again() in sm80/float32_tile.cuh).
    if (!gemm::is_exact_float32(a.scalar_type()) || !gemm::splits_float32()) return;
    for (const Tensor& channels : {a, b}) layers.zero_rows(channels);
  };
  return detail::for_each_product(layers, keep_product, make, finish);
}

TriangleLayers::Pass forward_pass(bool keep_product) {
  return keep_product ? TriangleLayers::Pass::kForward : TriangleLayers::Pass::kForwardOnly;
}

// Writes to `out`, which may be t.x; if undefined, it is allocated.
std::tuple<Tensor, Tensor> update_into(Tensor out, const TriangleUpdate& t, bool keep_product) {
  const TriangleLayers layers(t, forward_pass(keep_product));
  const Tensor product = for_each_product(layers, keep_product, [&](int64_t index, const Tensor& o) {
    // Allocated only now, so that it can reuse the memory of b.
    if (!out.defined()) out = layers.empty(t.x.sizes());
    const Tensor pair = detail::batch_element(t.x, 3, index), result = detail::batch_element(out, 3, index);
    if (layers.steps().out(o, pair, /*residual=*/{}, result, layers.eps_out())) return;
    layers.for_each_panel(layers.output_tensors(pair), 0, [&](const TrianglePanel& panel) {
      update_panel(layers, panel, o, panel.rows_of(pair), panel.rows_of(result));
    });
  });
  return {out.defined() ? out : layers.empty(t.x.sizes()), product};
}

// sum = x plus the update; `sum` may be x; if undefined, it is allocated. Returns the product.
Tensor add_to(Tensor& sum, TriangleUpdate t, bool keep_product) {
  const Tensor x = t.x;
  const auto centered = pair_steps::centered(t);
  if (centered) t.x = centered->rows();
  const TriangleLayers layers(t, forward_pass(keep_product));
  const Tensor product = for_each_product(layers, keep_product, [&](int64_t index, const Tensor& o) {
    if (!sum.defined()) sum = layers.empty(x.sizes(), x.options());
    const Tensor pair = detail::batch_element(t.x, 3, index), residual = detail::batch_element(x, 3, index);
    Tensor target = detail::batch_element(sum, 3, index);
    if (layers.steps().out(o, pair, residual, target, layers.eps_out())) return;
    // If the kernel cannot read the strides.
    if (centered && layers.steps().out(o, pair, /*residual=*/{}, pair, layers.eps_out())) {
      at::cuda::add_out(target, residual, pair);
      return;
    }
    layers.for_each_panel(layers.output_tensors(pair) + 1, 0, [&](const TrianglePanel& panel) {
      const Tensor own = panel.of(residual), rows = panel.rows_of(pair), update = layers.empty(rows.sizes());
      update_panel(layers, panel, o, rows, update);
      Tensor to = panel.of(target);
      at::cuda::add_out(to, own, update.view(own.sizes()));
    });
  });
  if (!sum.defined()) sum = layers.empty(x.sizes(), x.options());
  return product;
}

std::tuple<Tensor, Tensor> update_cuda(const Tensor& x, const OptionalTensor& mask,
                                       const TriangleParameterList& parameters, bool outgoing, double eps,
                                       bool keep_product, bool add_residual) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_update(x, mask, parameters, outgoing, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  if (add_residual) {
    Tensor sum;
    const Tensor product = add_to(sum, t, keep_product);
    return {sum, product};
  }
  const auto centered = pair_steps::centered(t);
  if (!centered) return update_into({}, t, keep_product);
  t.x = centered->rows();
  return update_into(t.x, t, keep_product);  // overwrites what the kernels read
}

Tensor update_cuda_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                    double eps, bool keep_product) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_update_(x, mask, parameters, outgoing, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  t = detail::read_first(t);
  Tensor product;
  detail::overwriting(x, [&] { product = add_to(x, t, keep_product); });
  return product;
}

// --- gradients

struct NormalizedRows {
  Tensor rows, y, mean, rstd;

  NormalizedRows(const Tensor& rows, const OptionalTensor& weight, const OptionalTensor& bias, double eps)
      : rows(rows) {
    const c10::SymInt features = rows.size(1);
    std::tie(y, mean, rstd) = detail::layer_norm_with_moments(rows, features, weight, bias, eps);
  }
  // Overwrites the cotangent of y with that of the rows.
  void backward(const Tensor& grad, const OptionalTensor& weight, TriangleParameter layer,
                const TriangleGradients& gradients) const {
    const auto sum = [&](size_t parameter) {
      const auto options = rows.options().dtype(detail::norm_gradient_dtype(rows, weight));
      return gradients.wants(parameter) ? at::detail::empty_cuda({rows.size(1)}, options) : Tensor();
    };
    const Tensor dweight = sum(layer), dbias = sum(layer + 1);
    layer_norm_gradients({grad, dweight, dbias}, grad, rows, mean, rstd, weight);
    gradients.add(layer, dweight);
    gradients.add(layer + 1, dbias);
  }
};

// From the cotangent of the result: d(o), in channels, and the gate's part of dz, which goes where dx will be.
void output_backward(const TriangleLayers& layers, const TriangleGradients& gradients, const TrianglePanel& panel,
                     const Tensor& x_pair, const Tensor& grad_pair, const Tensor& o, const Tensor& dz_pair,
                     const Tensor& d_o) {
  const TriangleUpdate& t = layers.update();
  const OptionalTensor& norm_weight = t.parameters[detail::kNormOut];
  const NormalizedRows n(layers.rows_of(o, panel), norm_weight, t.parameters[detail::kNormOut + 1], layers.eps_out());
  const Tensor z = layers.z(panel.rows_of(x_pair));
  const Tensor y = layers.empty({z.size(0), t.x.size(-1)});
  layers.project(y, n.y);
  const OptionalTensor& b = t.bias(detail::kGOut);
  // dz is written where it goes, unless x has another dtype than the products.
  const bool wants_z = gradients.wants_z(), in_place = wants_z && dz_pair.scalar_type() == z.scalar_type();
  const bool wants_w = gradients.wants(detail::kGOut), wants_b = b && gradients.wants(detail::kGOut + 1);
  detail::GateGradients results =
      detail::empty_gate_gradients(y, z, t.weight(detail::kGOut), {true, wants_z && !in_place, wants_w, wants_b});
  auto& [dy, dz, dw, db] = results;
  if (in_place) dz = panel.rows_of(dz_pair);
  gate_gradients(results, panel.rows_of(grad_pair), y, z, t.weight(detail::kGOut), b,
                 {true, wants_z, wants_w, wants_b});
  gradients.add(detail::kGOut, dw);
  gradients.add(detail::kGOut + 1, db);
  if (gradients.wants(detail::kPOut)) gradients.add(detail::kPOut, weight_gradient(dy, n.y));
  if (gradients.wants(detail::kPOut + 1)) gradients.add(detail::kPOut + 1, dy.sum(0));
  if (wants_z && !in_place) panel.of(dz_pair).copy_(dz.view(panel.of(dz_pair).sizes()));
  if (!gradients.wants_a_and_b() && !gradients.wants(detail::kNormOut) && !gradients.wants(detail::kNormOut + 1))
    return;
  const Tensor d_rows = torchops::cuda::product(dy, t.weight(detail::kPOut));
  n.backward(d_rows, norm_weight, detail::kNormOut, gradients);
  if (gradients.wants_a_and_b()) layers.transpose(TriangleLayers::To::kChannels, panel, d_rows, d_o, {}, 1);
}

// From da, db and dz so far: dx, which overwrites dz and includes the residual's gradient, and the mask's gradient.
void input_backward(const TriangleLayers& layers, const TriangleGradients& gradients, const TrianglePanel& panel,
                    const TriangleElement& e, const Tensor& da, const Tensor& db, const Tensor& dz_pair,
                    const Tensor& dmask, const Tensor& residual) {
  const TriangleUpdate& t = layers.update();
  const NormalizedRows normalized(panel.rows_of(e.x), layers.norm_weight(), layers.norm_bias(), t.eps);
  const Tensor z = normalized.y.to(t.dtype());
  // In the direction of an incoming update, a copy.
  const Tensor dz = gradients.wants_z() ? panel.rows_of(dz_pair).contiguous() : Tensor();
  const auto gate = [&](const Tensor& channels, TriangleParameter p, TriangleParameter g, double factor) {
    if (dmask.defined()) {
      const Tensor unmasked = layers.rows_of(channels, panel, {}, factor).mul_(layers.gated(z, p, g));
      Tensor target = panel.of(dmask);
      target.add_(unmasked.sum(1, false, dmask.scalar_type()).view(target.sizes()));
    }
    const OptionalTensor &b = t.bias(p), &bg = t.bias(g);
    std::array<bool, 5> output_mask{/*dx=*/false, gradients.wants(p), gradients.wants(g), b && gradients.wants(p + 1),
                                    bg && gradients.wants(g + 1)};
    detail::GluGradients results = detail::empty_glu_gradients(z, t.weight(p), output_mask);
    auto& [dx, dw, dwg, dbias, dbias_g] = results;
    if ((output_mask[0] = gradients.wants_z())) dx = dz;
    if (!layers.exact_gradients(results, panel, z, p, g, channels, e.mask, factor, output_mask)) {
      glu_gradients(results, layers.rows_of(channels, panel, e.mask, factor), z, t.weight(p), t.weight(g), b, bg,
                    "sigmoid", output_mask, /*z=*/{}, /*u=*/{}, /*accumulate=*/true);
    }
    gradients.add(p, dw);
    gradients.add(g, dwg);
    gradients.add(p + 1, dbias);
    gradients.add(g + 1, dbias_g);
  };
  gate(da, detail::kPA, detail::kGA, layers.scale());
  gate(db, detail::kPB, detail::kGB, 1);
  if (!gradients.wants_z()) return;
  normalized.backward(dz, layers.norm_weight(), detail::kNormIn, gradients);
  Tensor target = panel.of(dz_pair);
  if (residual.defined()) {
    at::cuda::add_out(target, dz.view(target.sizes()), panel.of(residual));
  } else if (!dz.is_alias_of(target)) {
    target.copy_(dz.view(target.sizes()));
  }
}

std::vector<Tensor> gradients_of(const Tensor& grad, const TriangleUpdate& t, const TriangleProduct& product,
                                 const TriangleOutputMask& output_mask, bool add_residual) {
  const TriangleLayers layers(t, TriangleLayers::Pass::kBackward);
  const TriangleGradients gradients(layers, output_mask);
  const auto make = [&](const TriangleElement& e, const Tensor& a, const Tensor& b) { make_a_and_b(layers, e, a, b); };
  if (PairGradientSteps steps(layers, gradients, grad, *product.get(0)); grad.numel() > 0 && steps.possible()) {
    std::vector<Tensor> results = gradients.make(
        grad, product, add_residual, make, [&](const auto&... tensors) { steps.out(tensors...); },
        [&](const TriangleElement& e, const Tensor& da, const Tensor& db, const Tensor& dz, const Tensor&,
            const Tensor& residual) { steps.in(e, da, db, dz, residual); });
    steps.finish();
    return results;
  }
  return gradients.make(
      grad, product, add_residual, make,
      [&](const Tensor& x, const Tensor& grad_of_pair, const Tensor& o, const Tensor& dz, const Tensor& d_o) {
        if (d_o.defined()) layers.zero_columns(d_o);
        layers.for_each_panel(7, 2, [&](const TrianglePanel& panel) {
          output_backward(layers, gradients, panel, x, grad_of_pair, o, dz, d_o);
        });
      },
      [&](const auto&... tensors) {
        layers.for_each_panel(t.outgoing ? 4 : 6, 1, [&](const TrianglePanel& panel) {
          input_backward(layers, gradients, panel, tensors...);
        });
      });
}

std::vector<Tensor> update_backward_cuda(const Tensor& grad, const Tensor& x, const TriangleProduct& product,
                                         const OptionalTensor& mask, const TriangleParameterList& parameters,
                                         bool outgoing, double eps, TriangleOutputMask output_mask, bool add_residual) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const NoAutocast no_autocast;
  TriangleUpdate t =
      detail::checked_triangle_update_backward(grad, x, product, mask, parameters, outgoing, eps, output_mask);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto has_product = [&] { return !product.empty(); };  // it is cleared as soon as it isn't needed
  if (const auto centered = pair_steps::centered(t)) {
    t.x = centered->rows();
    std::vector<Tensor> gradients = again_if_refused(
        [&] { return gradients_of(grad, t, product, output_mask, /*add_residual=*/false); }, has_product);
    if (output_mask[0]) gradients[0] = centered->gradient(gradients[0]);
    if (output_mask[0] && add_residual) gradients[0].add_(grad);
    return gradients;
  }
  return again_if_refused([&] { return gradients_of(grad, t, product, output_mask, add_residual); }, has_product);
}

}  // namespace

void pair_steps::unfold_norms(const TriangleUpdate& t, const detail::TriangleResults& results, const float* sums,
                              int64_t batch) {
  t.dtype() == at::kHalf ? launch_unfold_norms<at::Half>(t, results, sums, batch)
                         : launch_unfold_norms<at::BFloat16>(t, results, sums, batch);
}

namespace {

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  detail::register_triangle_update(m);
  m.impl("_triangle_multiplicative_update", update_cuda);
  m.impl("_triangle_multiplicative_update_", update_cuda_);
  m.impl("_triangle_multiplicative_update_backward", update_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
