#include <ATen/TensorOperators.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_cpu_dispatch.h>
#include <ATen/ops/sigmoid_backward_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <torch/library.h>

#include "cpu/layer_norm.h"
#include "cpu/linear.h"
#include "ops/triangle_layout.h"

// For each batch element: panels of x are normalised and multiplied while they are in the cache, which gives a and b,
// channels first; batched products overwrite a with o; panels of o and x give the result. Besides x, the panels and a
// spare group of channels, two pair tensors are alive: a and b, then o and the result.
namespace torchops::cpu {
namespace {

using detail::OptionalTensor;
using detail::TriangleElement;
using detail::TriangleGradients;
using detail::TriangleOutputMask;
using detail::TrianglePanel;
using detail::TriangleParameter;
using detail::TriangleParameterList;
using detail::TriangleProduct;
using detail::TriangleUpdate;

// ATen multiplies matrices one by one if the result has gaps. A group of several fits the cache.
Tensor& bmm_out(Tensor& out, const Tensor& a, const Tensor& b) {
  return out.is_contiguous() || out.size(0) == 1 ? at::bmm_out(out, a, b) : out.copy_(at::bmm(a, b));
}

constexpr detail::TriangleBackend kBackend{
    [](at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }, bmm_out,
    /*multiplies_padding=*/false};
// A few matrices keep the threads busy, and a group is negligible beside a and b even if they are small.
constexpr int64_t kGroupBytes = int64_t{1} << 20;

// Shared by all panels of a call.
class Layers : public detail::TriangleLayout {
 public:
  explicit Layers(const TriangleUpdate& t)
      : TriangleLayout(t, kBackend, kGroupBytes),
        in_(t.x, t.x.sizes().slice(t.x.dim() - 1), t.parameters[detail::kNormIn], t.parameters[detail::kNormIn + 1]),
        out_(t.weight(detail::kPA), {channels()}, t.parameters[detail::kNormOut], t.parameters[detail::kNormOut + 1]),
        sides_(make_sides()) {}

  int64_t rows_per_panel() const {
    const int64_t features = std::max(update().x.size(-1), channels());
    const int64_t row_bytes = n() * features * static_cast<int64_t>(update().x.element_size());
    return std::max(kPanelBytes / std::max(row_bytes, int64_t{1}), int64_t{1});
  }
  /// Calls f on each panel of the pair matrix, on one thread per panel.
  template <class F>
  void for_each_panel(const F& f) const {
    const int64_t most = rows_per_panel(), step = most < n() ? balanced_rows(n(), most) : most;
    cpu::for_each_panel(n(), step, [&](int64_t begin, int64_t end) { f(TrianglePanel{begin, end}); });
  }

  using Moments = std::tuple<Tensor, Tensor, Tensor>;
  /// Layer norms of rows, with mean and rstd.
  Moments norm_in(const Tensor& rows) const {
    return at::cpu::native_layer_norm(rows.contiguous(), {rows.size(1)}, in_.weight, in_.bias, update().eps);
  }
  Moments norm_out(const Tensor& rows) const {
    return at::cpu::native_layer_norm(rows, {rows.size(1)}, out_.weight, out_.bias, eps_out());
  }
  /// z of a panel, in the dtype of the products.
  Tensor z(const Tensor& rows) const { return std::get<0>(norm_in(rows)).to(update().dtype()); }

  const Affine& affine_in() const { return in_; }
  const Affine& affine_out() const { return out_; }

  /// rows @ weight.T + bias.
  Tensor linear(const Tensor& rows, TriangleParameter layer) const {
    const Tensor& w = update().weight(layer);
    Tensor out = empty({rows.size(0), w.size(0)});
    linear_out(out, rows, transposed(w), update().bias(layer));
    return out;
  }
  /// Layers of the same kind of a, of b, or of both, one behind the other.
  struct Stack {
    Tensor weight;
    OptionalTensor bias;
    std::array<TriangleParameter, 2> layers;

    /// The transposed layers of rows: (all features, rows).
    Tensor channels_first(const Tensor& rows) const {
      Tensor out = at::empty({weight.size(0), rows.size(0)}, weight.options());
      linear_out(out, weight, transposed(rows), bias ? OptionalTensor(bias->unsqueeze(1)) : bias);
      return out;
    }
  };
  /// Products and gates that give a (side 0), b (side 1), or both.
  struct Sides {
    Stack p, g;
    size_t first, count;
  };
  /// Both in one, with half the calls, if their parameters are halves of one tensor and the scratch of twice the size
  /// fits a panel.
  const std::vector<Sides>& sides() const { return sides_; }
  /// The sigmoid of channels_first() or linear().
  static Tensor sigmoid(Tensor preactivation) { return at::cpu::sigmoid_(preactivation); }

 private:
  std::vector<Sides> make_sides() const {
    const auto p = stacked(detail::kPA, detail::kPB), g = stacked(detail::kGA, detail::kGB);
    if (p && g && 2 * n() <= rows_per_panel()) return {{*p, *g, 0, 2}};
    return {{alone(detail::kPA), alone(detail::kGA), 0, 1}, {alone(detail::kPB), alone(detail::kGB), 1, 1}};
  }
  Stack alone(TriangleParameter layer) const { return {update().weight(layer), update().bias(layer), {layer, layer}}; }
  std::optional<Stack> stacked(TriangleParameter a, TriangleParameter b) const {
    const Tensor &w = update().weight(a), &other = update().weight(b);
    const OptionalTensor &bias = update().bias(a), &other_bias = update().bias(b);
    const bool halves = detail::are_halves(w, other) && bias.has_value() == other_bias.has_value() &&
                        (!bias || detail::are_halves(*bias, *other_bias));
    if (!halves) return std::nullopt;
    return Stack{both_halves(w), bias ? OptionalTensor(both_halves(*bias)) : bias, {a, b}};
  }

  Affine in_, out_;
  std::vector<Sides> sides_;
};

// What belongs to the i-th of the sides, of a tensor with the features of all.
Tensor of_side(const Tensor& all, const Layers::Sides& sides, size_t i) {
  const int64_t d = all.size(0) / static_cast<int64_t>(sides.count);
  return all.narrow(0, static_cast<int64_t>(i) * d, d);
}

// (d, N, N) to rows of d.
Tensor rows_of_channels(const Tensor& channels, const TrianglePanel& panel) {
  return panel.channels_of(channels).flatten(1).t().contiguous();
}

void make_a_and_b(const Layers& layers, const TriangleElement& e, const Tensor& a, const Tensor& b) {
  layers.for_each_panel([&](const TrianglePanel& panel) {
    const Tensor z = layers.z(panel.rows_of(e.x));
    for (const Layers::Sides& sides : layers.sides()) {
      Tensor gate = Layers::sigmoid(sides.g.channels_first(z));
      const Tensor value = sides.p.channels_first(z);
      if (e.mask.defined()) gate.mul_(panel.of(e.mask).reshape({1, -1}));
      for (size_t i = 0; i < sides.count; ++i) {
        const size_t side = sides.first + i;
        Tensor target = panel.channels_of(side == 0 ? a : b), own_gate = of_side(gate, sides, i);
        if (side == 0 && layers.scale() != 1) own_gate.mul_(layers.scale());
        at::cpu::mul_out(target, of_side(value, sides, i).view(target.sizes()), own_gate.view(target.sizes()));
      }
    }
  });
}

// The update of one panel of rows.
Tensor update_of(const Layers& layers, const TrianglePanel& panel, const Tensor& o, const Tensor& x_rows) {
  const Tensor n = std::get<0>(layers.norm_out(rows_of_channels(o, panel)));
  Tensor y = layers.linear(n, detail::kPOut);
  at::cpu::mul_(y, Layers::sigmoid(layers.linear(layers.z(x_rows), detail::kGOut)));
  return y;
}

// sum = x + update, for one panel. `sum` may be x.
void add_update_of(const Layers& layers, const TrianglePanel& panel, const Tensor& o, const Tensor& x,
                   const Tensor& sum) {
  const Tensor own = panel.of(x);
  Tensor target = panel.of(sum);
  at::cpu::add_out(target, own, update_of(layers, panel, o, panel.rows_of(x)).view(own.sizes()));
}

// Computes the product of each batch element and calls finish(index, o) on it.
template <class Finish>
Tensor for_each_product(const Layers& layers, bool keep_product, const Finish& finish) {
  return detail::for_each_product(
      layers, keep_product,
      [&](const TriangleElement& e, const Tensor& a, const Tensor& b) { make_a_and_b(layers, e, a, b); }, finish);
}

std::tuple<Tensor, Tensor> update_cpu(const Tensor& x, const OptionalTensor& mask,
                                      const TriangleParameterList& parameters, bool outgoing, double eps,
                                      bool keep_product, bool add_residual) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const TriangleUpdate t = detail::checked_triangle_update(x, mask, parameters, outgoing, eps);
  const Layers layers(t);
  const at::TensorOptions options = add_residual ? x.options() : layers.options();
  Tensor out;
  const Tensor product = for_each_product(layers, keep_product, [&](int64_t index, const Tensor& o) {
    // Allocated only now, so that it can reuse the memory of b.
    if (!out.defined()) out = layers.empty(x.sizes(), options);
    const Tensor pair = detail::batch_element(x, 3, index), result = detail::batch_element(out, 3, index);
    layers.for_each_panel([&](const TrianglePanel& panel) {
      if (add_residual) {
        add_update_of(layers, panel, o, pair, result);
      } else {
        panel.rows_of(result).copy_(update_of(layers, panel, o, panel.rows_of(pair)));
      }
    });
  });
  return {out.defined() ? out : layers.empty(x.sizes(), options), product};
}

Tensor update_cpu_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                   double eps, bool keep_product) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TriangleUpdate t = detail::checked_triangle_update_(x, mask, parameters, outgoing, eps);
  t = detail::read_first(t);
  const Layers layers(t);
  Tensor product;
  // A panel allocates while others have already been written.
  overwriting(x, [&] {
    product = for_each_product(layers, keep_product, [&](int64_t index, const Tensor& o) {
      const Tensor pair = detail::batch_element(x, 3, index);
      layers.for_each_panel([&](const TrianglePanel& panel) { add_update_of(layers, panel, o, pair, pair); });
    });
  });
  return product;
}

// --- gradients

// The number of chunks depends only on sizes, and so does the order of the additions. Each chunk is processed by one
// thread.
struct Chunks {
  int64_t n, panels, step, count;

  explicit Chunks(const Layers& layers)
      : n(layers.n()),
        panels(ceil_div(n, layers.rows_per_panel())),
        step(ceil_div(n, std::max(panels, int64_t{1}))),
        count(std::clamp(panels, int64_t{1}, int64_t{16})) {}

  /// Calls f(chunk, panel) for each panel.
  template <class F>
  void for_each_panel(const F& f) const {
    cpu::for_each_panel(count, 1, [&](int64_t chunk, int64_t) {
      for (int64_t i = panels * chunk / count; i < panels * (chunk + 1) / count; ++i) {
        f(chunk, TrianglePanel{i * step, std::min(n, (i + 1) * step)});
      }
    });
  }
};

// The gradients of one chunk.
class Gradients {
 public:
  Gradients(const Layers& layers, const TriangleGradients& all, int64_t chunk)
      : layers_(layers), all_(all), chunk_(chunk) {}

  bool wants(size_t parameter) const { return all_.wants(parameter); }
  bool wants_z() const { return all_.wants_z(); }
  bool wants_a_and_b() const { return all_.wants_a_and_b(); }

  /// Adds the gradients of a linear layer with the cotangent (out, rows) and the input (rows, in).
  void add_layer(TriangleParameter layer, const Tensor& cotangent, const Tensor& input) const {
    if (wants(layer)) all_.add(layer, at::cpu::mm(cotangent, input), chunk_);
    add_bias(layer, cotangent);
  }
  /// The same for layers of all sides, in one product.
  void add_layers(const Layers::Sides& sides, const Layers::Stack& stack, const Tensor& cotangent,
                  const Tensor& input) const {
    if (sides.count == 1) return add_layer(stack.layers[0], cotangent, input);
    const bool weights = wants(stack.layers[0]) || wants(stack.layers[1]);
    const Tensor of_weights = weights ? at::cpu::mm(cotangent, input) : Tensor();
    for (size_t i = 0; i < sides.count; ++i) {
      const TriangleParameter layer = stack.layers[i];
      if (wants(layer)) all_.add(layer, of_side(of_weights, sides, i), chunk_);
      add_bias(layer, of_side(cotangent, sides, i));
    }
  }
  /// Adds the gradients of a layer norm, and returns that of its input.
  Tensor norm_backward(TriangleParameter layer, const Tensor& grad, const Tensor& rows,
                       const Layers::Moments& normalized, const Affine& affine) const {
    const auto& [y, mean, rstd] = normalized;
    const auto [dx, dweight, dbias] =
        layer_norm_gradients(grad, rows, {rows.size(1)}, mean, rstd, affine, {true, wants(layer), wants(layer + 1)});
    all_.add(layer, dweight, chunk_);
    all_.add(layer + 1, dbias, chunk_);
    return dx;
  }

 private:
  void add_bias(TriangleParameter layer, const Tensor& cotangent) const {
    if (!wants(layer + 1)) return;
    const at::ScalarType dtype = detail::moments_dtype(layers_.update().dtype());
    all_.add(layer + 1, cotangent.sum(1, false, dtype), chunk_);
  }

  const Layers& layers_;
  const TriangleGradients& all_;
  int64_t chunk_;
};

// From the cotangent of the result: d(o), channels first, and the gate's part of dz, which goes where dx will be.
void output_backward(const Layers& layers, const Gradients& gradients, const TrianglePanel& panel, const Tensor& x_pair,
                     const Tensor& grad_pair, const Tensor& o_pair, const Tensor& dz_pair, const Tensor& d_o) {
  const TriangleUpdate& t = layers.update();
  const Tensor g = panel.rows_of(grad_pair), o = rows_of_channels(o_pair, panel);
  const Layers::Moments normalized = layers.norm_out(o);
  const Tensor z = layers.z(panel.rows_of(x_pair)), n = std::get<0>(normalized);
  const Tensor s = Layers::sigmoid(layers.linear(z, detail::kGOut)), dy = at::cpu::mul(g, s);
  Tensor du = at::cpu::mul(g, layers.linear(n, detail::kPOut));
  at::cpu::sigmoid_backward_out(du, du, s);
  gradients.add_layer(detail::kPOut, transposed(dy), n);
  gradients.add_layer(detail::kGOut, transposed(du), z);
  if (gradients.wants_z()) {
    panel.of(dz_pair).copy_(at::cpu::mm(du, t.weight(detail::kGOut)).view(panel.of(dz_pair).sizes()));
  }
  const bool wants_do = gradients.wants_a_and_b();
  if (!wants_do && !gradients.wants(detail::kNormOut) && !gradients.wants(detail::kNormOut + 1)) return;
  const Tensor dn = at::cpu::mm(dy, t.weight(detail::kPOut));
  const Tensor do_rows = gradients.norm_backward(detail::kNormOut, dn, o, normalized, layers.affine_out());
  if (!wants_do) return;
  Tensor target = panel.channels_of(d_o);
  target.copy_(do_rows.t().view(target.sizes()));
}

// From da, db and dz so far: dx, which overwrites dz and includes the residual's gradient, and the mask's gradient.
void input_backward(const Layers& layers, const Gradients& gradients, const TrianglePanel& panel,
                    const TriangleElement& e, const Tensor& da, const Tensor& db, const Tensor& dz_pair,
                    const Tensor& dmask, const Tensor& residual) {
  const TriangleUpdate& t = layers.update();
  const Tensor rows = panel.rows_of(e.x).contiguous();
  const Layers::Moments normalized = layers.norm_in(rows);
  const Tensor z = std::get<0>(normalized).to(t.dtype());
  Tensor dz = gradients.wants_z() ? panel.of(dz_pair).reshape(rows.sizes()).clone() : Tensor();
  for (const Layers::Sides& sides : layers.sides()) {
    const Tensor value = sides.p.channels_first(z), s = Layers::sigmoid(sides.g.channels_first(z));
    const auto cotangent_of = [&](size_t i) {
      const size_t side = sides.first + i;
      const Tensor grad = panel.channels_of(side == 0 ? da : db).flatten(1);
      return side == 0 && layers.scale() != 1 ? grad * layers.scale() : grad;
    };
    Tensor grad = sides.count == 1 ? cotangent_of(0) : at::cat({cotangent_of(0), cotangent_of(1)});
    if (dmask.defined()) {
      Tensor target = panel.of(dmask);
      target.add_((grad * value).mul_(s).sum(0).view(target.sizes()));
    }
    if (e.mask.defined()) grad = grad * panel.of(e.mask).reshape({1, -1});
    const Tensor dp = at::cpu::mul(grad, s);
    Tensor dg = at::cpu::mul(grad, value);
    at::cpu::sigmoid_backward_out(dg, dg, s);
    gradients.add_layers(sides, sides.p, dp, z);
    gradients.add_layers(sides, sides.g, dg, z);
    if (!dz.defined()) continue;
    input_gradient(dz, transposed(dp), sides.p.weight, /*accumulate=*/true);
    input_gradient(dz, transposed(dg), sides.g.weight, /*accumulate=*/true);
  }
  if (!dz.defined()) return;
  const Tensor dx = gradients.norm_backward(detail::kNormIn, dz, rows, normalized, layers.affine_in());
  Tensor target = panel.of(dz_pair);
  if (residual.defined()) {
    at::cpu::add_out(target, dx.view(target.sizes()), panel.of(residual));
  } else {
    target.copy_(dx.view(target.sizes()));
  }
}

std::vector<Tensor> update_backward_cpu(const Tensor& grad, const Tensor& x, const TriangleProduct& product,
                                        const OptionalTensor& mask, const TriangleParameterList& parameters,
                                        bool outgoing, double eps, TriangleOutputMask output_mask, bool add_residual) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const TriangleUpdate t =
      detail::checked_triangle_update_backward(grad, x, product, mask, parameters, outgoing, eps, output_mask);
  const Layers layers(t);
  const Chunks chunks(layers);
  const TriangleGradients gradients(layers, output_mask, chunks.count);
  return gradients.make(
      grad, product, add_residual,
      [&](const TriangleElement& e, const Tensor& a, const Tensor& b) { make_a_and_b(layers, e, a, b); },
      [&](const auto&... tensors) {
        chunks.for_each_panel([&](int64_t chunk, const TrianglePanel& panel) {
          output_backward(layers, {layers, gradients, chunk}, panel, tensors...);
        });
      },
      [&](const auto&... tensors) {
        chunks.for_each_panel([&](int64_t chunk, const TrianglePanel& panel) {
          input_backward(layers, {layers, gradients, chunk}, panel, tensors...);
        });
      });
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  detail::register_triangle_update(m);
  m.impl("_triangle_multiplicative_update", update_cpu);
  m.impl("_triangle_multiplicative_update_", update_cpu_);
  m.impl("_triangle_multiplicative_update_backward", update_backward_cpu);
}

}  // namespace
}  // namespace torchops::cpu
