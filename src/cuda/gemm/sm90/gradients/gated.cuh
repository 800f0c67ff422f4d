#pragma once

// The launch of gradients/gated_kernel.cuh, and of the kernel that adds the sums of its CTAs.

#include "cuda/base/column_sum.cuh"
#include "cuda/gemm/sm90/gradients/gated_kernel.cuh"

namespace torchops::cuda::gemm {

/// The gradients of Narrow<Rule>: dx, dc if the rule reads c, and those of weights and
/// biases, each of which may be null.
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
    static cudaError_t blocks(const GradientProblem& p, int& blocks) {
      return Persistent<Kernel>::resident(divided(p.m, Kernel::kRows), blocks);
    }

    static int64_t columns(const GradientProblem& p) { return int64_t{p.n} * p.k + p.n; }

    template <class Kernel>
    static Status prepare(const GradientProblem& p, int64_t& workspace_bytes) {
      if (p.n > Kernel::kN || p.k > Kernel::kK) return Status::not_for_me();
      int count = 0;
      const cudaError_t error = blocks<Kernel>(p, count);
      workspace_bytes = int64_t{4} * count * Kernel::kGroups * Kernel::kProducts * columns(p);
      return Status::of(error);
    }

    template <class Kernel>
    static Status run(const GradientProblem& p, cudaStream_t stream) {
      int count = 0;
      if (const cudaError_t error = blocks<Kernel>(p, count); error != cudaSuccess) return Status::of(error);
      using Parameters = typename Kernel::Parameters;
      const Operand& c = Rule::kReadsC ? p.c_or_y() : p.grad;
      if (!are_encodable<typename Kernel::BufferElement>(p.x) ||
          !are_encodable<T>(p.grad, c, p.w, Kernel::kProducts == 2 ? p.w2 : p.w)) {
        return Status::of(cudaErrorInvalidValue);
      }
      Parameters parameters{};
      parameters.x = decltype(Parameters::x)::of(p.x.data, p.x.row_stride, p.m, p.k);
      parameters.grad = decltype(Parameters::grad)::of(p.grad.data, p.grad.row_stride, p.m, p.n);
      const Operand dc = Rule::kReadsC ? Operand{p.dc, p.n, 0} : p.grad;
      parameters.c = decltype(Parameters::c)::of(c.data, c.row_stride, p.m, p.n);
      parameters.dc = decltype(Parameters::dc)::of(dc.data, dc.row_stride, p.m, p.n);
      for (int i = 0; i < Kernel::kProducts; ++i) {
        const Operand& w = i == 0 ? p.w : p.w2;
        parameters.w[i] = std::remove_reference_t<decltype(parameters.w[0])>::of(w.data, w.row_stride, p.n, p.k);
      }
      parameters.dx = decltype(Parameters::dx)::of(Kernel::kXIsFloat32 ? p.w.data : p.dx, p.k, p.m, p.k);
      parameters.float_dx = Kernel::kXIsFloat32 ? static_cast<float*>(p.dx) : nullptr;
      parameters.bias[0] = static_cast<const T*>(p.bias);
      parameters.bias[1] = static_cast<const T*>(p.bias2);
      parameters.c_is_y = p.has_y_for_c();
      parameters.partial = static_cast<float*>(p.workspace);
      parameters.m = p.m;
      parameters.n = p.n;
      parameters.k = p.k;
      if (!are_encoded(parameters.x.map, parameters.grad.map, parameters.c.map, parameters.w[0].map,
                       parameters.w[Kernel::kProducts - 1].map, parameters.dx.map, parameters.dc.map)) {
        return Status::of(cudaErrorInvalidValue);
      }
      if (const cudaError_t error = Persistent<Kernel>::run(parameters, count, stream); error != cudaSuccess) {
        return Status::of(error);
      }
      for (int i = 0; i < Kernel::kProducts; ++i) {
        launch_column_sum<T, float, 4, 32, 16>(parameters.partial + i * columns(p),
                                               static_cast<T*>(i == 0 ? p.dw : p.dw2),
                                               static_cast<T*>(i == 0 ? p.dbias : p.dbias2), count * Kernel::kGroups,
                                               int64_t{p.n} * p.k, columns(p), Kernel::kProducts * columns(p), stream);
        if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
      }
      return {};
    }
  };
};

}  // namespace torchops::cuda::gemm
