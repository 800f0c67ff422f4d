#pragma once

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/add_cuda_dispatch.h>
#include <ATen/ops/addmm_cuda_dispatch.h>

#include <algorithm>

#include "cuda/linear/products.h"
#include "ops/common.h"
#include "ops/glu.h"
#include "ops/layer_norm.h"
#include "ops/transition.h"

namespace torchops::cuda {

/// The layers of a transition, shared by all panels of rows of a call.
class TransitionLayers {
 public:
  explicit TransitionLayers(const detail::Transition& t)
      : t_(t),
        norm_weight_(detail::norm_parameter(t.norm_weight, t.x.scalar_type())),
        norm_bias_(detail::norm_parameter(t.norm_bias, t.x.scalar_type())) {}

  const std::optional<at::Tensor>& norm_weight() const { return norm_weight_; }

  /// The hidden features for normalised rows.
  at::Tensor hidden(const at::Tensor& z) const {
    return glu(z, t_.up_weight, t_.gate_weight, t_.up_bias, t_.gate_bias, "silu");
  }
  /// Normalised rows of x, in the dtype of the products.
  at::Tensor z(const at::Tensor& rows) const {
    return layer_norm(rows, rows.sizes().slice(1), norm_weight_, norm_bias_, t_.eps).to(t_.dtype());
  }
  /// The hidden features for rows of x.
  at::Tensor hidden_of(const at::Tensor& rows) const { return hidden(z(rows)); }
  /// (hidden features, up, gate) for rows of x.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> hidden_with_products(const at::Tensor& rows) const {
    return detail::glu_with_products(z(rows), t_.up_weight, t_.gate_weight, t_.up_bias, t_.gate_bias, "silu");
  }
  /// (z before it is rounded to the dtype of the products, mean, rstd) for rows of x.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> normalized(const at::Tensor& rows) const {
    const c10::SymInt features = rows.size(1);
    return detail::layer_norm_with_moments(rows, features, norm_weight_, norm_bias_, t_.eps);
  }
  /// out = h @ down.T + down_bias.
  void down(at::Tensor out, const at::Tensor& h) const { linear_out(out, h, t_.down_weight, t_.down_bias); }
  /// sum = rows + h @ down.T + down_bias; sum may be `rows`.
  void add_down(at::Tensor sum, const at::Tensor& rows, const at::Tensor& h) const {
    if (!t_.down_bias && rows.scalar_type() == t_.dtype()) {
      const at::Tensor w_t = t_.down_weight.t();
      if (sum.is_alias_of(rows)) return add_product(sum, h, w_t);
      at::cuda::addmm_out(sum, rows, h, w_t);
      return;
    }
    const at::Tensor update = at::detail::empty_cuda(rows.sizes(), t_.gate_weight.options());
    down(update, h);
    at::cuda::add_out(sum, rows, update);
  }

  /// For sizing scratch: bytes per row of `tensors` tensors of hidden features and as many like x.
  int64_t row_bytes(int64_t tensors) const {
    const int64_t c = t_.x.size(-1), hidden = t_.gate_weight.size(0);
    const int64_t bytes =
        hidden * static_cast<int64_t>(t_.gate_weight.element_size()) + c * static_cast<int64_t>(t_.x.element_size());
    return std::max(tensors * bytes, int64_t{1});
  }

 private:
  const detail::Transition& t_;
  std::optional<at::Tensor> norm_weight_, norm_bias_;
};

}  // namespace torchops::cuda
