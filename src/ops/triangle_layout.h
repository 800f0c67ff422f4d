#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <vector>

#include "ops/common.h"
#include "ops/layer_norm.h"
#include "ops/triangle_multiplicative_update.h"

// Shared by the kernels of a triangle update on every backend: where the tensors are in memory, and in which order they
// are computed. How a panel becomes a and b, the update or gradients is up to the backend.
namespace torchops::detail {

/// How a backend allocates and multiplies.
struct TriangleBackend {
  at::Tensor (*empty)(at::IntArrayRef sizes, const at::TensorOptions& options);
  at::Tensor& (*bmm_out)(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);
  /// Whether to multiply whole padded matrices, because that is faster.
  bool multiplies_padding;
  /// How many tiles of a product are computed at once; null if it doesn't matter.
  int64_t (*tiles_at_once)() = nullptr;
};

/// Rows [begin, end) of the pair matrix.
struct TrianglePanel {
  int64_t begin, end;

  at::Tensor of(const at::Tensor& pair) const { return pair.narrow(0, begin, end - begin); }
  /// (N, N, c) -> rows of c. A copy if they are not evenly spaced.
  at::Tensor rows_of(const at::Tensor& pair) const {
    return of(pair).reshape({(end - begin) * pair.size(1), pair.size(2)});
  }
  /// (d, N, N) -> (d, rows of the pair matrix, N).
  at::Tensor channels_of(const at::Tensor& channels) const { return channels.narrow(1, begin, end - begin); }
};

/// The arguments of a call, and the matrices of its products.
class TriangleLayout {
 public:
  /// The channels that are multiplied at a time take at most `group_bytes`, unless a single one is larger.
  TriangleLayout(const TriangleUpdate& t, const TriangleBackend& backend, int64_t group_bytes)
      : t_(t),
        backend_(backend),
        n_(t.x.size(-2)),
        padded_(padded_size(n_, t.dtype())),
        row_stride_(padded_row_stride(n_, channels(), t.dtype())),
        group_(group_of(group_bytes)),
        scale_(triangle_scale(n_, t.dtype())) {}

  const TriangleUpdate& update() const { return t_; }
  int64_t n() const { return n_; }
  int64_t channels() const { return t_.weight(kPA).size(0); }
  double scale() const { return scale_; }
  /// The eps of the layer norm of o, which has been scaled.
  double eps_out() const { return t_.eps * scale_ * scale_; }
  at::TensorOptions options() const { return t_.weight(kPA).options(); }
  at::Tensor empty(at::IntArrayRef sizes) const { return empty(sizes, options()); }
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) const {
    return backend_.empty(sizes, options);
  }

  /// Room for `count` matrices.
  at::Tensor empty_padded(int64_t count) const { return empty({count, padded_, row_stride_}); }
  /// Writes zeros to the padding that products leave out, for a result of which it is a part.
  void zero_padding(const at::Tensor& padded) const {
    if (backend_.multiplies_padding) return;
    zero_behind(padded, 1);
    zero_behind(padded, 2);
  }
  /// One matrix per channel, as products read and write them.
  at::Tensor empty_matrices() const {
    return backend_.multiplies_padding ? matrices(empty_padded(channels())) : empty({channels(), n_, n_});
  }
  /// The part of padded channels that products read and write.
  at::Tensor matrices(const at::Tensor& padded) const {
    const int64_t size = backend_.multiplies_padding ? padded_ : n_;
    if (padded.size(1) == size && padded.size(2) == size) return padded;
    return strided_view(padded, {padded.size(0), size, size}, padded.strides(), 0);
  }

  // Products of padded matrices also sum over padding, which must then be zero: after the N columns if that is the last
  // dimension of both factors, as in forward, and in backward also after the N rows. Other padding may be anything,
  // even NaN, since it affects only the padding of results.

  /// Writes zeros after the N columns of matrices, for callers that write only those columns.
  void zero_columns(const at::Tensor& matrices) const {
    if (backend_.multiplies_padding) zero_behind(matrices, 2);
  }
  /// Writes zeros after the N rows.
  void zero_rows(const at::Tensor& matrices) const {
    if (backend_.multiplies_padding) zero_behind(matrices, 1);
  }

  /// How many channels are multiplied at a time.
  int64_t group() const { return group_; }
  /// Calls f(part, multiply) for groups of channels: part(matrices) selects those of the group, and multiply(out, a, b)
  /// computes out = a @ b for each of them.
  template <class F>
  void for_each_group(const F& f) const {
    const int64_t step = group();
    for (int64_t begin = 0; begin < channels(); begin += step) {
      f([&](const at::Tensor& all) { return channels_of(all, begin, std::min(step, channels() - begin)); },
        [&](at::Tensor out, const at::Tensor& a, const at::Tensor& b) { backend_.bmm_out(out, a, b); });
    }
  }

  /// The matrices of `count` channels from `begin` on.
  static at::Tensor channels_of(const at::Tensor& all, int64_t begin, int64_t count) {
    if (begin == 0 && count == all.size(0)) return all;
    return strided_view(all, {count, all.size(1), all.size(2)}, all.strides(), begin * all.stride(0));
  }
  static at::Tensor matrices_transposed(const at::Tensor& all) {
    return strided_view(all, {all.size(0), all.size(2), all.size(1)}, {all.stride(0), all.stride(2), all.stride(1)}, 0);
  }

 private:
  void zero_behind(const at::Tensor& matrices, int64_t dim) const {
    const int64_t size = matrices.size(dim);
    if (size > n_) matrices.narrow(dim, n_, size - n_).zero_();
  }

  // As many channels as fit, in groups of about the same size; or fewer if their tiles then leave fewer multiprocessors
  // idle at the end of a group. At N = 768, each of the 128 products has 18 of the tiles that cuBLAS uses on an H100:
  // 22 products at a time keep 132 multiprocessors busy for three rounds; with 24, 36 tiles would be left for a fourth.
  int64_t group_of(int64_t bytes) const {
    const int64_t of_matrix = padded_ * row_stride_ * static_cast<int64_t>(c10::elementSize(t_.dtype()));
    const int64_t all = std::max(channels(), int64_t{1});
    const int64_t most = std::clamp(bytes / std::max(of_matrix, int64_t{1}), int64_t{1}, all);
    const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    if (backend_.tiles_at_once == nullptr || most == all) return divided(all, divided(all, most));
    const int64_t tiles = divided(padded_, 256) * divided(padded_, 128), at_once = backend_.tiles_at_once();
    const auto turns = [&](int64_t count) { return divided(count * tiles, at_once); };
    // Twice the number of rounds of all groups, plus half a round for the start of each group.
    const auto time = [&](int64_t count) {
      return 2 * (all / count * turns(count) + turns(all % count)) + divided(all, count);
    };
    int64_t best = most;
    for (int64_t count = most - 1; count > most / 2; --count) {
      if (time(count) < time(best)) best = count;
    }
    return best;
  }

  const TriangleUpdate& t_;
  const TriangleBackend& backend_;
  int64_t n_, padded_, row_stride_, group_;
  double scale_;
};

/// The arguments, with copies of those that could change as x is written.
inline TriangleUpdate read_first(TriangleUpdate t) {
  t.mask = read_first(t.x, t.mask);
  for (OptionalTensor& parameter : t.parameters) parameter = read_first(t.x, parameter);
  return t;
}

/// A batch element in the direction of the update. For the incoming update x is read transposed: with
/// a'[i, k] = a[k, i] it becomes the outgoing one.
struct TriangleElement {
  at::Tensor x, mask;  // (N, N, c) and, in the dtype of the products, (N, N)

  TriangleElement(const TriangleUpdate& t, int64_t index) : x(in_direction(t, batch_element(t.x, 3, index))) {
    if (t.mask) mask = in_direction(t, batch_element(*t.mask, 2, index).to(t.dtype()));
  }
  static at::Tensor in_direction(const TriangleUpdate& t, const at::Tensor& pair) {
    return t.outgoing || !pair.defined() ? pair : pair.transpose(0, 1);
  }
};

/// Channels in which products overwrite one of their factors. The factors begin one group after the results, so a group
/// of results overwrites factors that are no longer needed.
class RotatingChannels {
 public:
  /// Room for `elements` batch elements.
  RotatingChannels(const TriangleLayout& layout, int64_t elements)
      : layout_(layout), memory_(layout.empty_padded(elements * layout.channels() + layout.group())) {}

  void zero_padding() const { layout_.zero_padding(memory_); }

  at::Tensor results(int64_t element) const { return from(element * layout_.channels()); }
  /// Where to write the factors of these results.
  at::Tensor factors(int64_t element) const { return from(element * layout_.channels() + layout_.group()); }
  /// The results of all elements.
  at::Tensor product() const {
    const TriangleUpdate& t = layout_.update();
    const c10::SymDimVector symbolic = triangle_product_shape(t);
    const at::IntArrayRef shape = C10_AS_INTARRAYREF_SLOW(symbolic);
    at::DimVector strides(shape.size(), 1);
    for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * std::max(shape[i], int64_t{1});
    return strided_view(memory_, shape, strides, 0);
  }

 private:
  at::Tensor from(int64_t first) const {
    return layout_.matrices(TriangleLayout::channels_of(memory_, first, layout_.channels()));
  }

  const TriangleLayout& layout_;
  at::Tensor memory_;
};

/// Forward, one batch element after the other: make_a_and_b(element, a, b), with zeros in padded columns; then
/// o = a @ b.T for each channel, over a; then finish(index, o). Returns the products of all elements if they are kept.
template <class Make, class Finish>
at::Tensor for_each_product(const TriangleLayout& layout, bool keep_product, const Make& make_a_and_b,
                            const Finish& finish) {
  const TriangleUpdate& t = layout.update();
  const int64_t batch = batch_size(t.x, 3);
  if (batch == 0 && !keep_product) return layout.empty({0});
  const RotatingChannels memory(layout, keep_product ? batch : 1);
  if (keep_product) memory.zero_padding();
  for (int64_t index = 0; index < batch; ++index) {
    const int64_t place = keep_product ? index : 0;
    const at::Tensor a = memory.factors(place), o = memory.results(place);
    {
      // Freed before finish() allocates the result of the first element, which can reuse its memory.
      const at::Tensor b = layout.empty_matrices();
      make_a_and_b(TriangleElement(t, index), a, b);
      layout.for_each_group([&](const auto& part, const auto& multiply) {
        multiply(part(o), part(a), layout.matrices_transposed(part(b)));
      });
    }
    finish(index, o);
  }
  return keep_product ? memory.product() : layout.empty({0});
}

/// The gradients that `output_mask` asks for. Those of the mask and the parameters are sums over panels in at least
/// float32: each of the `chunks` adds its panels in order, and then the chunks are added in order.
class TriangleGradients {
 public:
  TriangleGradients(const TriangleLayout& layout, const TriangleOutputMask& output_mask, int64_t chunks = 1)
      : layout_(layout),
        output_mask_(output_mask),
        results_(empty_triangle_gradients(layout.update(), output_mask,
                                          [&](c10::SymIntArrayRef shape, const at::TensorOptions& options) {
                                            return layout.empty(C10_AS_INTARRAYREF_SLOW(shape), options);
                                          })),
        sums_(chunks) {
    const TriangleUpdate& t = layout.update();
    TriangleParameterOutputMask of_parameters;
    std::copy(output_mask.begin() + 2, output_mask.end(), of_parameters.begin());
    parts_ = gradients_apart(t, at::ArrayRef<at::Tensor>(results_).slice(2), of_parameters);
    for (size_t i = 0; i < kTriangleParameters; ++i) output_mask_[2 + i] = parts_[i].defined();
    if (wants_z()) dz_ = output_mask[0] ? results_[0] : layout.empty(t.x.sizes(), t.x.options());
    if (wants_mask()) mask_sum_ = at::zeros(t.mask->sizes(), sum_options());
  }

  bool wants_mask() const { return output_mask_[1]; }
  bool wants(size_t parameter) const { return output_mask_[2 + parameter]; }
  bool wants_z() const { return detail::wants_z(output_mask_); }
  bool wants_a_and_b() const { return detail::wants_a_and_b(output_mask_); }

  /// Where dx of a batch element goes: first the gate's part of dz, and then dx, which overwrites it. Undefined if no
  /// dz is wanted.
  at::Tensor dz(int64_t index) const { return dz_.defined() ? batch_element(dz_, 3, index) : dz_; }
  /// The gradient of the mask, to add to; undefined if not wanted.
  at::Tensor dmask(int64_t index) const { return mask_sum_.defined() ? batch_element(mask_sum_, 2, index) : mask_sum_; }
  /// Adds to the gradient of a parameter, if it is wanted.
  void add(size_t parameter, const at::Tensor& part, int64_t chunk = 0) const {
    if (!wants(parameter)) return;
    at::Tensor& sum = sums_[chunk][parameter];
    if (!sum.defined()) sum = at::zeros(layout_.update().parameters[parameter]->sizes(), sum_options());
    sum.add_(part);
  }
  /// Where the gradients of parameters go, for callers that compute them as a whole and never call add().
  const TriangleResults& results() const { return parts_; }

  /// Backward, one batch element after the other: output(x, grad, o, dz, d_o) makes d(o) and the gate's part of dz from
  /// the cotangent of the update; make_a_and_b(element, a, b) recomputes a and b; all three have zeros in padded
  /// columns; da = d(o) @ b and db = d(o).T @ a overwrite a and b; input(element, da, db, dz, dmask, residual), in the
  /// direction of the update, makes dx. The steps after d(o) run only if a wanted gradient needs them. At most three
  /// pair tensors are alive besides o: output() may use two for itself in addition to d(o), and input() one in addition
  /// to da and db. `product` is cleared after the last output(), so that a or b can reuse its memory. `residual` is the
  /// cotangent, which input() adds to dx if `add_residual` and dx is wanted; otherwise undefined.
  template <class Make, class Output, class Input>
  std::vector<at::Tensor> make(const at::Tensor& grad, const TriangleProduct& product, bool add_residual,
                               const Make& make_a_and_b, const Output& output, const Input& input) const {
    if (grad.numel() == 0) {
      for (const at::Tensor& result : results_) result.zero_();
      return results_;
    }
    const TriangleUpdate& t = layout_.update();
    const int64_t batch = batch_size(t.x, 3);
    for (int64_t index = 0; index < batch; ++index) {
      at::Tensor d_o;
      if (wants_a_and_b()) {
        d_o = layout_.empty_matrices();
        layout_.zero_rows(d_o);
      }
      {
        const at::Tensor o = layout_.matrices(batch_element(*product.get(0), 3, index).contiguous());
        output(batch_element(t.x, 3, index), batch_element(grad, 3, index), o, dz(index), d_o);
      }
      if (index + 1 == batch) product.clear();
      if (!wants_a_and_b()) continue;
      const TriangleElement element(t, index);
      const RotatingChannels memory(layout_, 1);
      const at::Tensor a = memory.factors(0), da = memory.results(0), b = layout_.empty_matrices();
      make_a_and_b(element, a, b);
      for (const at::Tensor& channels : {a, b}) layout_.zero_rows(channels);
      layout_.for_each_group([&](const auto& part, const auto& multiply) {
        multiply(part(da), part(d_o), part(b));
        multiply(part(b), layout_.matrices_transposed(part(d_o)), part(a));
      });
      d_o.reset();
      input(element, da, b, TriangleElement::in_direction(t, dz(index)), TriangleElement::in_direction(t, dmask(index)),
            TriangleElement::in_direction(
                t, add_residual && output_mask_[0] ? batch_element(grad, 3, index) : at::Tensor()));
    }
    return finish();
  }

 private:
  using Sums = std::array<at::Tensor, kTriangleParameters>;

  at::TensorOptions sum_options() const { return layout_.options().dtype(moments_dtype(layout_.update().dtype())); }

  std::vector<at::Tensor> finish() const {
    for (size_t i = 0; i < kTriangleParameters; ++i) {
      at::Tensor total;
      for (const Sums& sums : sums_) {
        if (sums[i].defined()) total = total.defined() ? total.add_(sums[i]) : sums[i];
      }
      if (total.defined()) parts_[i].copy_(total);
    }
    if (wants_mask()) results_[1].copy_(mask_sum_);
    return results_;
  }

  const TriangleLayout& layout_;
  TriangleOutputMask output_mask_;  // for a and b separately
  std::vector<at::Tensor> results_;
  TriangleResults parts_;  // the parameters' entries of results_
  mutable std::vector<Sums> sums_;
  at::Tensor dz_, mask_sum_;
};

}  // namespace torchops::detail
