#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "export.h"

namespace torchops {

/// v * sigmoid(x @ w.T + b).
///
/// v: (..., out); x: (..., in) with the leading sizes of v; w: (out, in); b: (out,) or none. All of one floating-point
/// dtype and device, except that v and x may each be float32 if w and b are float16 or bfloat16: such an x is rounded
/// to their dtype as it is read. Returns a new contiguous tensor of v's shape and dtype; the gate is never stored.
/// Gradients read v, x, w and b, and where that is slow, see detail::keeps_products(), the product.
/// Throws c10::Error, with nothing computed, when shapes, dtypes or devices do not fit.
TORCHOPS_API at::Tensor gate(const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                             const std::optional<at::Tensor>& b = {});

/// Overwrites v with gate(v, x, w, b) and returns v. x, w and b may overlap v; they are then read first. The gradients
/// of x, w and b need the result, so v must not be overwritten again before backward; if v is float16, they need a copy
/// of the old v instead. A call with wrong arguments (also an expanded v) leaves v untouched; one that runs out of
/// memory may have overwritten a part, and then moves the version counter.
TORCHOPS_API at::Tensor& gate_(at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                               const std::optional<at::Tensor>& b = {});

/// The argument checks of gate() and gate_(), for kernels of other backends.
TORCHOPS_API void check_gate(const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                             const std::optional<at::Tensor>& b);
TORCHOPS_API void check_gate_(const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                              const std::optional<at::Tensor>& b);

namespace detail {

/// (dv, dx, dw, db) of gate().
using GateGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The gradients of gate() for the cotangent grad, where `output_mask` asks for them, and empty tensors elsewhere.
/// Recomputes the product, unless z of gate_with_product() is given. dv alone is gate(grad, x, w, b). If v_is_y, v is
/// the result of gate(), which is enough.
GateGradients gate_backward(const at::Tensor& grad, const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                            const std::optional<at::Tensor>& b, std::array<bool, 4> output_mask, bool v_is_y = false,
                            const std::optional<at::Tensor>& z = {});

/// gate() and its product z = x @ w.T + b, which has the dtype of w.
std::tuple<at::Tensor, at::Tensor> gate_with_product(const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                                                     const std::optional<at::Tensor>& b);

void check_gate_with_product(const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                             const std::optional<at::Tensor>& b);
void check_gate_backward(const at::Tensor& grad, const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                         const std::optional<at::Tensor>& b, std::array<bool, 4> output_mask,
                         const std::optional<at::Tensor>& z);

/// Allocates the gradients, uninitialised.
GateGradients empty_gate_gradients(const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                                   std::array<bool, 4> output_mask);

}  // namespace detail
}  // namespace torchops
