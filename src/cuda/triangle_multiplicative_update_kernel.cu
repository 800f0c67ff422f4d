#include <ATen/Dispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/add_cuda_dispatch.h>
#include <ATen/ops/addmm_cuda_dispatch.h>
#include <ATen/ops/bmm_cuda_dispatch.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/channels.cuh"
#include "cuda/linear.h"
#include "cuda/pair_gradient_steps.cuh"
#include "cuda/pair_steps.h"
#include "ops/gate.h"
#include "ops/glu.h"
#include "ops/layer_norm.h"
#include "ops/overwriting.h"
#include "ops/triangle_layout.h"

// For each batch element: a and b from x, channels first; batched products, which overwrite a with o; the update from o
// and x. Besides x, the panels and a spare group of channels, two pair tensors are alive: a and b, then o and the
// update. If the kernels of pair_steps.h can run, the first and the last step are one pass over memory each. Otherwise
// panels that fit the second-level cache go through layer_norm, glu and a transposition in the first step, and through
// a transposition, layer_norm, projection and gate in the last. A float32 x with 16-bit weights is centred for those
// kernels first (centered.h), which takes half its size in addition. TriangleGradients::make() has the order of a
// backward pass, which takes three pair tensors besides x, the cotangent and dx, or four if o is held.
namespace torchops::cuda {
namespace {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleElement;
using detail::TriangleGradients;
using detail::TriangleMask;
using detail::TrianglePanel;
using detail::TriangleParameter;
using detail::TriangleParameterList;
using detail::TriangleProduct;
using detail::TriangleUpdate;

constexpr detail::TriangleBackend kBackend{
    [](at::IntArrayRef sizes, const at::TensorOptions& options) -> Tensor {
      return at::detail::empty_cuda(sizes, options);
    },
    at::cuda::bmm_out, /*multiplies_padding=*/true,
    [] { return static_cast<int64_t>(at::cuda::getCurrentDeviceProperties()->multiProcessorCount); }};

// Shared by all panels of a call.
class Layers : public detail::TriangleLayout {
 public:
  enum class Pass { kForward, kBackward };
  Layers(const TriangleUpdate& t, Pass pass) : Layers(t, pass, PairSteps(t)) {}

  const PairSteps& steps() const { return steps_; }
  const OptionalTensor& norm_weight() const { return norm_weight_; }
  const OptionalTensor& norm_bias() const { return norm_bias_; }

  /// Calls f on panels of whole rows of the pair matrix. f uses `tensors` tensors of max(c, d) features for the
  /// positions of a panel, which may take as much memory as `pairs` pair tensors, or some tens of MiB. Fewer, larger
  /// panels are faster: an H100 needs 16 MiB of a tensor to be busy. Small pair tensors, for which launches take most
  /// of the time, get a few panels at most.
  template <class F>
  void for_each_panel(int64_t tensors, int64_t pairs, const F& f) const {
    constexpr int64_t small_pair = int64_t{128} << 20, for_small_pairs = int64_t{256} << 20;
    const int64_t features = std::max({update().x.size(-1), channels(), int64_t{1}});
    const int64_t row_bytes = n() * features * static_cast<int64_t>(update().x.element_size());
    const int64_t pair_bytes = n() * row_bytes;
    const int64_t least = pairs > 0 && pair_bytes <= small_pair ? for_small_pairs : kMaxScratchBytes;
    cuda::for_each_panel(
        n(), row_bytes * tensors, [&](int64_t begin, int64_t end) { f(TrianglePanel{begin, end}); },
        std::max(least, pairs * pair_bytes));
  }

  /// z for rows of x, in the dtype of the products.
  Tensor z(const Tensor& rows) const {
    return layer_norm(rows, at::IntArrayRef(rows.size(1)), norm_weight_, norm_bias_, update().eps).to(update().dtype());
  }
  Tensor gated(const Tensor& z, TriangleParameter p, TriangleParameter g) const {
    return glu(z, update().weight(p), update().weight(g), update().bias(p), update().bias(g));
  }
  /// The projection for rows of the normalised o.
  void project(Tensor out, const Tensor& rows) const {
    const Tensor w_t = update().weight(detail::kPOut).t();
    const OptionalTensor& b = update().bias(detail::kPOut);
    b ? at::cuda::addmm_out(out, *b, rows, w_t) : at::cuda::mm_out(out, rows, w_t);
  }

  enum class To { kChannels, kRows };
  /// Moves a panel of (rows, d) to its positions in padded channels or back, times the mask (N, N) and a factor.
  void transpose(To to, const TrianglePanel& panel, const Tensor& rows, const Tensor& channels, const Tensor& mask,
                 double factor) const {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, rows.scalar_type(), "triangle_multiplicative_update", [&] {
          const Tensor factors = mask.defined() ? panel.of(mask).contiguous() : mask;
          const int64_t row_stride = channels.stride(1);
          const Transposition<scalar_t> transposition{
              rows,
              detail::strided_view(channels, {channels.size(0), (panel.end - panel.begin) * row_stride},
                                   {channels.stride(0), 1}, panel.begin * row_stride),
              {n(), row_stride},
              {mask.defined() ? factors.const_data_ptr<scalar_t>() : nullptr,
               static_cast<Accumulate<scalar_t>>(factor)}};
          to == To::kChannels ? transposition.to_channels() : transposition.to_rows();
        });
  }
  /// A panel of o as rows.
  Tensor rows_of(const Tensor& channels, const TrianglePanel& panel, const Tensor& mask = {}, double factor = 1) const {
    const Tensor rows = empty({(panel.end - panel.begin) * n(), this->channels()});
    transpose(To::kRows, panel, rows, channels, mask, factor);
    return rows;
  }

 private:
  // Limits a spare group of channels. Forward may take 2.1 pair tensors, backward 3.2 besides dx, each plus 64 MiB,
  // less two or three tensors of padded channels and the panels, or the workspace and moments of the gradients. Forward
  // gets at most half of the 64 MiB, which is most of what a layer in place takes besides its pair tensor.
  static int64_t group_bytes(const TriangleUpdate& t, Pass pass, const PairSteps& steps) {
    constexpr int64_t mib = int64_t{1} << 20;
    const bool backward = pass == Pass::kBackward;
    const int64_t n = t.x.size(-2), d = t.weight(detail::kPA).size(0);
    const auto size = static_cast<int64_t>(c10::elementSize(t.dtype()));
    const int64_t pair = n * n * std::max(t.x.size(-1), d) * size;
    const int64_t padded = detail::padded_size(n, t.dtype()) * detail::padded_row_stride(n, d, t.dtype()) * d * size;
    const int64_t limit = (backward ? 32 : 21) * (pair / 10) + 64 * mib;
    // Panels consist of whole rows, and the allocator rounds them up.
    const int64_t others = !steps.have_kernels() ? kMaxScratchBytes + 4 * mib : backward ? 20 * mib + 8 * n * n : 0;
    return std::clamp(limit - (backward ? 3 : 2) * padded - others, 8 * mib, (backward ? 52 : 32) * mib);
  }
  Layers(const TriangleUpdate& t, Pass pass, PairSteps steps)
      : TriangleLayout(t, kBackend, group_bytes(t, pass, steps)), steps_(std::move(steps)) {
    const auto in_dtype_of_x = [&](const OptionalTensor& parameter) {
      const bool cast = parameter && parameter->scalar_type() != t.x.scalar_type();
      return cast ? OptionalTensor(parameter->to(t.x.scalar_type())) : parameter;
    };
    norm_weight_ = in_dtype_of_x(t.parameters[detail::kNormIn]);
    norm_bias_ = in_dtype_of_x(t.parameters[detail::kNormIn + 1]);
  }

  PairSteps steps_;
  OptionalTensor norm_weight_, norm_bias_;
};

void make_a_and_b(const Layers& layers, const TriangleElement& e, const Tensor& a, const Tensor& b) {
  if (layers.steps().in(e.x, e.mask, a, b, layers.scale())) return;
  for (const Tensor& made : {a, b}) layers.zero_columns(made);
  layers.for_each_panel(3, 0, [&](const TrianglePanel& panel) {
    const Tensor z = layers.z(panel.rows_of(e.x));
    const auto make = [&](const Tensor& to, TriangleParameter p, TriangleParameter g, double factor) {
      layers.transpose(Layers::To::kChannels, panel, layers.gated(z, p, g), to, e.mask, factor);
    };
    make(a, detail::kPA, detail::kGA, layers.scale());
    make(b, detail::kPB, detail::kGB, 1);
  });
}

// The update of a panel, written to `out`, which may be x_rows.
void update_panel(const Layers& layers, const TrianglePanel& panel, const Tensor& o, const Tensor& x_rows, Tensor out) {
  const TriangleUpdate& t = layers.update();
  const Tensor z = layers.z(x_rows);
  Tensor n = layers.rows_of(o, panel);
  layer_norm_(n, at::IntArrayRef(n.size(1)), t.parameters[detail::kNormOut], t.parameters[detail::kNormOut + 1],
              layers.eps_out());
  layers.project(out, n);
  gate_(out, z, t.weight(detail::kGOut), t.bias(detail::kGOut));
}

// Computes the product of each batch element and calls finish(index, o) on it.
template <class Finish>
Tensor for_each_product(const Layers& layers, bool keep_product, const Finish& finish) {
  return detail::for_each_product(
      layers, keep_product,
      [&](const TriangleElement& e, const Tensor& a, const Tensor& b) { make_a_and_b(layers, e, a, b); }, finish);
}

// Writes to `out`, which may be t.x; if undefined, it is allocated.
std::tuple<Tensor, Tensor> update_into(Tensor out, const TriangleUpdate& t, bool keep_product) {
  const Layers layers(t, Layers::Pass::kForward);
  const Tensor product = for_each_product(layers, keep_product, [&](int64_t index, const Tensor& o) {
    // Allocated only now, so that it can reuse the memory of b.
    if (!out.defined()) out = layers.empty(t.x.sizes());
    const Tensor pair = detail::batch_element(t.x, 3, index), result = detail::batch_element(out, 3, index);
    if (layers.steps().out(o, pair, /*residual=*/{}, result, layers.eps_out())) return;
    layers.for_each_panel(3, 0, [&](const TrianglePanel& panel) {
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
  const Layers layers(t, Layers::Pass::kForward);
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
    layers.for_each_panel(4, 0, [&](const TrianglePanel& panel) {
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
                                       bool keep_product, bool adds) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_update(x, mask, parameters, outgoing, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  if (adds) {
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
  Tensor backward(const Tensor& grad, const OptionalTensor& weight, TriangleParameter layer,
                  const TriangleGradients& gradients) const {
    const c10::SymInt features = rows.size(1);
    const auto [dx, dweight, dbias] = detail::layer_norm_backward(
        grad, rows, features, mean, rstd, weight, {true, gradients.wants(layer), gradients.wants(layer + 1)});
    gradients.add(layer, dweight);
    gradients.add(layer + 1, dbias);
    return dx;
  }
};

// From the cotangent of the result: d(o), in channels, and the gate's part of dz, which goes where dx will be.
void output_backward(const Layers& layers, const TriangleGradients& gradients, const TrianglePanel& panel,
                     const Tensor& x_pair, const Tensor& grad_pair, const Tensor& o, const Tensor& dz_pair,
                     const Tensor& d_o) {
  const TriangleUpdate& t = layers.update();
  const OptionalTensor& norm_weight = t.parameters[detail::kNormOut];
  const NormalizedRows n(layers.rows_of(o, panel), norm_weight, t.parameters[detail::kNormOut + 1], layers.eps_out());
  const Tensor z = layers.z(panel.rows_of(x_pair));
  const Tensor y = layers.empty({z.size(0), t.x.size(-1)});
  layers.project(y, n.y);
  const OptionalTensor& b = t.bias(detail::kGOut);
  const auto [dy, dz, dw, db] = detail::gate_backward(
      panel.rows_of(grad_pair), y, z, t.weight(detail::kGOut), b,
      {true, gradients.wants_z(), gradients.wants(detail::kGOut), b && gradients.wants(detail::kGOut + 1)});
  gradients.add(detail::kGOut, dw);
  gradients.add(detail::kGOut + 1, db);
  if (gradients.wants(detail::kPOut)) gradients.add(detail::kPOut, at::cuda::mm(dy.t(), n.y));
  if (gradients.wants(detail::kPOut + 1)) gradients.add(detail::kPOut + 1, dy.sum(0));
  if (gradients.wants_z()) panel.of(dz_pair).copy_(dz.view(panel.of(dz_pair).sizes()));
  if (!gradients.wants_a_and_b() && !gradients.wants(detail::kNormOut) && !gradients.wants(detail::kNormOut + 1))
    return;
  const Tensor dn = at::cuda::mm(dy, t.weight(detail::kPOut));
  const Tensor d_rows = n.backward(dn, norm_weight, detail::kNormOut, gradients);
  if (gradients.wants_a_and_b()) layers.transpose(Layers::To::kChannels, panel, d_rows, d_o, {}, 1);
}

// From da, db and dz so far: dx, which overwrites dz and includes the residual's gradient, and the mask's gradient.
void input_backward(const Layers& layers, const TriangleGradients& gradients, const TrianglePanel& panel,
                    const TriangleElement& e, const Tensor& da, const Tensor& db, const Tensor& dz_pair,
                    const Tensor& dmask, const Tensor& residual) {
  const TriangleUpdate& t = layers.update();
  const NormalizedRows normalized(panel.rows_of(e.x), layers.norm_weight(), layers.norm_bias(), t.eps);
  const Tensor z = normalized.y.to(t.dtype());
  Tensor dz = gradients.wants_z() ? panel.rows_of(dz_pair).clone() : Tensor();
  const auto gate = [&](const Tensor& channels, TriangleParameter p, TriangleParameter g, double factor) {
    if (dmask.defined()) {
      const Tensor unmasked = layers.rows_of(channels, panel, {}, factor).mul_(layers.gated(z, p, g));
      Tensor target = panel.of(dmask);
      target.add_(unmasked.sum(1, false, dmask.scalar_type()).view(target.sizes()));
    }
    const OptionalTensor &b = t.bias(p), &bg = t.bias(g);
    const auto [dx, dw, dwg, dbias, dbias_g] = detail::glu_backward(
        layers.rows_of(channels, panel, e.mask, factor), z, t.weight(p), t.weight(g), b, bg, "sigmoid",
        {gradients.wants_z(), gradients.wants(p), gradients.wants(g), b && gradients.wants(p + 1),
         bg && gradients.wants(g + 1)});
    gradients.add(p, dw);
    gradients.add(g, dwg);
    gradients.add(p + 1, dbias);
    gradients.add(g + 1, dbias_g);
    if (gradients.wants_z()) dz.add_(dx);
  };
  gate(da, detail::kPA, detail::kGA, layers.scale());
  gate(db, detail::kPB, detail::kGB, 1);
  if (!gradients.wants_z()) return;
  const Tensor dx = normalized.backward(dz, layers.norm_weight(), detail::kNormIn, gradients);
  Tensor target = panel.of(dz_pair);
  if (residual.defined()) {
    at::cuda::add_out(target, dx.view(target.sizes()), panel.of(residual));
  } else {
    target.copy_(dx.view(target.sizes()));
  }
}

std::vector<Tensor> gradients_of(const Tensor& grad, const TriangleUpdate& t, const TriangleProduct& product,
                                 const TriangleMask& wanted, bool adds) {
  const Layers layers(t, Layers::Pass::kBackward);
  const TriangleGradients gradients(layers, wanted);
  const auto make = [&](const TriangleElement& e, const Tensor& a, const Tensor& b) { make_a_and_b(layers, e, a, b); };
  if (PairGradientSteps steps(layers, gradients, grad, *product.get(0)); grad.numel() > 0 && steps.possible()) {
    std::vector<Tensor> results = gradients.make(
        grad, product, adds, make, [&](const auto&... tensors) { steps.out(tensors...); },
        [&](const TriangleElement& e, const Tensor& da, const Tensor& db, const Tensor& dz, const Tensor&,
            const Tensor& residual) { steps.in(e, da, db, dz, residual); });
    steps.finish();
    return results;
  }
  return gradients.make(
      grad, product, adds, make,
      [&](const Tensor& x, const Tensor& grad_of_pair, const Tensor& o, const Tensor& dz, const Tensor& d_o) {
        if (d_o.defined()) layers.zero_columns(d_o);
        layers.for_each_panel(9, 2, [&](const TrianglePanel& panel) {
          output_backward(layers, gradients, panel, x, grad_of_pair, o, dz, d_o);
        });
      },
      [&](const auto&... tensors) {
        layers.for_each_panel(
            6, 1, [&](const TrianglePanel& panel) { input_backward(layers, gradients, panel, tensors...); });
      });
}

std::vector<Tensor> update_backward_cuda(const Tensor& grad, const Tensor& x, const TriangleProduct& product,
                                         const OptionalTensor& mask, const TriangleParameterList& parameters,
                                         bool outgoing, double eps, TriangleMask wanted, bool adds) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t =
      detail::checked_triangle_update_backward(grad, x, product, mask, parameters, outgoing, eps, wanted);
  const c10::cuda::CUDAGuard guard(x.device());
  if (const auto centered = pair_steps::centered(t)) {
    t.x = centered->rows();
    std::vector<Tensor> gradients = gradients_of(grad, t, product, wanted, /*adds=*/false);
    if (wanted[0]) gradients[0] = centered->gradient(gradients[0]);
    if (wanted[0] && adds) gradients[0].add_(grad);
    return gradients;
  }
  return gradients_of(grad, t, product, wanted, adds);
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  detail::register_triangle_update(m);
  m.impl("_triangle_multiplicative_update", update_cuda);
  m.impl("_triangle_multiplicative_update_", update_cuda_);
  m.impl("_triangle_multiplicative_update_backward", update_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
