#pragma once

#include <ATen/core/Tensor.h>

#include "ops/common.h"

// A private operator: the forward pass of triangle attention by a kernel of the library, which the backend in Triton
// asks first. It returns false, with nothing done, if there is no kernel for these arguments: only compute capability
// 9.0 has any, for 16 bits, heads of up to 64 features, and what TMA can read and write. Nor does it compute what
// Triton's kernel is faster for, unless kernel_path() is `fused`.
namespace torchops::detail {

/// The tensors of the operator. If `scaled`, q is multiplied by scale * log2(e), and the bias by log2(e). Where out is
/// q, k and v may be other columns of the same rows: that they don't overlap q is up to the caller.
struct AttentionCore {
  const at::Tensor &q, &k, &v;            // (batch, rows, heads, queries or keys, d)
  const at::Tensor& bias;                 // (batch, heads, queries, width), with -inf from the last key on
  const std::optional<at::Tensor>& mask;  // (batch, rows, width) in float32: 0 or -inf
  const at::Tensor& out;                  // like q, or q itself
  const at::Tensor& logsumexp;            // (batch, rows, heads, queries) in float32, contiguous
};

/// The argument checks, for every backend.
void check_attention_core(const AttentionCore& a);

}  // namespace torchops::detail
