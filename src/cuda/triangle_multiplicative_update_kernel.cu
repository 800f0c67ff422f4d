#include <ATen/Dispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/addmm_cuda_dispatch.h>
#include <ATen/ops/bmm_cuda_dispatch.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/channels.cuh"
#include "cuda/linear.h"
#include "cuda/pair_steps.h"
#include "ops/common.h"
#include "ops/gate.h"
#include "ops/glu.h"
#include "ops/layer_norm.h"
#include "ops/triangle_multiplicative_update.h"

// Where the kernels of pair_steps.h can run, they make the steps around the products. Elsewhere, for each element of
// the batch: panels of x, small enough for the second-level cache, go through layer_norm and glu and are stored
// channels first as a and b; batched products overwrite a with o; panels of o and x go through layer_norm, the
// projection and gate. No other tensor of x's size is made. For the incoming direction x is read transposed: a'[i, k] =
// a[k, i] makes of it the outgoing one.
namespace torchops::cuda {
namespace {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleMask;
using detail::TriangleParameter;
using detail::TriangleParameterList;
using detail::TriangleUpdate;

// Rows [begin, end) of the pair matrix.
struct Panel {
  int64_t begin, end;

  Tensor of(const Tensor& pair) const { return pair.narrow(0, begin, end - begin); }
  /// (N, N, c) -> rows of c.
  Tensor rows_of(const Tensor& pair) const { return of(pair).reshape({-1, pair.size(2)}); }
};

// The parameters, and what its panels are made of.
class Layers {
 public:
  explicit Layers(const TriangleUpdate& t)
      : t_(t),
        n_(t.x.size(-2)),
        padded_(detail::padded_size(n_, t.dtype())),
        scale_(detail::triangle_scale(n_, t.dtype())) {
    const auto in_dtype_of_x = [&](const OptionalTensor& parameter) {
      return parameter ? OptionalTensor(parameter->to(t.x.scalar_type())) : parameter;
    };
    norm_weight_ = in_dtype_of_x(t.parameters[detail::kNormIn]);
    norm_bias_ = in_dtype_of_x(t.parameters[detail::kNormIn + 1]);
  }

  const TriangleUpdate& update() const { return t_; }
  int64_t padded() const { return padded_; }
  int64_t channels() const { return t_.weight(detail::kPA).size(0); }
  double scale() const { return scale_; }
  /// Of the layer norm of o, which has been scaled.
  double eps_out() const { return t_.eps * scale_ * scale_; }
  const OptionalTensor& norm_weight() const { return norm_weight_; }
  const OptionalTensor& norm_bias() const { return norm_bias_; }
  at::TensorOptions options() const { return t_.weight(detail::kPA).options(); }

  /// Calls f on panels of whole rows of the pair matrix, of which some tensors of max(c, d) features stay in the cache.
  template <class F>
  void for_each_panel(const F& f) const {
    const int64_t features = std::max({t_.x.size(-1), channels(), int64_t{1}});
    constexpr int64_t tensors = 4;
    const int64_t row_bytes = n_ * features * static_cast<int64_t>(t_.x.element_size()) * tensors;
    cuda::for_each_panel(n_, row_bytes, [&](int64_t begin, int64_t end) { f(Panel{begin, end}); });
  }

  /// z of rows of x, in the dtype of the products.
  Tensor z(const Tensor& rows) const {
    return layer_norm(rows, at::IntArrayRef(rows.size(1)), norm_weight_, norm_bias_, t_.eps).to(t_.dtype());
  }
  Tensor gated(const Tensor& z, TriangleParameter p, TriangleParameter g) const {
    return glu(z, t_.weight(p), t_.weight(g), t_.bias(p), t_.bias(g));
  }
  /// The projection of rows of the normalised o.
  void project(Tensor out, const Tensor& rows) const {
    const Tensor w_t = t_.weight(detail::kPOut).t();
    const OptionalTensor& b = t_.bias(detail::kPOut);
    b ? at::cuda::addmm_out(out, *b, rows, w_t) : at::cuda::mm_out(out, rows, w_t);
  }

  enum class To { kChannels, kRows };
  /// Moves a panel of (rows, d) to its places in channels (d, padded, padded) or back, times the mask (N, N) and a
  /// factor.
  void transpose(To to, const Panel& panel, const Tensor& rows, const Tensor& channels, const Tensor& mask,
                 double factor) const {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, rows.scalar_type(), "triangle_multiplicative_update", [&] {
          const Tensor factors = mask.defined() ? panel.of(mask).contiguous() : mask;
          const Transposition<scalar_t> transposition{
              rows,
              channels.flatten(1).narrow(1, panel.begin * padded_, (panel.end - panel.begin) * padded_),
              {n_, padded_},
              {mask.defined() ? factors.const_data_ptr<scalar_t>() : nullptr,
               static_cast<Accumulate<scalar_t>>(factor)}};
          to == To::kChannels ? transposition.to_channels() : transposition.to_rows();
        });
  }
  /// A panel of o as rows.
  Tensor rows_of(const Tensor& channels, const Panel& panel, const Tensor& mask = {}, double factor = 1) const {
    const Tensor rows = at::detail::empty_cuda({(panel.end - panel.begin) * n_, this->channels()}, options());
    transpose(To::kRows, panel, rows, channels, mask, factor);
    return rows;
  }

  /// With zeros behind the N rows and columns, which the products of padded matrices need and keep.
  Tensor empty_channels(int64_t count) const {
    const Tensor channels = at::detail::empty_cuda({count, padded_, padded_}, options());
    for (const int64_t dim : {1, 2}) {
      if (padded_ > n_) channels.narrow(dim, n_, padded_ - n_).zero_();
    }
    return channels;
  }
  /// How many channels a group of products has that is done with before the next overwrites its factors.
  int64_t group() const {
    const int64_t bytes = padded_ * padded_ * static_cast<int64_t>(c10::elementSize(t_.dtype()));
    return std::clamp(kMaxScratchBytes / std::max(bytes, int64_t{1}), int64_t{1}, std::max(channels(), int64_t{1}));
  }

 private:
  const TriangleUpdate& t_;
  int64_t n_, padded_;
  double scale_;
  OptionalTensor norm_weight_, norm_bias_;
};

// An element of the batch, of which x and the mask are transposed for the incoming direction.
struct Element {
  Tensor x, mask;  // (N, N, c) and, in the dtype of the products, (N, N)

  Element(const TriangleUpdate& t, int64_t index) : x(detail::batch_element(t.x, 3, index)) {
    if (t.mask) mask = detail::batch_element(*t.mask, 2, index).to(t.dtype());
    if (t.outgoing) return;
    x = x.transpose(0, 1);
    if (t.mask) mask = mask.t();
  }
};

// Channels in which groups of results overwrite factors that lie one group further on.
struct Rotating {
  int64_t group;
  Tensor memory;

  Rotating(const Layers& layers, int64_t results)
      : group(layers.group()), memory(layers.empty_channels(results + group)) {}
  Tensor results(int64_t first, int64_t count) const { return memory.narrow(0, first, count); }
  Tensor factors(int64_t first, int64_t count) const { return memory.narrow(0, first + group, count); }
};

void make_a_and_b(const Layers& layers, const Element& e, const Tensor& a, const Tensor& b) {
  if (step_in(layers.update(), e.x, e.mask, a, b, layers.scale())) return;
  layers.for_each_panel([&](const Panel& panel) {
    const Tensor z = layers.z(panel.rows_of(e.x));
    const auto make = [&](const Tensor& to, TriangleParameter p, TriangleParameter g, double factor) {
      layers.transpose(Layers::To::kChannels, panel, layers.gated(z, p, g), to, e.mask, factor);
    };
    make(a, detail::kPA, detail::kGA, layers.scale());
    make(b, detail::kPB, detail::kGB, 1);
  });
}

// Calls f(first, count) for groups of channels.
template <class F>
void for_each_group(int64_t channels, int64_t group, const F& f) {
  for (int64_t begin = 0; begin < channels; begin += group) f(begin, std::min(group, channels - begin));
}

// Makes the products of all elements of the batch, one by one, and calls finish(index, o) on each. Returns them, if
// they are kept.
template <class Finish>
Tensor for_each_product(const Layers& layers, bool keep_product, const Finish& finish) {
  const TriangleUpdate& t = layers.update();
  const int64_t batch = detail::batch_size(t.x, 3), d = layers.channels();
  const Rotating memory(layers, keep_product ? batch * d : d);
  for (int64_t index = 0; index < batch; ++index) {
    const int64_t first = keep_product ? index * d : 0;
    const Tensor a = memory.factors(first, d), o = memory.results(first, d);
    {
      const Tensor b = layers.empty_channels(d);
      make_a_and_b(layers, Element(t, index), a, b);
      for_each_group(d, memory.group, [&](int64_t begin, int64_t count) {
        const auto of_group = [&](const Tensor& channels) { return channels.narrow(0, begin, count); };
        Tensor out = of_group(o);
        at::cuda::bmm_out(out, of_group(a), of_group(b).mT());
      });
    }
    finish(index, o);
  }
  if (!keep_product) return at::detail::empty_cuda({0}, layers.options());
  at::DimVector shape(t.x.sizes().slice(0, t.x.dim() - 3));
  for (const int64_t size : {d, layers.padded(), layers.padded()}) shape.push_back(size);
  return memory.results(0, batch * d).view(shape);
}

// The update of a panel, into `out`.
void update_panel(const Layers& layers, const Panel& panel, const Tensor& o, const Tensor& x_rows, Tensor out) {
  const TriangleUpdate& t = layers.update();
  Tensor n = layers.rows_of(o, panel);
  layer_norm_(n, at::IntArrayRef(n.size(1)), t.parameters[detail::kNormOut], t.parameters[detail::kNormOut + 1],
              layers.eps_out());
  layers.project(out, n);
  gate_(out, layers.z(x_rows), t.weight(detail::kGOut), t.bias(detail::kGOut));
}

std::tuple<Tensor, Tensor> update_cuda(const Tensor& x, const OptionalTensor& mask,
                                       const TriangleParameterList& parameters, bool outgoing, double eps,
                                       bool keep_product) {
  const TriangleUpdate t = detail::checked_triangle_update(x, mask, parameters, outgoing, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Layers layers(t);
  Tensor out;
  const Tensor product = for_each_product(layers, keep_product, [&](int64_t index, const Tensor& o) {
    // Only now, so that it can have the memory of b.
    if (!out.defined()) out = at::detail::empty_cuda(x.sizes(), layers.options());
    const Tensor pair = detail::batch_element(x, 3, index), result = detail::batch_element(out, 3, index);
    if (step_out(t, o, pair, result, /*adds=*/false, layers.eps_out())) return;
    layers.for_each_panel(
        [&](const Panel& panel) { update_panel(layers, panel, o, panel.rows_of(pair), panel.rows_of(result)); });
  });
  return {out.defined() ? out : Tensor(at::detail::empty_cuda(x.sizes(), layers.options())), product};
}

Tensor update_cuda_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                    double eps, bool keep_product) {
  TriangleUpdate t = detail::checked_triangle_update_(x, mask, parameters, outgoing, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (t.mask) t.mask = detail::read_first(x, *t.mask);
  for (OptionalTensor& parameter : t.parameters) {
    if (parameter) parameter = detail::read_first(x, *parameter);
  }
  const Layers layers(t);
  return for_each_product(layers, keep_product, [&](int64_t index, const Tensor& o) {
    const Tensor pair = detail::batch_element(x, 3, index);
    if (step_out(t, o, pair, pair, /*adds=*/true, layers.eps_out())) return;
    layers.for_each_panel([&](const Panel& panel) {
      Tensor target = panel.of(pair);
      const Tensor rows = panel.rows_of(pair), update = at::detail::empty_cuda(rows.sizes(), layers.options());
      update_panel(layers, panel, o, rows, update);
      target.add_(update.view(target.sizes()));
    });
  });
}

// --- gradients

// The sums of the parameters' gradients over panels, in the order of these.
class Gradients {
 public:
  Gradients(const Layers& layers, const TriangleMask& wanted) : wanted_(wanted) {
    const TriangleUpdate& t = layers.update();
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (!wanted[2 + i]) continue;
      sums_[i] = at::zeros(t.parameters[i]->sizes(), layers.options().dtype(detail::moments_dtype(t.dtype())));
    }
  }

  bool wants(size_t parameter) const { return wanted_[2 + parameter]; }
  bool want_z() const { return detail::wants_z(wanted_); }
  bool want_a_and_b() const { return detail::wants_a_and_b(wanted_); }
  void add(size_t parameter, const Tensor& part) {
    if (wants(parameter)) sums_[parameter].add_(part);
  }
  void finish(const std::vector<Tensor>& gradients) const {
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (wants(i)) gradients[2 + i].copy_(sums_[i]);
    }
  }

 private:
  const TriangleMask& wanted_;
  std::array<Tensor, detail::kTriangleParameters> sums_;
};

struct NormalizedRows {
  Tensor rows, y, mean, rstd;

  NormalizedRows(const Tensor& rows, const OptionalTensor& weight, const OptionalTensor& bias, double eps)
      : rows(rows) {
    const c10::SymInt features = rows.size(1);
    std::tie(y, mean, rstd) = detail::layer_norm_with_moments(rows, features, weight, bias, eps);
  }
  Tensor backward(const Tensor& grad, const OptionalTensor& weight, TriangleParameter layer, Gradients& sums) const {
    const c10::SymInt features = rows.size(1);
    const auto [dx, dweight, dbias] = detail::layer_norm_backward(grad, rows, features, mean, rstd, weight,
                                                                  {true, sums.wants(layer), sums.wants(layer + 1)});
    sums.add(layer, dweight);
    sums.add(layer + 1, dbias);
    return dx;
  }
};

// From the cotangent of the result: d(o) in channels, and the gate's part of dz in the place of dx.
void output_backward(const Layers& layers, Gradients& sums, const Panel& panel, const Tensor& o, const Tensor& x_pair,
                     const Tensor& grad_pair, const Tensor& d_o, const Tensor& dz_pair) {
  const TriangleUpdate& t = layers.update();
  const OptionalTensor& norm_weight = t.parameters[detail::kNormOut];
  const NormalizedRows n(layers.rows_of(o, panel), norm_weight, t.parameters[detail::kNormOut + 1], layers.eps_out());
  const Tensor z = layers.z(panel.rows_of(x_pair));
  const Tensor y = at::detail::empty_cuda({z.size(0), t.x.size(-1)}, layers.options());
  layers.project(y, n.y);
  const OptionalTensor& b = t.bias(detail::kGOut);
  const auto [dy, dz, dw, db] =
      detail::gate_backward(panel.rows_of(grad_pair), y, z, t.weight(detail::kGOut), b,
                            {true, sums.want_z(), sums.wants(detail::kGOut), b && sums.wants(detail::kGOut + 1)});
  sums.add(detail::kGOut, dw);
  sums.add(detail::kGOut + 1, db);
  if (sums.wants(detail::kPOut)) sums.add(detail::kPOut, at::cuda::mm(dy.t(), n.y));
  if (sums.wants(detail::kPOut + 1)) sums.add(detail::kPOut + 1, dy.sum(0));
  if (sums.want_z()) panel.of(dz_pair).copy_(dz.view(panel.of(dz_pair).sizes()));
  if (!sums.want_a_and_b() && !sums.wants(detail::kNormOut) && !sums.wants(detail::kNormOut + 1)) return;
  const Tensor dn = at::cuda::mm(dy, t.weight(detail::kPOut));
  const Tensor d_rows = n.backward(dn, norm_weight, detail::kNormOut, sums);
  if (sums.want_a_and_b()) layers.transpose(Layers::To::kChannels, panel, d_rows, d_o, {}, 1);
}

// From da and db, and dz so far: dx in its place, and the mask's gradient.
void input_backward(const Layers& layers, Gradients& sums, const Panel& panel, const Element& e, const Tensor& da,
                    const Tensor& db, const Tensor& dz_pair, const Tensor& dmask) {
  const TriangleUpdate& t = layers.update();
  const NormalizedRows normalized(panel.rows_of(e.x), layers.norm_weight(), layers.norm_bias(), t.eps);
  const Tensor z = normalized.y.to(t.dtype());
  Tensor dz = sums.want_z() ? panel.rows_of(dz_pair).clone() : Tensor();
  const auto gate = [&](const Tensor& channels, TriangleParameter p, TriangleParameter g, double factor) {
    if (dmask.defined()) {
      const Tensor unmasked = layers.rows_of(channels, panel, {}, factor).mul_(layers.gated(z, p, g));
      Tensor target = panel.of(dmask);
      target.add_(unmasked.sum(1, false, dmask.scalar_type()).view(target.sizes()));
    }
    const OptionalTensor &b = t.bias(p), &bg = t.bias(g);
    const auto [dx, dw, dwg, dbias, dbias_g] = detail::glu_backward(
        layers.rows_of(channels, panel, e.mask, factor), z, t.weight(p), t.weight(g), b, bg, "sigmoid",
        {sums.want_z(), sums.wants(p), sums.wants(g), b && sums.wants(p + 1), bg && sums.wants(g + 1)});
    sums.add(p, dw);
    sums.add(g, dwg);
    sums.add(p + 1, dbias);
    sums.add(g + 1, dbias_g);
    if (sums.want_z()) dz.add_(dx);
  };
  gate(da, detail::kPA, detail::kGA, layers.scale());
  gate(db, detail::kPB, detail::kGB, 1);
  if (!sums.want_z()) return;
  const Tensor dx = normalized.backward(dz, layers.norm_weight(), detail::kNormIn, sums);
  panel.of(dz_pair).copy_(dx.view(panel.of(dz_pair).sizes()));
}

std::vector<Tensor> update_backward_cuda(const Tensor& grad, const Tensor& x, const Tensor& product,
                                         const OptionalTensor& mask, const TriangleParameterList& parameters,
                                         bool outgoing, double eps, TriangleMask wanted) {
  const TriangleUpdate t =
      detail::checked_triangle_update_backward(grad, x, product, mask, parameters, outgoing, eps, wanted);
  const c10::cuda::CUDAGuard guard(x.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Tensor> gradients = detail::empty_triangle_gradients(t, wanted);
  if (grad.numel() == 0) {
    for (Tensor& gradient : gradients) gradient.zero_();
    return gradients;
  }
  const Layers layers(t);
  Gradients sums(layers, wanted);
  const int64_t d = layers.channels();
  // Where nothing is written to it, it has no memory of its own.
  const Tensor dx = wanted[0]       ? gradients[0]
                    : sums.want_z() ? Tensor(at::detail::empty_cuda(x.sizes(), x.options()))
                                    : Tensor(at::detail::empty_cuda({1}, x.options())).expand(x.sizes());
  const Tensor dmask =
      wanted[1] ? at::zeros(mask->sizes(), x.options().dtype(detail::moments_dtype(t.dtype()))) : Tensor();
  const Tensor d_o = layers.empty_channels(d), b = layers.empty_channels(d);
  const Rotating memory(layers, d);
  const Tensor a = memory.factors(0, d), da = memory.results(0, d);
  for (int64_t index = 0; index < detail::batch_size(x, 3); ++index) {
    const Element e(t, index);
    const Tensor o = detail::batch_element(product, 3, index).contiguous();
    const Tensor x_pair = detail::batch_element(x, 3, index), grad_pair = detail::batch_element(grad, 3, index);
    const Tensor dz_pair = detail::batch_element(dx, 3, index);
    layers.for_each_panel(
        [&](const Panel& panel) { output_backward(layers, sums, panel, o, x_pair, grad_pair, d_o, dz_pair); });
    if (!sums.want_a_and_b()) continue;
    make_a_and_b(layers, e, a, b);
    // da = do @ b and db = do.T @ a, over a and b: da where factors a have been used up.
    for_each_group(d, memory.group, [&](int64_t begin, int64_t count) {
      const auto of_group = [&](const Tensor& channels) { return channels.narrow(0, begin, count); };
      Tensor da_group = of_group(da), db_group = of_group(b);
      at::cuda::bmm_out(da_group, of_group(d_o), db_group);
      at::cuda::bmm_out(db_group, of_group(d_o).mT(), of_group(a));
    });
    const auto in_direction = [&](const Tensor& pair) {
      return outgoing || !pair.defined() ? pair : pair.transpose(0, 1);
    };
    const Tensor dmask_pair = dmask.defined() ? detail::batch_element(dmask, 2, index) : dmask;
    layers.for_each_panel([&](const Panel& panel) {
      input_backward(layers, sums, panel, e, da, b, in_direction(dz_pair), in_direction(dmask_pair));
    });
  }
  sums.finish(gradients);
  if (wanted[1]) gradients[1].copy_(dmask);
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  detail::register_triangle_update(m);
  m.impl("_triangle_multiplicative_update", update_cuda);
  m.impl("_triangle_multiplicative_update_", update_cuda_);
  m.impl("_triangle_multiplicative_update_backward", update_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
