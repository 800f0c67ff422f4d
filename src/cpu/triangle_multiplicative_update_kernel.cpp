#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_cpu_dispatch.h>
#include <ATen/ops/sigmoid_backward_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cpu/layer_norm.h"
#include "cpu/linear.h"
#include "ops/common.h"
#include "ops/triangle_multiplicative_update.h"

// For each element of the batch: panels of x are normalised and multiplied while they are in the cache, and give a and
// b, channels first; batched products overwrite a with o; panels of o and x give the result. No other tensor of x's
// size is made. For the incoming direction x is read transposed: a'[i, k] = a[k, i] makes of it the outgoing one.
namespace torchops::cpu {
namespace {

using detail::OptionalTensor;
using detail::TriangleMask;
using detail::TriangleParameter;
using detail::TriangleParameterList;
using detail::TriangleUpdate;

// Rows [begin, end) of the pair matrix, as a panel of (end - begin) * N rows of c features.
struct Panel {
  int64_t begin, end;

  Tensor of(const Tensor& pair) const { return pair.narrow(0, begin, end - begin); }
  /// (N, N, c) -> rows of c. A copy where they are not evenly spaced.
  Tensor rows_of(const Tensor& pair) const { return of(pair).reshape({(end - begin) * pair.size(1), pair.size(2)}); }
  /// (d, N, N) -> (d, rows of the pair matrix, N).
  Tensor channels_of(const Tensor& t) const { return t.narrow(1, begin, end - begin); }
};

int64_t rows_per_panel(const TriangleUpdate& t) {
  const int64_t features = std::max(t.x.size(-1), t.weight(detail::kPA).size(0));
  const int64_t row_bytes = t.x.size(-2) * features * static_cast<int64_t>(t.x.element_size());
  return std::max(kPanelBytes / std::max(row_bytes, int64_t{1}), int64_t{1});
}

// What the panels of one call share.
class Layers {
 public:
  explicit Layers(const TriangleUpdate& t)
      : t_(t),
        n_(t.x.size(-2)),
        scale_(detail::triangle_scale(n_, t.dtype())),
        in_(t.x, t.x.sizes().slice(t.x.dim() - 1), t.parameters[detail::kNormIn], t.parameters[detail::kNormIn + 1]),
        out_(t.weight(detail::kPA), {channels()}, t.parameters[detail::kNormOut], t.parameters[detail::kNormOut + 1]) {}

  int64_t n() const { return n_; }
  int64_t channels() const { return t_.weight(detail::kPA).size(0); }
  double scale() const { return scale_; }
  const TriangleUpdate& update() const { return t_; }

  using Moments = std::tuple<Tensor, Tensor, Tensor>;
  /// Layer norms of rows, with mean and rstd.
  Moments norm_in(const Tensor& rows) const {
    return at::cpu::native_layer_norm(rows.contiguous(), {rows.size(1)}, in_.weight, in_.bias, t_.eps);
  }
  Moments norm_out(const Tensor& rows) const {
    return at::cpu::native_layer_norm(rows, {rows.size(1)}, out_.weight, out_.bias, t_.eps * scale_ * scale_);
  }
  /// z of a panel, in the dtype of the products.
  Tensor z(const Tensor& rows) const { return std::get<0>(norm_in(rows)).to(t_.dtype()); }

  const Affine& affine_in() const { return in_; }
  const Affine& affine_out() const { return out_; }

  /// Channels of padded matrices without what is behind the N rows and columns.
  Tensor matrices(const Tensor& channels) const { return channels.narrow(1, 0, n_).narrow(2, 0, n_); }
  /// rows @ weight.T + bias.
  Tensor linear(const Tensor& rows, TriangleParameter layer) const {
    const Tensor& w = t_.weight(layer);
    Tensor out = at::empty({rows.size(0), w.size(0)}, w.options());
    linear_out(out, rows, transposed(w), t_.bias(layer));
    return out;
  }
  /// The same transposed, (out, rows).
  Tensor channels_first(const Tensor& rows, TriangleParameter layer) const {
    const Tensor& w = t_.weight(layer);
    Tensor out = at::empty({w.size(0), rows.size(0)}, w.options());
    const OptionalTensor& b = t_.bias(layer);
    linear_out(out, w, transposed(rows), b ? OptionalTensor(b->unsqueeze(1)) : b);
    return out;
  }

 private:
  const TriangleUpdate& t_;
  int64_t n_;
  double scale_;
  Affine in_, out_;
};

// One element of the batch: its part of x and mask, and a, b and o.
struct Element {
  Tensor x, mask;        // (N, N, c) and, in the dtype of the products, (N, N); of the incoming direction transposed
  Tensor a, b, product;  // (d, N, N)
};

// The mask that a panel is multiplied by, (1, rows), with a factor inside.
Tensor mask_row(const Tensor& mask, const Panel& panel, double factor) {
  const Tensor row = panel.of(mask).reshape({1, -1});
  return factor == 1 ? row : row * factor;
}

void make_a_and_b(const Layers& layers, const Element& e) {
  for_each_panel(layers.n(), rows_per_panel(layers.update()), [&](int64_t begin, int64_t end) {
    const Panel panel{begin, end};
    const Tensor z = layers.z(panel.rows_of(e.x));
    const auto make = [&](const Tensor& to, TriangleParameter p, TriangleParameter g, double factor) {
      Tensor gate = layers.channels_first(z, g), target = panel.channels_of(to);
      at::cpu::sigmoid_(gate);
      if (e.mask.defined()) {
        gate.mul_(mask_row(e.mask, panel, factor));
      } else if (factor != 1) {
        gate.mul_(factor);
      }
      at::cpu::mul_out(target, layers.channels_first(z, p).view(target.sizes()), gate.view(target.sizes()));
    };
    make(e.a, detail::kPA, detail::kGA, layers.scale());
    make(e.b, detail::kPB, detail::kGB, 1);
  });
}

// A buffer of (channels + spare, padded, padded) in which products overwrite one of their factors: that begins `spare`
// channels behind the result, so that a group of results lies where factors have been used up.
struct Rotating {
  int64_t spare;
  Tensor memory;

  static int64_t spare_channels(const Layers& layers) {
    constexpr int64_t most_bytes = int64_t{32} << 20;
    const int64_t n = layers.n();
    const int64_t bytes = n * n * static_cast<int64_t>(c10::elementSize(layers.update().dtype()));
    return std::clamp(most_bytes / std::max(bytes, int64_t{1}), int64_t{1}, std::max(layers.channels(), int64_t{1}));
  }
  /// For `results` channels.
  Rotating(const Layers& layers, int64_t results) : spare(spare_channels(layers)) {
    const int64_t n = layers.n(), padded = detail::padded_size(n, layers.update().dtype());
    memory = at::empty({results + spare, padded, padded}, layers.update().weight(detail::kPA).options());
    for (const int64_t dim : {1, 2}) memory.narrow(dim, n, padded - n).zero_();
  }
  Tensor results(int64_t first, int64_t count) const { return memory.narrow(0, first, count); }
  /// Where the factors of these results are to be written.
  Tensor factors(int64_t first, int64_t count) const { return memory.narrow(0, first + spare, count); }
};

// o = a @ b.T for each channel, group by group.
void multiply(const Layers& layers, const Element& e, int64_t spare) {
  for (int64_t begin = 0; begin < layers.channels(); begin += spare) {
    const int64_t count = std::min(spare, layers.channels() - begin);
    Tensor out = e.product.narrow(0, begin, count);
    at::bmm_out(out, e.a.narrow(0, begin, count), e.b.narrow(0, begin, count).mT());
  }
}

// The update of a panel of rows.
Tensor update_of(const Layers& layers, const Element& e, const Panel& panel, const Tensor& x_rows) {
  const Tensor o = panel.channels_of(e.product).flatten(1).t().contiguous();
  Tensor y = layers.linear(std::get<0>(layers.norm_out(o)), detail::kPOut);
  Tensor gate = layers.linear(layers.z(x_rows), detail::kGOut);
  at::cpu::sigmoid_(gate);
  at::cpu::mul_(y, gate);
  return y;
}

// a, b and o of the index-th element. `memory` is that of a and o, `b` scratch.
Element element_of(const Layers& layers, int64_t index, const Rotating& memory, int64_t first_result, const Tensor& b) {
  const TriangleUpdate& t = layers.update();
  Element e;
  e.x = detail::batch_element(t.x, 3, index);
  if (t.mask) e.mask = detail::batch_element(*t.mask, 2, index);
  if (!t.outgoing) {
    e.x = e.x.transpose(0, 1);
    if (t.mask) e.mask = e.mask.transpose(0, 1);
  }
  if (t.mask) e.mask = e.mask.to(t.dtype());
  e.a = layers.matrices(memory.factors(first_result, layers.channels()));
  e.b = b;
  e.product = layers.matrices(memory.results(first_result, layers.channels()));
  return e;
}

Tensor empty_channels(const Layers& layers) {
  return at::empty({layers.channels(), layers.n(), layers.n()}, layers.update().weight(detail::kPA).options());
}

// Calls finish(index, element) once a, b and o of an element are there. Returns the products of all, if they are kept.
template <class Finish>
Tensor for_each_element(const Layers& layers, bool keep_product, const Finish& finish) {
  const TriangleUpdate& t = layers.update();
  const int64_t batch = detail::batch_size(t.x, 3), d = layers.channels();
  const Rotating memory(layers, keep_product ? batch * d : d);
  const Tensor b = empty_channels(layers);
  for (int64_t index = 0; index < batch; ++index) {
    const Element e = element_of(layers, index, memory, keep_product ? index * d : 0, b);
    make_a_and_b(layers, e);
    multiply(layers, e, memory.spare);
    finish(index, e);
  }
  if (!keep_product) return at::empty({0}, b.options());
  at::DimVector shape(t.x.sizes().slice(0, t.x.dim() - 3));
  for (const int64_t size : {d, memory.memory.size(1), memory.memory.size(2)}) shape.push_back(size);
  return memory.results(0, batch * d).view(shape);
}

std::tuple<Tensor, Tensor> update_cpu(const Tensor& x, const OptionalTensor& mask,
                                      const TriangleParameterList& parameters, bool outgoing, double eps,
                                      bool keep_product) {
  const TriangleUpdate t = detail::checked_triangle_update(x, mask, parameters, outgoing, eps);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Layers layers(t);
  Tensor out = at::empty(x.sizes(), t.weight(detail::kPA).options());
  const Tensor product = for_each_element(layers, keep_product, [&](int64_t index, const Element& e) {
    const Tensor pair = detail::batch_element(x, 3, index), result = detail::batch_element(out, 3, index);
    for_each_panel(layers.n(), rows_per_panel(t), [&](int64_t begin, int64_t end) {
      const Panel panel{begin, end};
      panel.rows_of(result).copy_(update_of(layers, e, panel, panel.rows_of(pair)));
    });
  });
  return {out, product};
}

Tensor update_cpu_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                   double eps, bool keep_product) {
  TriangleUpdate t = detail::checked_triangle_update_(x, mask, parameters, outgoing, eps);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (t.mask) t.mask = detail::read_first(x, *t.mask);
  for (OptionalTensor& parameter : t.parameters) {
    if (parameter) parameter = detail::read_first(x, *parameter);
  }
  const Layers layers(t);
  Tensor product;
  // Panels take memory while others have been written.
  overwriting(x, [&] {
    product = for_each_element(layers, keep_product, [&](int64_t index, const Element& e) {
      const Tensor pair = detail::batch_element(x, 3, index);
      for_each_panel(layers.n(), rows_per_panel(t), [&](int64_t begin, int64_t end) {
        const Panel panel{begin, end};
        Tensor target = panel.of(pair);
        target.add_(update_of(layers, e, panel, panel.rows_of(pair)).view(target.sizes()));
      });
    });
  });
  return product;
}

// --- gradients

// The sums of gradients over panels, each thread's chunk of them in a fixed order.
class Gradients {
 public:
  Gradients(const Layers& layers, const TriangleMask& wanted, int64_t chunks) : t_(layers.update()), wanted_(wanted) {
    const auto options = t_.weight(detail::kPA).options().dtype(detail::moments_dtype(t_.dtype()));
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (!wanted[2 + i]) continue;
      at::DimVector shape(t_.parameters[i]->sizes());
      shape.insert(shape.begin(), chunks);
      sums_[i] = at::zeros(shape, options);
    }
  }

  /// Of a linear layer with the cotangent (out, rows) and the input (rows, in).
  void add_layer(int64_t chunk, TriangleParameter layer, const Tensor& cotangent, const Tensor& input) const {
    if (wanted_[2 + layer]) add(chunk, layer, at::cpu::mm(cotangent, input));
    if (wanted_[3 + layer]) add(chunk, layer + 1, cotangent.sum(1, false, sums_[layer + 1].scalar_type()));
  }
  void add(int64_t chunk, size_t parameter, const Tensor& part) const {
    if (wanted_[2 + parameter]) sums_[parameter].select(0, chunk).add_(part);
  }
  void finish(const std::vector<Tensor>& gradients) const {
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (wanted_[2 + i]) gradients[2 + i].copy_(sums_[i].sum(0));
    }
  }

 private:
  const TriangleUpdate& t_;
  const TriangleMask& wanted_;
  std::array<Tensor, detail::kTriangleParameters> sums_;
};

// A layer norm backwards: the gradient of its input, and of weight and bias into the sums.
Tensor norm_backward(const Gradients& sums, int64_t chunk, TriangleParameter layer, const TriangleMask& wanted,
                     const Tensor& grad, const Tensor& rows, const Layers::Moments& normalized, const Affine& affine) {
  const auto& [y, mean, rstd] = normalized;
  std::optional<Tensor> weight = affine.weight;
  // ATen takes shape and dtype of the parameters' gradients from the parameters.
  if (!weight && (wanted[2 + layer] || wanted[3 + layer])) weight = at::ones({rows.size(1)}, rows.options());
  const auto [dx, dweight, dbias] =
      at::cpu::native_layer_norm_backward(grad.contiguous(), rows, {rows.size(1)}, mean, rstd, weight, /*bias=*/weight,
                                          {true, wanted[2 + layer], wanted[3 + layer]});
  sums.add(chunk, layer, dweight);
  sums.add(chunk, layer + 1, dbias);
  return dx;
}

// From the cotangent of the result: d(o) in channels first, and the gate's part of dz in the place of dx.
void output_backward(const Layers& layers, const Gradients& sums, const TriangleMask& wanted, int64_t chunk,
                     const Panel& panel, const Element& e, const Tensor& x_pair, const Tensor& grad_pair,
                     const Tensor& d_o, const Tensor& dz_pair) {
  const TriangleUpdate& t = layers.update();
  const Tensor g = panel.rows_of(grad_pair), o = panel.channels_of(e.product).flatten(1).t().contiguous();
  const Layers::Moments normalized = layers.norm_out(o);
  const Tensor z = layers.z(panel.rows_of(x_pair)), n = std::get<0>(normalized);
  Tensor s = layers.linear(z, detail::kGOut);
  at::cpu::sigmoid_(s);
  const Tensor dy = at::cpu::mul(g, s);
  Tensor du = at::cpu::mul(g, layers.linear(n, detail::kPOut));
  at::cpu::sigmoid_backward_out(du, du, s);
  sums.add_layer(chunk, detail::kPOut, transposed(dy), n);
  sums.add_layer(chunk, detail::kGOut, transposed(du), z);
  if (detail::wants_z(wanted)) {
    panel.of(dz_pair).copy_(at::cpu::mm(du, t.weight(detail::kGOut)).view(panel.of(dz_pair).sizes()));
  }
  const bool wants_do = detail::wants_a_and_b(wanted);
  if (!wants_do && !wanted[2 + detail::kNormOut] && !wanted[3 + detail::kNormOut]) return;
  const Tensor dn = at::cpu::mm(dy, t.weight(detail::kPOut));
  const Tensor do_rows = norm_backward(sums, chunk, detail::kNormOut, wanted, dn, o, normalized, layers.affine_out());
  if (!wants_do) return;
  Tensor target = panel.channels_of(d_o);
  target.copy_(do_rows.t().view(target.sizes()));
}

// From da and db, and dz so far: dx in its place, and the mask's gradient.
void input_backward(const Layers& layers, const Gradients& sums, const TriangleMask& wanted, int64_t chunk,
                    const Panel& panel, const Element& e, const Tensor& da, const Tensor& db, const Tensor& dz_pair,
                    const Tensor& dmask) {
  const TriangleUpdate& t = layers.update();
  const Tensor rows = panel.rows_of(e.x).contiguous();
  const Layers::Moments normalized = layers.norm_in(rows);
  const Tensor z = std::get<0>(normalized).to(t.dtype());
  const bool wants_z = detail::wants_z(wanted);
  Tensor dz = wants_z ? panel.of(dz_pair).reshape(rows.sizes()).clone() : Tensor();
  const auto gate = [&](const Tensor& cotangent, TriangleParameter p, TriangleParameter g, double factor) {
    const Tensor value = layers.channels_first(z, p);
    Tensor s = layers.channels_first(z, g);
    at::cpu::sigmoid_(s);
    Tensor grad = panel.channels_of(cotangent).reshape(value.sizes());
    if (factor != 1) grad = grad * factor;
    if (wanted[1]) {
      Tensor target = panel.of(dmask);
      target.add_((grad * value).mul_(s).sum(0).view(target.sizes()));
    }
    if (e.mask.defined()) grad = grad * mask_row(e.mask, panel, 1);
    const Tensor dp = at::cpu::mul(grad, s);
    Tensor dg = at::cpu::mul(grad, value);
    at::cpu::sigmoid_backward_out(dg, dg, s);
    sums.add_layer(chunk, p, dp, z);
    sums.add_layer(chunk, g, dg, z);
    if (!wants_z) return;
    input_gradient(dz, transposed(dp), t.weight(p), /*accumulate=*/true);
    input_gradient(dz, transposed(dg), t.weight(g), /*accumulate=*/true);
  };
  gate(da, detail::kPA, detail::kGA, layers.scale());
  gate(db, detail::kPB, detail::kGB, 1);
  if (!wants_z) return;
  const Tensor dx = norm_backward(sums, chunk, detail::kNormIn, wanted, dz, rows, normalized, layers.affine_in());
  panel.of(dz_pair).copy_(dx.view(panel.of(dz_pair).sizes()));
}

std::vector<Tensor> update_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& product,
                                        const OptionalTensor& mask, const TriangleParameterList& parameters,
                                        bool outgoing, double eps, TriangleMask wanted) {
  const TriangleUpdate t =
      detail::checked_triangle_update_backward(grad, x, product, mask, parameters, outgoing, eps, wanted);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Tensor> gradients = detail::empty_triangle_gradients(t, wanted);
  if (grad.numel() == 0) {
    for (Tensor& gradient : gradients) gradient.zero_();
    return gradients;
  }
  const Layers layers(t);
  // Panels are divided among a number of chunks that depends on sizes alone, and with it the order of the additions.
  constexpr int64_t most_chunks = 16;
  const int64_t n = layers.n(), d = layers.channels(), step = rows_per_panel(t), panels = ceil_div(n, step);
  const int64_t chunks = std::min(panels, most_chunks);
  const Gradients sums(layers, wanted, chunks);
  const auto for_each_chunk = [&](const auto& f) {
    for_each_panel(chunks, 1, [&](int64_t chunk, int64_t) {
      for (int64_t i = panels * chunk / chunks; i < panels * (chunk + 1) / chunks; ++i) {
        f(chunk, Panel{i * step, std::min(n, (i + 1) * step)});
      }
    });
  };
  // Where nothing is written to it, it has no memory of its own.
  const Tensor dx = wanted[0]                 ? gradients[0]
                    : detail::wants_z(wanted) ? at::empty(x.sizes(), x.options())
                                              : at::empty({1}, x.options()).expand(x.sizes());
  const Tensor dmask =
      wanted[1] ? at::zeros(mask->sizes(), x.options().dtype(detail::moments_dtype(t.dtype()))) : Tensor();
  const Rotating memory(layers, d);
  const Tensor b = empty_channels(layers), d_o = empty_channels(layers);
  for (int64_t index = 0; index < detail::batch_size(x, 3); ++index) {
    Element e = element_of(layers, index, memory, 0, b);
    e.product = layers.matrices(detail::batch_element(product, 3, index));
    const Tensor x_pair = detail::batch_element(x, 3, index), grad_pair = detail::batch_element(grad, 3, index);
    Tensor dz_pair = detail::batch_element(dx, 3, index);
    for_each_chunk([&](int64_t chunk, const Panel& panel) {
      output_backward(layers, sums, wanted, chunk, panel, e, x_pair, grad_pair, d_o, dz_pair);
    });
    if (!detail::wants_a_and_b(wanted)) continue;
    make_a_and_b(layers, e);
    // da = do @ b and db = do.T @ a, over a and b: da where factors a have been used up.
    const Tensor da = layers.matrices(memory.results(0, d));
    for (int64_t begin = 0; begin < d; begin += memory.spare) {
      const auto group = [&](const Tensor& t) { return t.narrow(0, begin, std::min(memory.spare, d - begin)); };
      Tensor da_group = group(da), db_group = group(e.b);
      at::bmm_out(da_group, group(d_o), db_group);
      at::bmm_out(db_group, group(d_o).mT(), group(e.a));
    }
    Tensor dmask_pair = dmask.defined() ? detail::batch_element(dmask, 2, index) : dmask;
    if (!outgoing) {
      dz_pair = dz_pair.transpose(0, 1);
      if (dmask.defined()) dmask_pair = dmask_pair.transpose(0, 1);
    }
    for_each_chunk([&](int64_t chunk, const Panel& panel) {
      input_backward(layers, sums, wanted, chunk, panel, e, da, e.b, dz_pair, dmask_pair);
    });
  }
  sums.finish(gradients);
  if (wanted[1]) gradients[1].copy_(dmask);
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  detail::register_triangle_update(m);
  m.impl("_triangle_multiplicative_update", update_cpu);
  m.impl("_triangle_multiplicative_update_", update_cpu_);
  m.impl("_triangle_multiplicative_update_backward", update_backward_cpu);
}

}  // namespace
}  // namespace torchops::cpu
