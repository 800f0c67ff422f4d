#pragma once

// The kernels of triangle/gradients_tiles.cuh and their launch.

#include "cuda/base/column_sum.cuh"
#include "cuda/gemm/padded_positions.cuh"
#include "cuda/gemm/sm90/triangle/gradients_compute.cuh"

namespace torchops::cuda::gemm {

/// From value[0] and gate[0] of the step: p.dz; d(o) in the output step; and, in float32 in p.sums, for the value and
/// then the gate, the gradients of the weight with the norm folded in, over xhat or ohat, and of the bias.
template <class Gate, bool out>
struct PairGradients {
  template <Element element, GradientTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    template <DxHat dxhat>
    using KernelOf = PairGradientsKernel<T, Gate, out, tiling, dxhat>;

    static Status prepare(const PairGradientProblem& p, int64_t& workspace_bytes) {
      using Kernel = KernelOf<out ? DxHat::kBegins : DxHat::kEnds>;
      if (p.c > Kernel::kFeatures || p.d > Kernel::kFeatures) return Status::not_for_me();
      typename Kernel::Parameters parameters{};
      parameters.c = p.c;
      parameters.d = p.d;
      int count = 0;
      const cudaError_t error = Persistent<Kernel>::resident(PairTiles{p.n, p.rows}.count(), count);
      workspace_bytes = int64_t{4} * count * (parameters.sums(0) + parameters.sums(1));
      return Status::of(error);
    }

    static Status run(const PairGradientProblem& p, cudaStream_t stream) {
      if constexpr (out) {
        return launch<DxHat::kBegins>(p, stream);
      } else if (p.last) {
        return p.add_residual ? launch<DxHat::kEndsAndAddsResidual>(p, stream) : launch<DxHat::kEnds>(p, stream);
      } else {
        return launch<DxHat::kGrows>(p, stream);
      }
    }

   private:
    template <DxHat dxhat>
    static Status launch(const PairGradientProblem& p, cudaStream_t stream) {
      using Kernel = KernelOf<dxhat>;
      int64_t sums = 0, count = 0;  // a row has the sums of both products
      const auto fill = [&](auto& parameters, TileMaps& maps, int blocks) {
        const Operand channels{p.channels[0], p.channel_stride, p.row_stride};
        parameters.c = p.c;
        parameters.d = p.d;
        maps(parameters.x, p.x, p.n, p.c, p.rows);
        maps(parameters.rows, out ? p.grad : p.dz, p.n, p.c, p.rows);
        maps(parameters.dxhat, p.dz, p.n, p.c, p.rows);
        maps(parameters.channels, channels, p.d, p.n, p.rows);
        // The input step stores none.
        maps(parameters.d_o, out ? Operand{p.d_o.data, p.d_o.batch_stride, p.d_o.row_stride} : channels, p.d,
             out ? padded_positions<T>(p.n) : p.n, p.rows);
        for (int i = 0; i < 2; ++i) {
          const Layer& layer = i == 0 ? p.value[0] : p.gate[0];
          maps(parameters.w[i], layer.weight, parameters.outputs(), parameters.features(i));
          parameters.bias[i] = static_cast<const T*>(layer.bias);
        }
        parameters.norm_x[0] = {p.norm_x.weight};
        parameters.norm_x[1] = {p.norm_x.bias};
        parameters.norm_o[0] = {p.norm_o.weight};
        parameters.norm_o[1] = {p.norm_o.bias};
        parameters.mask = static_cast<const T*>(p.mask);
        parameters.mask_row_stride = p.mask_row_stride;
        parameters.mask_stride = p.mask_stride;
        if constexpr (Kernel::kAddsResidual) {
          parameters.residual = {static_cast<const T*>(p.grad.data), p.grad.batch_stride, p.grad.row_stride, {}};
          maps(parameters.residual.map, p.grad, p.n, p.c, p.rows);
        }
        parameters.moments = static_cast<float2*>(p.moments);
        parameters.moments_row_stride = p.moments_row_stride;
        parameters.moments_stride = p.moments_stride;
        parameters.eps_x = p.norm_x.eps;
        parameters.eps_o = p.norm_o.eps;
        parameters.scale = p.scale[0];
        parameters.partial = static_cast<float*>(p.workspace);
        parameters.tiles = DealtPairTiles::of({p.n, p.rows}, blocks);
        sums = parameters.sums(0) + parameters.sums(1);
        count = blocks;
      };
      const Status status = Persistent<Kernel>::run(PairTiles{p.n, p.rows}.count(), stream, fill);
      if (!status.done()) return status;
      launch_column_sum<float, float, 4, 32, 16>(static_cast<const float*>(p.workspace), p.sums,
                                                 static_cast<float*>(nullptr), count, sums, sums, sums, stream);
      return Status::of(cudaGetLastError());
    }
  };
};

}  // namespace torchops::cuda::gemm
