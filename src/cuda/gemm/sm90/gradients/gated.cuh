#pragma once

// The launch of gradients/gated_kernel.cuh, and of the kernel that adds the sums of its CTAs.

#include "cuda/gemm/sm90/gradients/gated_kernel.cuh"

namespace torchops::cuda::gemm {

/// The gradients of Narrow<Rule>: dx, dc if the rule reads c, and those of weights and biases, each of which may be
/// null.
template <class Rule>
struct GatedGradients {
  template <Element element, GradientTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    template <bool float32_x>
    using KernelOf = GatedGradientsKernel<Rule, T, tiling, float32_x>;

    static Status prepare(const GradientProblem& p, int64_t& workspace_bytes) {
      return p.x_is_float32 ? prepare<KernelOf<true>>(p, workspace_bytes)
                            : prepare<KernelOf<false>>(p, workspace_bytes);
    }

    static Status run(const GradientProblem& p, cudaStream_t stream) {
      return p.x_is_float32 ? run<KernelOf<true>>(p, stream) : run<KernelOf<false>>(p, stream);
    }

   private:
    template <class Kernel>
    static Status prepare(const GradientProblem& p, int64_t& workspace_bytes) {
      if (p.n > Kernel::kN || p.k > Kernel::kK) return Status::not_for_me();
      int count = 0;
      const cudaError_t error = Persistent<Kernel>::resident(divided(p.m, Kernel::kRows), count);
      workspace_bytes = int64_t{4} * count * Kernel::kGroups * Kernel::kProducts * columns_of_sums(p);
      return Status::of(error);
    }

    template <class Kernel>
    static Status run(const GradientProblem& p, cudaStream_t stream) {
      int count = 0;
      const auto fill = [&](auto& parameters, TileMaps& maps, int blocks) {
        maps(parameters.x, p.x, p.m, p.k);
        maps(parameters.grad, p.grad, p.m, p.n);
        maps(parameters.c, Rule::kReadsC ? p.c_or_y() : p.grad, p.m, p.n);
        maps(parameters.dc, Rule::kReadsC ? Operand{p.dc, p.n} : p.grad, p.m, p.n);
        maps(parameters.w, p.w, p.w2, p.n, p.k);
        maps(parameters.dx, {Kernel::kXIsFloat32 ? p.w.data : p.dx, p.k}, p.m, p.k);
        parameters.float_dx = Kernel::kXIsFloat32 ? static_cast<float*>(p.dx) : nullptr;
        parameters.bias[0] = static_cast<const T*>(p.bias);
        parameters.bias[1] = static_cast<const T*>(p.bias2);
        parameters.c_is_y = p.has_y_for_c();
        parameters.partial = static_cast<float*>(p.workspace);
        parameters.m = p.m;
        parameters.n = p.n;
        parameters.k = p.k;
        count = blocks * Kernel::kGroups;
      };
      const Status status = Persistent<Kernel>::run(divided(p.m, Kernel::kRows), stream, fill);
      return status.done() ? add_up<T, Kernel::kProducts>(p, count, stream) : status;
    }
  };
};

}  // namespace torchops::cuda::gemm
