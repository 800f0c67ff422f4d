#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchops::cuda::gemm {

/// What a rule reads and writes, as matrices; b2, bias2, c, g and d2 may be null. A bias is contiguous. Cotangents may
/// be made from the rule's value instead of c, which is then in its place.
struct Sm80Tensors {
  const at::Tensor &d, &a, &b;
  const std::optional<at::Tensor>& bias;
  const at::Tensor* b2 = nullptr;
  const std::optional<at::Tensor>* bias2 = nullptr;
  const at::Tensor *c = nullptr, *g = nullptr, *d2 = nullptr;
  bool c_is_y = false;
};

}  // namespace torchops::cuda::gemm
