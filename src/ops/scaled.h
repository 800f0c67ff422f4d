#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "export.h"

namespace torchops {

/// dense() of eight-bit operands: y = sigmoid((x @ w.T) * scale_x * scale_w + b), the operator dense.scaled.
///
/// x: (..., in) and w: (out, in), float8_e4m3fn. scale_x: one element, or (..., 1), one per row of x; scale_w:
/// one element, or (1, out), one per row of w; float32 factors that turn the operands into the values they stand
/// for. b: (out,), of out_dtype or float32, or none. out_dtype: bfloat16 (the default), float16 or float32.
/// Returns a new contiguous tensor (..., out) of out_dtype; sums are float32. Not differentiable, as
/// at::_scaled_mm. Throws c10::Error, with nothing computed, when shapes, dtypes or devices do not fit, and on a
/// GPU of a compute capability below 8.9.
TORCHOPS_API at::Tensor dense_scaled(const at::Tensor& x, const at::Tensor& w, const at::Tensor& scale_x,
                                     const at::Tensor& scale_w, const std::optional<at::Tensor>& b = {},
                                     std::optional<at::ScalarType> out_dtype = {});

/// gate() of eight-bit operands: y = v * sigmoid((x @ w.T) * scale_x * scale_w + b), the operator gate.scaled.
///
/// v: (..., out), bfloat16, float16 or float32, which is also the dtype of y; the others as in dense_scaled().
TORCHOPS_API at::Tensor gate_scaled(const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                                    const at::Tensor& scale_x, const at::Tensor& scale_w,
                                    const std::optional<at::Tensor>& b = {});

/// glu() of eight-bit operands, the operator glu.scaled:
///   y = ((x @ w.T) * scale_x * scale_w + b) * act((x @ wg.T) * scale_x * scale_wg + bg).
///
/// wg: like w; scale_wg: like scale_w; activation: "sigmoid" or "silu"; the others as in dense_scaled().
TORCHOPS_API at::Tensor glu_scaled(const at::Tensor& x, const at::Tensor& w, const at::Tensor& wg,
                                   const at::Tensor& scale_x, const at::Tensor& scale_w, const at::Tensor& scale_wg,
                                   const std::optional<at::Tensor>& b = {}, const std::optional<at::Tensor>& bg = {},
                                   std::string_view activation = "sigmoid",
                                   std::optional<at::ScalarType> out_dtype = {});

/// The argument checks, for kernels of other backends. If a dtype may be omitted, they return the result's dtype.
TORCHOPS_API at::ScalarType check_dense_scaled(const at::Tensor& x, const at::Tensor& w, const at::Tensor& scale_x,
                                               const at::Tensor& scale_w, const std::optional<at::Tensor>& b,
                                               std::optional<at::ScalarType> out_dtype);
TORCHOPS_API void check_gate_scaled(const at::Tensor& v, const at::Tensor& x, const at::Tensor& w,
                                    const at::Tensor& scale_x, const at::Tensor& scale_w,
                                    const std::optional<at::Tensor>& b);
TORCHOPS_API at::ScalarType check_glu_scaled(const at::Tensor& x, const at::Tensor& w, const at::Tensor& wg,
                                             const at::Tensor& scale_x, const at::Tensor& scale_w,
                                             const at::Tensor& scale_wg, const std::optional<at::Tensor>& b,
                                             const std::optional<at::Tensor>& bg, std::string_view activation,
                                             std::optional<at::ScalarType> out_dtype);

}  // namespace torchops
