#pragma once

// The output step of a triangle update with more than 128 features or channels: computes what triangle/out.cuh does.

#include "cuda/gemm/sm90/triangle/streamed_out_kernel.cuh"

namespace torchops::cuda::gemm {

/// The same as PairOut, for any c and d, but not in place of x. Reads the moments of x.
template <class Gate>
struct StreamedPairOut {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = StreamedPairOutKernel<T, Gate, tiling>;
    using Launch = Persistent<Kernel>;
    static constexpr int kColumns = Kernel::kTiles * Kernel::kN;

    static int padded_features(const PairProblem& p) { return divided(p.c, kColumns) * kColumns; }

    // The gate and the projection, and their terms.
    struct Scratch {
      T* weights[2];
      ColumnTerms* terms[2];
      Scratch(Workspace& workspace, const PairProblem& p)
          : weights{workspace.take<T>(int64_t{padded_features(p)} * p.c),
                    workspace.take<T>(int64_t{padded_features(p)} * p.d)},
            terms{workspace.take<ColumnTerms>(padded_features(p)), workspace.take<ColumnTerms>(padded_features(p))} {}
    };

    static Status prepare(const PairProblem& p, int64_t& workspace_bytes) {
      Workspace workspace(nullptr);
      const Scratch scratch(workspace, p);
      workspace_bytes = workspace.bytes();
      return p.moments == nullptr || p.add_residual ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const PairProblem& p, cudaStream_t stream) {
      Workspace workspace(p.workspace);
      const Scratch scratch(workspace, p);
      FoldedWeights<T, 2> all{};
      for (int i = 0; i < 2; ++i) {
        const Layer& layer = i == 0 ? p.gate[0] : p.value[0];
        const Norm& norm = i == 0 ? p.norm_x : p.norm_o;
        all.of[i] = {static_cast<const T*>(layer.weight.data),
                     static_cast<const T*>(layer.bias),
                     {norm.weight},
                     {norm.bias},
                     layer.weight.row_stride,
                     p.c,
                     padded_features(p),
                     i == 0 ? p.c : p.d,
                     i == 0 ? Gate::kScale : 1.f / Kernel::kOfGates,
                     scratch.weights[i],
                     scratch.terms[i],
                     /*in_blocks=*/true};
      }
      launch_fold_weights(all, stream);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
      const int in_row = divided(p.n, Kernel::kM), groups = divided(p.c, kColumns);
      const int units = groups * divided(p.n * in_row, Kernel::kCluster * Kernel::kRowTiles);
      return Launch::run(units, stream, [&](auto& parameters, TileMaps& maps, int) {
        maps(parameters.x, p.x, p.n, p.c, p.n);
        maps(parameters.o, {p.channels[0], p.channel_stride, p.row_stride}, p.d, p.n, p.n);
        for (int i = 0; i < 2; ++i) {
          const auto& f = all.of[i];
          maps(parameters.w[i], {f.to, f.k}, f.padded, f.k);
          parameters.terms[i] = f.terms;
          parameters.steps[i] = divided(f.k, Kernel::kK);
          parameters.in_turn[i] = Kernel::Parameters::most_in_turn(parameters.steps[i]);
        }
        parameters.of_x = static_cast<const ScaleAndShift*>(p.moments);
        parameters.of_x_row_stride = p.moments_row_stride;
        parameters.of_x_stride = p.moments_stride;
        parameters.out = static_cast<T*>(p.out);
        parameters.out_plane_stride = p.out_stride;
        parameters.out_position_stride = p.out_row_stride;
        parameters.eps_o = p.norm_o.eps;
        parameters.n = p.n;
        parameters.c = p.c;
        parameters.d = p.d;
        parameters.by_row = cutlass::FastDivmod(in_row);
        parameters.by_groups = cutlass::FastDivmod(groups);
        parameters.units = units;
      });
    }
  };
};

}  // namespace torchops::cuda::gemm
