#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>

#include <vector>

#include "autograd/linear.h"
#include "autograd/normalize.h"
#include "ops/triangle_multiplicative_update.h"

namespace torchops::autograd {

/// The triangle update and its gradients in differentiable ATen operators.
class TriangleWrittenOut {
 public:
  explicit TriangleWrittenOut(const detail::TriangleUpdate& t)
      : t_(t),
        mask_(t.mask ? detail::OptionalTensor(t.mask->to(t.dtype()).unsqueeze(-1)) : t.mask),
        scale_(scale(t)),
        norm_in_(normalize(t.x, 1, t.eps)),
        z_(scale_and_shift(norm_in_.xhat, t.parameters[detail::kNormIn], t.parameters[detail::kNormIn + 1], t.dtype())),
        a_(gated(detail::kPA, detail::kGA)),
        b_(gated(detail::kPB, detail::kGB)) {
    const Tensor a = (a_.product * scale_).movedim(-1, -3), b = b_.product.movedim(-1, -3);
    const Tensor o = t.outgoing ? matmul(a, b.mT()) : matmul(a.mT(), b);
    norm_out_ = normalize(o.movedim(-3, -1), 1, c10::SymFloat(t.eps) * scale_ * scale_);
    n_ = scale_and_shift(norm_out_.xhat, t.parameters[detail::kNormOut], t.parameters[detail::kNormOut + 1], t.dtype());
    y_ = linear(n_, t.weight(detail::kPOut), t.bias(detail::kPOut));
    s_ = at::sigmoid(linear(z_, t.weight(detail::kGOut), t.bias(detail::kGOut)));
  }

  Tensor result() const { return (y_ * s_).contiguous(); }

  /// With the cotangent g: dy = g * s and du = g * y * s * (1 - s); back through the projection and norm of o to do;
  /// outgoing da = do b, db = do^T a, incoming da = b do^T, db = a do; then a and b each as in a gate. All parts of dz
  /// are added before the norm of x.
  std::vector<Tensor> gradients(const Tensor& grad, const detail::TriangleOutputMask& output_mask,
                                bool add_residual) const {
    std::vector<Tensor> out(detail::kTriangleGradients);
    const auto layer = [&](detail::TriangleParameter layer, const Tensor& cotangent, const Tensor& input) {
      const bool of_b = t_.packed && (layer == detail::kPB || layer == detail::kGB);
      const size_t gradient = 2 + layer - (of_b ? detail::kPB - detail::kPA : 0);
      if (output_mask[gradient]) out[2 + layer] = weight_gradient(cotangent, input);
      if (output_mask[gradient + 1]) out[3 + layer] = bias_gradient(cotangent);
    };
    const auto norm = [&](detail::TriangleParameter layer, const Tensor& cotangent, const Normalized& normalized,
                          at::ScalarType dtype) {
      const auto& weight = t_.parameters[layer];
      const auto [dx, dweight, dbias] =
          normalization_gradients(cotangent.to(normalized.xhat.scalar_type()), normalized, 1, weight,
                                  {true, output_mask[2 + layer], output_mask[3 + layer]}, dtype);
      if (output_mask[2 + layer]) out[2 + layer] = dweight.to(weight->scalar_type());
      if (output_mask[3 + layer]) out[3 + layer] = dbias.to(t_.parameters[layer + 1]->scalar_type());
      return dx;
    };

    const Tensor dy = grad * s_, du = dy * y_ * at::rsub(s_, 1);
    layer(detail::kPOut, dy, n_);
    layer(detail::kGOut, du, z_);
    const Tensor d_o =
        norm(detail::kNormOut, matmul(dy, t_.weight(detail::kPOut)), norm_out_, t_.dtype()).movedim(-1, -3);
    const Tensor a = (a_.product * scale_).movedim(-1, -3), b = b_.product.movedim(-1, -3);
    const Tensor da = (t_.outgoing ? matmul(d_o, b) : matmul(b, d_o.mT())).movedim(-3, -1) * scale_;
    const Tensor db = (t_.outgoing ? matmul(d_o.mT(), a) : matmul(a, d_o)).movedim(-3, -1);
    Tensor dz = matmul(du, t_.weight(detail::kGOut));
    const auto gate = [&](const Gated& gated, const Tensor& cotangent, detail::TriangleParameter p,
                          detail::TriangleParameter g) {
      if (output_mask[1]) {
        const Tensor dmask = (cotangent * gated.p * gated.s).sum(-1);
        out[1] = out[1].defined() ? out[1] + dmask : dmask;
      }
      const Tensor masked = mask_ ? cotangent * *mask_ : cotangent;
      const Tensor dp = masked * gated.s, dg = dp * gated.p * at::rsub(gated.s, 1);
      layer(p, dp, z_);
      layer(g, dg, z_);
      dz = dz + matmul(dp, t_.weight(p)) + matmul(dg, t_.weight(g));
    };
    gate(a_, da, detail::kPA, detail::kGA);
    gate(b_, db, detail::kPB, detail::kGB);
    const Tensor dx = norm(detail::kNormIn, dz, norm_in_, t_.x.scalar_type());
    if (output_mask[0]) out[0] = add_residual ? dx + grad : dx;
    if (output_mask[1]) out[1] = out[1].to(t_.mask->scalar_type());
    if (t_.packed) {
      for (const size_t of_a :
           {2 + size_t{detail::kPA}, 3 + size_t{detail::kPA}, 2 + size_t{detail::kGA}, 3 + size_t{detail::kGA}}) {
        Tensor& of_b = out[of_a + detail::kPB - detail::kPA];
        if (output_mask[of_a]) out[of_a] = at::cat({out[of_a], of_b});
        of_b = Tensor();
      }
    }
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i].defined()) continue;
      const Tensor& w = t_.weight(detail::kPA);
      const Tensor like = i == 0 ? t_.x : i == 1 ? t_.mask.value_or(w) : t_.parameters[i - 2].value_or(w);
      out[i] = at::empty({0}, like.options());
    }
    return out;
  }

 private:
  // A symbolic size has no ceil(log2(N)): the power of 2 becomes 1 / sqrt(N) itself.
  static c10::SymFloat scale(const detail::TriangleUpdate& t) {
    const c10::SymInt n = t.x.sym_size(-2);
    if (const auto known = n.maybe_as_int()) return detail::triangle_scale(*known, t.dtype());
    if (t.dtype() != at::kHalf) return 1.;
    return c10::SymFloat(1.) / c10::SymFloat(n.max(1)).sqrt();
  }

  struct Gated {
    Tensor p, s, product;
  };

  Gated gated(detail::TriangleParameter p_layer, detail::TriangleParameter g_layer) const {
    const Tensor p = linear(z_, t_.weight(p_layer), t_.bias(p_layer));
    const Tensor s = at::sigmoid(linear(z_, t_.weight(g_layer), t_.bias(g_layer)));
    return {p, s, mask_ ? p * s * *mask_ : p * s};
  }

  const detail::TriangleUpdate& t_;
  detail::OptionalTensor mask_;
  c10::SymFloat scale_;
  Normalized norm_in_;
  Tensor z_;
  Gated a_, b_;
  Normalized norm_out_;
  Tensor n_, y_, s_;
};

}  // namespace torchops::autograd
