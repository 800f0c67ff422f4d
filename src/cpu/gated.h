#pragma once

#include <ATen/core/Tensor.h>

#include "ops/glu.h"

// A value times its activated gate, and the gradients of that, in one pass each. ATen's own primitives need two and
// four; in 16 bits, where each converts what it reads and rounds what it writes, the two take more than half the time
// of a product of 128 features.
namespace torchops::cpu {

/// out = value * act(u), in float32 at least and rounded once.
/// Matrices of one shape. out and value have one dtype; u has it too, or 16 bits where they are float32. out may be
/// value or u.
void gated_out(const at::Tensor& out, const at::Tensor& value, const at::Tensor& u, detail::GluActivation activation);

/// dvalue = grad * act(u) and du = grad * value * act'(u); one of them may be undefined, and value where du is.
/// As above; dvalue has the dtype of grad and value, and du that of u. Both may be what is read.
void gated_backward_out(const at::Tensor& dvalue, const at::Tensor& du, const at::Tensor& grad, const at::Tensor& value,
                        const at::Tensor& u, detail::GluActivation activation);

}  // namespace torchops::cpu
