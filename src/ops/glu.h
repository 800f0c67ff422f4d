#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "export.h"

namespace torchops {

/// (x @ w.T + b) * activation(x @ wg.T + bg), a gated linear unit.
///
/// x: (..., in); w, wg: (out, in); b, bg: (out,) or none; activation: "sigmoid" or "silu". All of one floating-point
/// dtype and device, except that x may be float32 if the others are float16 or bfloat16: it is then rounded to their
/// dtype as it is read. Returns a new contiguous tensor (..., out) of w's dtype. Training saves the arguments and, if
/// detail::keeps_products(), both products. w and wg may be the halves of one tensor. Throws c10::Error, with
/// nothing computed, when arguments do not fit.
TORCHOPS_API at::Tensor glu(const at::Tensor& x, const at::Tensor& w, const at::Tensor& wg,
                            const std::optional<at::Tensor>& b = {}, const std::optional<at::Tensor>& bg = {},
                            std::string_view activation = "sigmoid");

/// The argument checks of glu(), for kernels of other backends.
TORCHOPS_API void check_glu(const at::Tensor& x, const at::Tensor& w, const at::Tensor& wg,
                            const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& bg,
                            std::string_view activation);

namespace detail {

enum class GluActivation { kSigmoid, kSilu };

/// Throws c10::ValueError, naming `op`, if there is no such activation.
void check_activation(const char* op, std::string_view activation);

/// For an activation whose name has been checked.
GluActivation glu_activation(std::string_view activation);

/// (dx, dw, dwg, db, dbg) of glu().
using GluGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// glu() and its products z = x @ w.T + b and u = x @ wg.T + bg.
std::tuple<at::Tensor, at::Tensor, at::Tensor> glu_with_products(const at::Tensor& x, const at::Tensor& w,
                                                                 const at::Tensor& wg,
                                                                 const std::optional<at::Tensor>& b,
                                                                 const std::optional<at::Tensor>& bg,
                                                                 std::string_view activation);

/// The gradients of glu() for the cotangent grad, where `output_mask` asks for them, and empty tensors elsewhere.
/// Recomputes both products, unless they are given: z and u of glu_with_products().
GluGradients glu_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, const at::Tensor& wg,
                          const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& bg,
                          std::string_view activation, std::array<bool, 5> output_mask,
                          const std::optional<at::Tensor>& z = {}, const std::optional<at::Tensor>& u = {});

void check_glu_with_products(const at::Tensor& x, const at::Tensor& w, const at::Tensor& wg,
                             const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& bg,
                             std::string_view activation);
void check_glu_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, const at::Tensor& wg,
                        const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& bg,
                        std::string_view activation, std::array<bool, 5> output_mask,
                        const std::optional<at::Tensor>& z, const std::optional<at::Tensor>& u);

/// Allocates the gradients, uninitialised.
GluGradients empty_glu_gradients(const at::Tensor& x, const at::Tensor& w, std::array<bool, 5> output_mask);

}  // namespace detail
}  // namespace torchops
