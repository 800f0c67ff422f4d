#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <optional>
#include <string_view>

#include "ops/gate.h"
#include "ops/glu.h"

// The gradients of layers, written where the caller wants them: for operators that go through the layers panel by
// panel. Arguments are those of the private operators, which have been checked. All tensors are matrices of rows.
namespace torchops::cuda {

/// detail::gate_backward(). Gradients that `output_mask` asks for are written to `out`, contiguous tensors; the others
/// are defined, too, as tensors without elements.
void gate_gradients(detail::GateGradients out, const at::Tensor& grad, const at::Tensor& v, const at::Tensor& x,
                    const at::Tensor& w, const std::optional<at::Tensor>& b, std::array<bool, 4> output_mask,
                    bool v_is_y = false, const std::optional<at::Tensor>& z = {});

/// The same for detail::glu_backward(). With `accumulate`, dx is added to that of `out`, which may then be float32 even
/// if the other tensors have 16 bits.
void glu_gradients(detail::GluGradients out, const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w,
                   const at::Tensor& wg, const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& bg,
                   std::string_view activation, std::array<bool, 5> output_mask,
                   const std::optional<at::Tensor>& z = {}, const std::optional<at::Tensor>& u = {},
                   bool accumulate = false);

template <class T>
struct ChannelPanel;
/// The same with sigmoid, if all is float32 and `grad` is in channels. Returns false, with nothing done, if the kernel
/// cannot read or write these tensors.
bool glu_gradients_from_channels(const detail::GluGradients& out, const ChannelPanel<float>& grad, const at::Tensor& x,
                                 const at::Tensor& w, const at::Tensor& wg, const std::optional<at::Tensor>& b,
                                 const std::optional<at::Tensor>& bg, std::array<bool, 5> output_mask, bool accumulate);

/// The gradients (dx, dweight, dbias) of layer_norm() that are defined in `out`, the latter two in
/// norm_gradient_dtype(). dx may be `grad`.
void layer_norm_gradients(const std::array<at::Tensor, 3>& out, const at::Tensor& grad, const at::Tensor& x,
                          const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& weight);

/// For kernels of gradients that call public operators: backward may run under an autocast in which forward did not.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::autocast_dispatch_keyset};
};

}  // namespace torchops::cuda
