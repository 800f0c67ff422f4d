#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchops::cuda::gemm {

/// What a rule (rules.cuh) reads and writes, as matrices; b2, bias2, c, g, d2, z and u may be null. A bias is
/// contiguous. d may be c. For cotangents, c may be the rule's value instead (c_is_y). z and u are where both products
/// are written too.
struct RuleTensors {
  const at::Tensor &d, &a, &b;
  const std::optional<at::Tensor>& bias;
  const at::Tensor* b2 = nullptr;
  const std::optional<at::Tensor>* bias2 = nullptr;
  const at::Tensor *c = nullptr, *g = nullptr, *d2 = nullptr;
  bool c_is_y = false;
  const at::Tensor *z = nullptr, *u = nullptr;
};

}  // namespace torchops::cuda::gemm
