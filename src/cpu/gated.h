#pragma once

#include <ATen/core/Tensor.h>

#include "ops/glu.h"

// A value times its activated gate, and the gradients of that, in one pass each. ATen's own primitives need two and
// four. In 16 bits, where each of them converts its inputs and rounds its outputs, those two take more than half as
// long as a product with 128 features.
namespace torchops::cpu {

/// out = value * act(u), computed in at least float32 and rounded once.
/// All matrices have one shape. out and value have one dtype; so has u, but it may have 16 bits if they are float32.
/// out may be value or u.
void gated_out(const at::Tensor& out, const at::Tensor& value, const at::Tensor& u, detail::GluActivation activation);

/// dvalue = grad * act(u) and du = grad * value * act'(u); either may be undefined, and value too if du is. Shapes and
/// dtypes as above: dvalue has the dtype of grad and value, du that of u. Outputs may be inputs. With sigmoid, value
/// may be the result, value * sigmoid(u), if value_is_y.
void gated_backward_out(const at::Tensor& dvalue, const at::Tensor& du, const at::Tensor& grad, const at::Tensor& value,
                        const at::Tensor& u, detail::GluActivation activation, bool value_is_y = false);

}  // namespace torchops::cpu
