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

    template <class Kernel>
    static cudaError_t blocks(const PairGradientProblem& p, int& blocks) {
      return Persistent<Kernel>::resident(PairTiles{p.n, p.rows}.count(), blocks);
    }

    static Status prepare(const PairGradientProblem& p, int64_t& workspace_bytes) {
      using Kernel = KernelOf<out ? DxHat::kBegins : DxHat::kEnds>;
      if (p.c > Kernel::kFeatures || p.d > Kernel::kFeatures) return Status::not_for_me();
      typename Kernel::Parameters parameters{};
      parameters.c = p.c;
      parameters.d = p.d;
      int count = 0;
      const cudaError_t error = blocks<Kernel>(p, count);
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
      int count = 0;
      if (const cudaError_t error = blocks<Kernel>(p, count); error != cudaSuccess) return Status::of(error);
      const Operand channels{p.channels[0], p.row_stride, p.channel_stride}, d_o = out ? p.d_o : channels;
      const Operand rows = out ? p.grad : p.dz;
      if (!are_encodable<T>(p.x, rows, p.dz, channels, d_o, p.value[0].weight, p.gate[0].weight)) {
        return Status::of(cudaErrorInvalidValue);
      }
      typename Kernel::Parameters parameters{};
      parameters.c = p.c;
      parameters.d = p.d;
      parameters.x = Kernel::LoadRows::of(p.x.data, p.x.row_stride, p.x.batch_stride, p.n, p.c, p.rows);
      parameters.rows = Kernel::LoadRows::of(rows.data, rows.row_stride, rows.batch_stride, p.n, p.c, p.rows);
      parameters.dxhat = Kernel::StoreRows::of(p.dz.data, p.dz.row_stride, p.dz.batch_stride, p.n, p.c, p.rows);
      parameters.channels = Kernel::LoadChannels::of(channels.data, p.channel_stride, p.row_stride, p.d, p.n, p.rows);
      const int stored = out ? padded_positions<T>(p.n) : p.n;  // the input step stores none
      parameters.d_o = Kernel::StoreChannels::of(d_o.data, d_o.batch_stride, d_o.row_stride, p.d, stored, p.rows);
      for (int i = 0; i < 2; ++i) {
        const Layer& layer = i == 0 ? p.value[0] : p.gate[0];
        parameters.w[i] = Kernel::LoadWeight::of(layer.weight.data, layer.weight.row_stride, parameters.outputs(),
                                                 parameters.features(i));
        parameters.bias[i] = static_cast<const T*>(layer.bias);
      }
      if (!are_encoded(parameters.x.map, parameters.rows.map, parameters.dxhat.map, parameters.channels.map,
                       parameters.d_o.map, parameters.w[0].map, parameters.w[1].map)) {
        return Status::of(cudaErrorInvalidValue);
      }
      parameters.norm_x[0] = {p.norm_x.weight};
      parameters.norm_x[1] = {p.norm_x.bias};
      parameters.norm_o[0] = {p.norm_o.weight};
      parameters.norm_o[1] = {p.norm_o.bias};
      parameters.mask = static_cast<const T*>(p.mask);
      parameters.mask_row_stride = p.mask_row_stride;
      parameters.mask_stride = p.mask_stride;
      if constexpr (Kernel::kAddsResidual) {
        const Operand& g = p.grad;
        if (!are_encodable<T>(g)) return Status::of(cudaErrorInvalidValue);
        const auto map = Kernel::LoadRows::of(g.data, g.row_stride, g.batch_stride, p.n, p.c, p.rows);
        if (!are_encoded(map.map)) return Status::of(cudaErrorInvalidValue);
        parameters.residual = {static_cast<const T*>(g.data), g.batch_stride, g.row_stride, map};
      }
      parameters.moments = static_cast<float2*>(p.moments);
      parameters.moments_row_stride = p.moments_row_stride;
      parameters.moments_stride = p.moments_stride;
      parameters.eps_x = p.norm_x.eps;
      parameters.eps_o = p.norm_o.eps;
      parameters.scale = p.scale[0];
      parameters.partial = static_cast<float*>(p.workspace);
      parameters.tiles = DealtPairTiles::of({p.n, p.rows}, count);
      if (const cudaError_t error = Persistent<Kernel>::run(parameters, count, stream); error != cudaSuccess) {
        return Status::of(error);
      }
      // A row has the sums of both products.
      const int64_t sums = parameters.sums(0) + parameters.sums(1);
      launch_column_sum<float, float, 4, 32, 16>(parameters.partial, p.sums, static_cast<float*>(nullptr), count, sums,
                                                 sums, sums, stream);
      return Status::of(cudaGetLastError());
    }
  };
};

}  // namespace torchops::cuda::gemm
