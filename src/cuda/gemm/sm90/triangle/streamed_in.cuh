#pragma once

// The input step of a triangle update with more than 128 features or channels.

#include <limits>

#include "cuda/gemm/padded_positions.cuh"
#include "cuda/gemm/sm90/triangle/streamed_in_kernel.cuh"

namespace torchops::cuda::gemm {

/// The same as PairIn, for any c and d. Also writes the moments of x.
template <class Gate>
struct StreamedPairIn {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Kernel = StreamedPairInKernel<Gate, StreamedTile<T, tiling, 2>>;
    using Launch = Persistent<Kernel>;

    static int padded_channels(const PairProblem& p) { return divided(p.d, Kernel::kN) * Kernel::kN; }

    // The weights of values, then of gates, both sides each; and their terms.
    struct Folded {
      T* weights;
      ColumnTerms* terms;
      Folded(Workspace& workspace, const PairProblem& p)
          : weights(workspace.take<T>(int64_t{4} * padded_channels(p) * p.c)),
            terms(workspace.take<ColumnTerms>(4 * padded_channels(p))) {}
    };

    static Status prepare(const PairProblem& p, int64_t& workspace_bytes) {
      Workspace workspace(nullptr);
      const Folded folded(workspace, p);
      workspace_bytes = workspace.bytes();
      return p.moments == nullptr ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const PairProblem& p, cudaStream_t stream) {
      Workspace workspace(p.workspace);
      const Folded folded(workspace, p);
      const int64_t channels = padded_channels(p);
      FoldedWeights<T, 4> all{};
      for (int i = 0; i < 4; ++i) {
        const Layer& layer = i < 2 ? p.value[i] : p.gate[i - 2];
        all.of[i] = {static_cast<const T*>(layer.weight.data),
                     static_cast<const T*>(layer.bias),
                     {p.norm_x.weight},
                     {p.norm_x.bias},
                     layer.weight.row_stride,
                     p.d,
                     static_cast<int>(channels),
                     p.c,
                     i < 2 ? 1.f : Gate::kTanhScale,
                     folded.weights + i * channels * p.c,
                     folded.terms + i * channels};
      }
      launch_fold_weights(all, stream);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
      const int in_row = divided(p.n, Kernel::kM), rows = divided(p.n * in_row, Kernel::kCluster);
      const int parts = divided(p.d, Kernel::kN);
      constexpr int most = std::numeric_limits<int>::max();
      return Launch::run(most, stream, [&](auto& parameters, TileMaps& maps, int& clusters) {
        maps(parameters.x, p.x, p.n, p.c, p.n);
        maps(parameters.w, {folded.weights, p.c}, {folded.weights + 2 * channels * p.c, p.c},
             static_cast<int>(2 * channels), p.c);
        for (int i = 0; i < 2; ++i) {
          maps(parameters.channels[i], {p.channels[i], p.channel_stride, p.row_stride}, p.d, padded_positions<T>(p.n),
               p.n);
          parameters.terms[i] = folded.terms + 2 * i * channels;
          parameters.scale[i] = p.scale[i];
        }
        parameters.moments = static_cast<ScaleAndShift*>(p.moments);
        parameters.moments_row_stride = p.moments_row_stride;
        parameters.moments_stride = p.moments_stride;
        parameters.mask = static_cast<const T*>(p.mask);
        parameters.mask_row_stride = p.mask_row_stride;
        parameters.mask_stride = p.mask_stride;
        parameters.eps = p.norm_x.eps;
        parameters.n = p.n;
        parameters.c = p.c;
        parameters.in_row = in_row;
        parameters.steps = divided(p.c, Kernel::kK);
        parameters.parts = parts;
        parameters.columns = 2 * parts;
        // The last rows are too few for all clusters: several share the columns of each, if that takes less time.
        const int last = rows % clusters;
        int least = most;
        for (int of_group = parts; of_group > 0; --of_group) {  // in pairs of tiles
          const int groups = divided(parts, of_group), time = divided(last * groups, clusters) * of_group;
          if (time >= least) continue;
          least = time;
          parameters.groups = groups;
          parameters.of_group = 2 * of_group;
        }
        parameters.whole = rows - last;
        parameters.units = parameters.whole + last * parameters.groups;
        clusters = std::min(clusters, parameters.units);
      });
    }
  };
};

}  // namespace torchops::cuda::gemm
