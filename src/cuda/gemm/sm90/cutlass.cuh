#pragma once

// CUTLASS, and what of it these kernels hold on to beyond its interface: ResidentMainloop (mainloop.cuh) takes the
// place of CUTLASS's own TMA mainloop in its kernels, PanelBarrier (epilogue.cuh) that of a node of its epilogue
// visitors, and kernel.cuh looks into the parameters of both. Another version has to be tried before it is let in here.
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
