#pragma once

// CUTLASS, and a check of its version, because these kernels rely on more than its interface: ResidentMainloop
// (products/mainloop.cuh) replaces its TMA mainloop, PanelBarrier (products/epilogue.cuh) a node of its epilogue
// visitors, and products/kernel.cuh reads the parameters of both. Try another version before allowing it here.
#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "torchops's kernels for compute capability 9.0 were tested with CUTLASS 4.2; install nvidia-cutlass==4.2.*"
#endif

#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include "cuda/gemm/spec.h"

namespace torchops::cuda::gemm {

template <Element element>
struct ElementOf;
#define TORCHOPS_ELEMENT(name, type) \
  template <>                        \
  struct ElementOf<Element::name> {  \
    using Type = type;               \
  };
#include "cuda/gemm/table.def"

}  // namespace torchops::cuda::gemm
