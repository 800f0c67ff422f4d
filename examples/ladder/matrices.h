// What the C++ steps of docs/ladder.md share: their argument checks, and the result.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace ladder {

/// Checks the arguments of sigmoid(x @ w.T + b) and makes its result, uninitialised: contiguous float32 matrices alone,
/// so that the steps can show what makes a loop fast and nothing else. x: (rows, in), w: (out, in), b: (out,).
inline at::Tensor result_of(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
  for (const at::Tensor& t : {x, w, b}) {
    TORCH_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous(), "dense: expected contiguous float32 tensors, got ",
                t.scalar_type(), " of strides ", t.strides());
  }
  TORCH_CHECK(x.dim() == 2 && w.dim() == 2 && b.dim() == 1 && w.size(1) == x.size(1) && b.size(0) == w.size(0),
              "dense: expected x (rows, in), w (out, in) and b (out,), got ", x.sizes(), ", ", w.sizes(), " and ",
              b.sizes());
  return at::empty({x.size(0), w.size(0)}, x.options());
}

}  // namespace ladder
