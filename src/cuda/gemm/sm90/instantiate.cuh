#pragma once

#include "cuda/gemm/spec.h"

namespace torchops::cuda::gemm {

/// The class of products/ops.cuh, gradients/one_pass.cuh, ... that implements an operation of table.def.
template <class Operation>
struct FormulaOf;

template <class Operation, Element element, typename Operation::Tiling tiling>
Status prepare(const typename Operation::Problem& problem, int64_t& workspace_bytes) {
  workspace_bytes = 0;
  return FormulaOf<Operation>::Type::template With<element, tiling>::prepare(problem, workspace_bytes);
}

template <class Operation, Element element, typename Operation::Tiling tiling>
Status run(const typename Operation::Problem& problem, cudaStream_t stream) {
  return FormulaOf<Operation>::Type::template With<element, tiling>::run(problem, stream);
}

}  // namespace torchops::cuda::gemm

#define TORCHOPS_FORMULA(operation, ...) \
  template <>                            \
  struct FormulaOf<operation> {          \
    using Type = __VA_ARGS__;            \
  };

#define TORCHOPS_INSTANCE(operation, element, tiling)                                                        \
  template Status prepare<operation, Element::element, operation::Tiling::tiling>(const operation::Problem&, \
                                                                                  int64_t&);                 \
  template Status run<operation, Element::element, operation::Tiling::tiling>(const operation::Problem&, cudaStream_t);
