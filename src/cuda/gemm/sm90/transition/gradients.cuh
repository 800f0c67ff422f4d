#pragma once

// The gradients of a transition. The norm's weight and bias are folded into the matrices. Then transition/dx.cuh makes
// xhat and dx for as many rows as a bounded workspace has room for, transition/dw.cuh adds these rows to the gradients
// of the weights, and so on for the next rows. Finally the norm is unfolded again. All sums are in a fixed order.

#include "cuda/base/column_sum.cuh"
#include "cuda/gemm/norm_vector.cuh"
#include "cuda/gemm/sm90/transition/dw.cuh"

namespace torchops::cuda::gemm {

/// The layers that read the norm, gate and up.
template <class T>
struct FoldedFactors {
  const T* weights[2];
  int64_t strides[2];
  const T* biases[2];
  NormValues<T> norm_weight, norm_bias;
  int c, hidden;
};

constexpr int kFoldWarps = 8;

/// For one layer (blockIdx.y): the weight times that of the norm, with stride c, and the bias with that of the norm
/// folded in, scaled for gate. Biases from `hidden` on are zeros.
template <class T>
__global__ void __launch_bounds__(32 * kFoldWarps)
    fold_factors_kernel(const FoldedFactors<T> from, T* weights, float* biases, int most_hidden, float scale) {
  const int row = static_cast<int>(blockIdx.x) * kFoldWarps + threadIdx.x / 32, layer = blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T* const bias = layer == 0 ? from.biases[0] : from.biases[1];
  const T* const w =
      (layer == 0 ? from.weights[0] : from.weights[1]) + row * (layer == 0 ? from.strides[0] : from.strides[1]);
  float shift = 0.f;
  if (row < from.hidden) {
    T* const to = weights + (int64_t{layer} * from.hidden + row) * from.c;
    for (int column = lane; column < from.c; column += 32) {
      const float value = static_cast<float>(w[column]);
      to[column] = static_cast<T>(value * from.norm_weight.at(column, 1.f));
      if (from.norm_bias.data != nullptr) shift = fmaf(value, from.norm_bias.at(column, 0.f), shift);
    }
    if (lane == 0 && bias != nullptr) shift += static_cast<float>(bias[row]);
  }
  for (int step = 16; step > 0; step /= 2) shift += __shfl_xor_sync(~0u, shift, step);
  if (lane == 0 && row < most_hidden) biases[layer * most_hidden + row] = layer == 0 ? scale * shift : shift;
}

/// Where the gradients go; null if not wanted.
template <class T>
struct FeedForwardResults {
  T *weights[3], *biases[3];  // of gate, up, down
  NormSums<T> norm_weight, norm_bias;
};

constexpr int kUnfoldThreads = 256;

/// From M = da.T @ xhat and db of gate and of up, which read z = gamma * xhat + beta: dw = M * gamma + db x beta, and
/// the norm's gradients, to which they add sum_i w[i][j] M[i][j] and sum_i w[i][j] db[i]. The first c blocks compute
/// the norm's; the others compute dw, one element per thread.
template <class T, class Sums>
__global__ void __launch_bounds__(kUnfoldThreads)
    unfold_factors_kernel(const FoldedFactors<T> from, const FeedForwardResults<T> to, const Sums* sums, int slices) {
  constexpr int kSlice = sizeof(sums->biases[0]) / sizeof(float);
  const int thread = threadIdx.x;
  if (static_cast<int>(blockIdx.x) < from.c) {
    const int column = blockIdx.x;
    float2 sum = make_float2(0.f, 0.f);
    for (int i = thread; i < 2 * from.hidden; i += kUnfoldThreads) {
      const int layer = i >= from.hidden, row = i - layer * from.hidden;
      const T* const weights = layer == 0 ? from.weights[0] : from.weights[1];
      const auto w = static_cast<float>(weights[row * (layer == 0 ? from.strides[0] : from.strides[1]) + column]);
      const Sums& of = sums[row / kSlice];
      sum.x = fmaf(w, of.weights[layer][row % kSlice][column], sum.x);
      sum.y = fmaf(w, of.biases[layer][row % kSlice], sum.y);
    }
    __shared__ float2 shared[kUnfoldThreads];
    shared[thread] = sum;
    for (int step = kUnfoldThreads / 2; step > 0; step /= 2) {
      __syncthreads();
      if (thread < step) {
        shared[thread].x += shared[thread + step].x;
        shared[thread].y += shared[thread + step].y;
      }
    }
    if (thread != 0) return;
    to.norm_weight.set(column, shared[0].x);
    to.norm_bias.set(column, shared[0].y);
    return;
  }
  const int weight = from.hidden * from.c;
  const int i = (static_cast<int>(blockIdx.x) - from.c) * kUnfoldThreads + thread;
  if (i < 2 * weight) {
    const int layer = i >= weight, element = i - layer * weight, row = element / from.c, column = element % from.c;
    const Sums& of = sums[row / kSlice];
    const float gamma = from.norm_weight.at(column, 1.f), beta = from.norm_bias.at(column, 0.f);
    const float db = of.biases[layer][row % kSlice];
    T* const weights = layer == 0 ? to.weights[0] : to.weights[1];
    T* const biases = layer == 0 ? to.biases[0] : to.biases[1];
    weights[element] = static_cast<T>(fmaf(of.weights[layer][row % kSlice][column], gamma, db * beta));
    if (column == 0 && biases != nullptr) biases[row] = static_cast<T>(db);
  } else if (i < 3 * weight) {
    const int element = i - 2 * weight, column = element / from.hidden, row = element % from.hidden;
    to.weights[2][element] = static_cast<T>(sums[row / kSlice].weights[2][row % kSlice][column]);
    if (row == 0 && to.biases[2] != nullptr) {
      float sum = 0.f;
      for (int slice = 0; slice < slices; ++slice) sum += sums[slice].down_bias[column];
      to.biases[2][column] = static_cast<T>(sum);
    }
  }
}

template <class F>
struct FeedForwardGradients {
  template <Element element, NarrowTiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Dx = FeedForwardDxKernel<T, F, tiling>;
    using Dw = FeedForwardDwKernel<T, F, tiling>;
    using LaunchDx = Persistent<Dx>;
    using LaunchDw = Persistent<Dw>;
    using Sums = typename Dw::Sums;
    static constexpr int kRowsOfCluster = Dx::kRows * Dx::kWarpgroups * Dx::kCluster;
    static constexpr int64_t kMostXhatBytes = int64_t{48} << 20;

    // How the rows and the workspace are divided.
    struct Plan {
      int dx_clusters = 0, dw_clusters = 0, slices = 0, groups = 0;
      int64_t step = 0, weights = 0, biases = 0, xhat = 0, partial = 0, sums = 0, bytes = 0;
    };
    static cudaError_t make_plan(const TransitionGradientProblem& p, Plan& plan) {
      if (const cudaError_t error = LaunchDx::resident(plan.dx_clusters)) return error;
      if (const cudaError_t error = LaunchDw::resident(plan.dw_clusters)) return error;
      const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
      plan.slices = (p.hidden + Dw::kSlice - 1) / Dw::kSlice;
      plan.groups = plan.dw_clusters / plan.slices;
      // Steps are whole waves.
      const int64_t wave = int64_t{plan.dx_clusters} * kRowsOfCluster;
      const int64_t row_bytes = int64_t{p.c} * static_cast<int64_t>(sizeof(T));
      plan.step = wave == 0 ? 0 : std::max<int64_t>(kMostXhatBytes / row_bytes / wave, 1) * wave;
      plan.biases = aligned(2 * int64_t{p.hidden} * row_bytes);
      plan.xhat = aligned(plan.biases + int64_t{4} * 2 * Dx::kMostHidden);
      plan.partial = aligned(plan.xhat + (p.has_weights() ? std::min<int64_t>(plan.step, p.m) * row_bytes : 0));
      plan.sums = plan.partial + (p.has_weights() ? aligned(int64_t{plan.groups} * plan.slices * sizeof(Sums)) : 0);
      plan.bytes = plan.sums + (p.has_weights() ? aligned(plan.slices * sizeof(Sums)) : 0);
      return cudaSuccess;
    }

    static Status prepare(const TransitionGradientProblem& p, int64_t& workspace_bytes) {
      if (p.c > Dx::kC || p.hidden > Dx::kMostHidden) return Status::not_for_me();
      Plan plan;
      if (const cudaError_t error = make_plan(p, plan); error != cudaSuccess) return Status::of(error);
      workspace_bytes = plan.bytes;
      return plan.dx_clusters > 0 && plan.groups > 0 ? Status{} : Status::not_for_me();
    }

    static Status run(const TransitionGradientProblem& p, cudaStream_t stream) {
      Plan plan;
      if (const cudaError_t error = make_plan(p, plan); error != cudaSuccess) return Status::of(error);
      auto* const workspace = static_cast<unsigned char*>(p.workspace);
      auto* const weights = reinterpret_cast<T*>(workspace);
      auto* const biases = reinterpret_cast<float*>(workspace + plan.biases);
      auto* const xhat = reinterpret_cast<T*>(workspace + plan.xhat);
      auto* const partial = reinterpret_cast<Sums*>(workspace + plan.partial);
      auto* const sums = reinterpret_cast<Sums*>(workspace + plan.sums);
      FoldedFactors<T> factors{};
      for (int i = 0; i < 2; ++i) {
        const Layer& layer = i == 0 ? p.gate : p.up;
        factors.weights[i] = static_cast<const T*>(layer.weight.data);
        factors.strides[i] = layer.weight.row_stride;
        factors.biases[i] = static_cast<const T*>(layer.bias);
      }
      factors.norm_weight = {p.norm.weight};
      factors.norm_bias = {p.norm.bias};
      factors.c = p.c;
      factors.hidden = p.hidden;
      fold_factors_kernel<T><<<dim3(Dx::kMostHidden / kFoldWarps, 2), 32 * kFoldWarps, 0, stream>>>(
          factors, weights, biases, Dx::kMostHidden, Dx::Slopes::kScale);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
      for (int64_t begin = 0; begin < p.m; begin += plan.step) {
        const int rows = static_cast<int>(std::min(plan.step, p.m - begin));
        if (const Status status = run_dx(p, weights, biases, xhat, begin, rows, stream); !status.done()) return status;
        if (!p.has_weights()) continue;
        if (const Status status = run_dw(p, plan, weights, biases, xhat, partial, begin, rows, stream);
            !status.done()) {
          return status;
        }
      }
      if (!p.has_weights()) return {};
      constexpr int64_t of_slice = sizeof(Sums) / sizeof(float);
      launch_column_sum<float, float, 4, 32, 16>(
          reinterpret_cast<const float*>(partial), reinterpret_cast<float*>(sums), static_cast<float*>(nullptr),
          plan.groups, plan.slices * of_slice, plan.slices * of_slice, plan.slices * of_slice, stream);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return Status::of(error);
      FeedForwardResults<T> results{};
      for (int i = 0; i < 3; ++i) {
        results.weights[i] = static_cast<T*>(p.dweights[i]);
        results.biases[i] = static_cast<T*>(p.dbiases[i]);
      }
      results.norm_weight = {p.dnorm_weight, p.norm.weight.is_float32};
      results.norm_bias = {p.dnorm_bias, p.norm.bias.is_float32};
      const int blocks = p.c + (3 * p.hidden * p.c + kUnfoldThreads - 1) / kUnfoldThreads;
      unfold_factors_kernel<T, Sums><<<blocks, kUnfoldThreads, 0, stream>>>(factors, results, sums, plan.slices);
      return Status::of(cudaGetLastError());
    }

   private:
    static Operand from(const Operand& operand, int64_t row) {
      return {static_cast<const T*>(operand.data) + row * operand.row_stride, operand.row_stride};
    }

    static Status run_dx(const TransitionGradientProblem& p, const T* weights, const float* biases, T* xhat,
                         int64_t begin, int rows, cudaStream_t stream) {
      const int row_tiles = divided(rows, kRowsOfCluster);
      return LaunchDx::run(row_tiles, stream, [&](auto& parameters, TileMaps& maps, int) {
        maps(parameters.x, from(p.x, begin), rows, p.c);
        maps(parameters.grad, from(p.grad, begin), rows, p.c);
        maps(parameters.dx, from(p.dx, begin), rows, p.c);
        maps(parameters.xhat, p.has_weights() ? Operand{xhat, p.c} : from(p.dx, begin), rows, p.c);
        maps(parameters.gate, {weights, p.c}, p.hidden, p.c);
        maps(parameters.up, {weights + int64_t{p.hidden} * p.c, p.c}, p.hidden, p.c);
        maps(parameters.down, p.down.weight, p.c, p.hidden);
        parameters.bias = biases;
        parameters.eps = p.norm.eps;
        parameters.c = p.c;
        parameters.hidden = p.hidden;
        parameters.row_tiles = row_tiles;
        parameters.keeps_xhat = p.has_weights();
        parameters.add_residual = p.add_residual;
      });
    }

    static Status run_dw(const TransitionGradientProblem& p, const Plan& plan, const T* weights, const float* biases,
                         const T* xhat, Sums* partial, int64_t begin, int rows, cudaStream_t stream) {
      return LaunchDw::run(plan.groups * plan.slices, stream, [&](auto& parameters, TileMaps& maps, int) {
        maps(parameters.xhat, {xhat, p.c}, rows, p.c);
        maps(parameters.grad, from(p.grad, begin), rows, p.c);
        maps(parameters.gate, {weights, p.c}, p.hidden, p.c);
        maps(parameters.up, {weights + int64_t{p.hidden} * p.c, p.c}, p.hidden, p.c);
        maps(parameters.down, p.down.weight, p.c, p.hidden);
        parameters.bias = biases;
        parameters.sums = partial;
        parameters.slices = plan.slices;
        parameters.groups = plan.groups;
        parameters.row_tiles = divided(rows, Dw::kRows);
        parameters.accumulate = begin > 0;
        parameters.sums_grad = p.dbiases[2] != nullptr;
      });
    }
  };
};

}  // namespace torchops::cuda::gemm
