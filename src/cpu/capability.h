#pragma once

#include <ATen/Version.h>

#include <string>

namespace torchops::cpu {

enum class Capability { kDefault, kAvx2, kAvx512 };

/// The instruction set of ATen's kernels, which the environment (ATEN_CPU_CAPABILITY) can lower.
inline Capability capability() {
  static const Capability chosen = [] {
    const std::string name = at::get_cpu_capability();
    return name == "AVX512" ? Capability::kAvx512 : name == "AVX2" ? Capability::kAvx2 : Capability::kDefault;
  }();
  return chosen;
}

}  // namespace torchops::cpu

/// A function of a source that is compiled once for each instruction set (cmake/CpuVectors.cmake), for this processor.
#ifdef TORCHOPS_X86_VECTORS
#define TORCHOPS_FOR_THIS_PROCESSOR(function)                                                \
  (::torchops::cpu::capability() == ::torchops::cpu::Capability::kAvx512 ? &AVX512::function \
   : ::torchops::cpu::capability() == ::torchops::cpu::Capability::kAvx2 ? &AVX2::function   \
                                                                         : &DEFAULT::function)
#else
#define TORCHOPS_FOR_THIS_PROCESSOR(function) (&DEFAULT::function)
#endif
