#pragma once

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include "cuda/gemm/norm_vector.cuh"
#include "cuda/triangle/gradient_problem.h"
#include "ops/triangle_layout.h"

// The gradients of a whole triangle update by the kernels of triangle/gradient_problem.h, and the one for its
// parameters.
namespace torchops::cuda {

namespace pair_steps {

/// A layer whose gradients are in the sums as the kernels leave them, for normalised rows xhat: M = du.T @ xhat, and
/// db. The layer reads z = gamma * xhat + beta, so dw = M * gamma + db x beta, and to the norm's gradients it adds
///   dgamma[j] += sum_i w[i][j] M[i][j],  dbeta[j] += sum_i w[i][j] db[i].
template <class T>
struct FoldedLayer {
  const T* weight;
  int64_t row_stride;
  int rows, columns, norm;
  int64_t offset;  // of M (rows x columns) in the sums; db follows it
  T *dweight, *dbias;
};

template <class T, int count>
struct FoldedLayers {
  FoldedLayer<T> layers[count];
  struct {
    gemm::NormValues<T> weight, bias;
    gemm::NormSums<T> dweight, dbias;
  } norms[2];
  const float* sums;
  int64_t batch, batch_stride;
};

constexpr int kUnfoldColumns = 8, kUnfoldRows = 128;

/// A block has some columns of one of the norms (blockIdx.y), and all rows of each layer that reads it. Gradients whose
/// pointers are null are not written. There are so few blocks that only latency counts: a thread first reads what it
/// needs of all layers, and then writes.
template <class T, int count>
__global__ void __launch_bounds__(kUnfoldColumns* kUnfoldRows) unfold_norms_kernel(const FoldedLayers<T, count> all) {
  const int column = static_cast<int>(blockIdx.x) * kUnfoldColumns + threadIdx.x, of = blockIdx.y;
  const auto& norm = all.norms[of];
  const auto has = [&](const FoldedLayer<T>& layer, int row) {
    return layer.norm == of && column < layer.columns && row < layer.rows;
  };
  const int columns = all.layers[of == 0 ? 1 : 0].columns;
  const float gamma = column < columns ? norm.weight.at(column, 1.f) : 1.f;
  const float beta = column < columns ? norm.bias.at(column, 0.f) : 0.f;
  float2 of_norm = make_float2(0.f, 0.f);
  int most_rows = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) most_rows = max(most_rows, all.layers[i].rows);
  for (int row = threadIdx.y; row < most_rows; row += kUnfoldRows) {
    float m[count] = {}, db[count] = {}, w[count] = {};
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const FoldedLayer<T>& layer = all.layers[i];
      if (!has(layer, row)) continue;
      const float* const sums = all.sums + layer.offset;
      w[i] = static_cast<float>(layer.weight[row * layer.row_stride + column]);
      if (all.batch == 0) continue;
      m[i] = sums[int64_t{row} * layer.columns + column];
      db[i] = sums[int64_t{layer.rows} * layer.columns + row];
    }
    // Apart from the first, so that its loads for all layers are in flight at once.
    for (int64_t element = 1; element < all.batch; ++element) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const FoldedLayer<T>& layer = all.layers[i];
        if (!has(layer, row)) continue;
        const float* const sums = all.sums + element * all.batch_stride + layer.offset;
        m[i] += sums[int64_t{row} * layer.columns + column];
        db[i] += sums[int64_t{layer.rows} * layer.columns + row];
      }
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const FoldedLayer<T>& layer = all.layers[i];
      if (!has(layer, row)) continue;
      of_norm.x = fmaf(w[i], m[i], of_norm.x);
      of_norm.y = fmaf(w[i], db[i], of_norm.y);
      if (layer.dweight != nullptr) {
        layer.dweight[int64_t{row} * layer.columns + column] = static_cast<T>(fmaf(m[i], gamma, db[i] * beta));
      }
      if (column == 0 && layer.dbias != nullptr) layer.dbias[row] = static_cast<T>(db[i]);
    }
  }
  __shared__ float2 shared[kUnfoldRows][kUnfoldColumns];
  shared[threadIdx.y][threadIdx.x] = of_norm;
  for (int distance = kUnfoldRows / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (threadIdx.y >= distance) continue;
    const float2 other = shared[threadIdx.y + distance][threadIdx.x];
    shared[threadIdx.y][threadIdx.x].x += other.x;
    shared[threadIdx.y][threadIdx.x].y += other.y;
  }
  if (threadIdx.y != 0 || column >= columns) return;
  const float2 sum = shared[0][threadIdx.x];
  norm.dweight.set(column, sum.x);
  norm.dbias.set(column, sum.y);
}

template <class T>
void launch_unfold_norms(const TriangleUpdate& t, const detail::TriangleResults& results, const float* sums,
                         int64_t batch) {
  constexpr size_t count = detail::kSummedLayers.size();
  gemm::Vectors vectors;
  const auto norm_result = [&](size_t parameter) -> gemm::NormSums<T> {
    const Tensor& gradient = results[parameter];
    if (!gradient.defined()) return {};
    return {gradient.mutable_data_ptr(), gradient.scalar_type() == at::kFloat};
  };
  const auto result = [&](size_t parameter) {
    return results[parameter].defined() ? results[parameter].mutable_data_ptr<T>() : nullptr;
  };
  const auto begins = detail::triangle_sums_begin(t);
  FoldedLayers<T, count> all{};
  int columns = 0;
  for (size_t i = 0; i < count; ++i) {
    const TriangleParameter layer = detail::kSummedLayers[i];
    const Tensor& w = t.weight(layer);
    columns = std::max(columns, static_cast<int>(w.size(1)));
    all.layers[i] = {w.const_data_ptr<T>(),
                     w.stride(0),
                     static_cast<int>(w.size(0)),
                     static_cast<int>(w.size(1)),
                     layer == detail::kPOut ? 1 : 0,
                     begins[i].expect_int(),
                     result(layer),
                     result(layer + 1)};
  }
  for (const auto& [norm, layer] : {std::pair(0, detail::kNormIn), std::pair(1, detail::kNormOut)}) {
    all.norms[norm] = {{vectors.of_norm(t.parameters[layer])},
                       {vectors.of_norm(t.parameters[layer + 1])},
                       norm_result(layer),
                       norm_result(layer + 1)};
  }
  all.sums = sums;
  all.batch = batch;
  all.batch_stride = begins.back().expect_int();
  const dim3 blocks((columns + kUnfoldColumns - 1) / kUnfoldColumns, 2);
  unfold_norms_kernel<<<blocks, dim3(kUnfoldColumns, kUnfoldRows), 0, at::cuda::getCurrentCUDAStream()>>>(all);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace pair_steps

/// The gradients of one call: out() and then both sides of in() for each batch element, and at last finish().
class PairGradientSteps {
 public:
  /// `grad` is like x; `product` is that of the whole batch.
  PairGradientSteps(const detail::TriangleLayout& layout, const detail::TriangleGradients& gradients,
                    const at::Tensor& grad, const at::Tensor& product)
      : layout_(layout),
        gradients_(gradients),
        kernels_(layout.update(), pair_steps::chosen_case(layout.update())),
        batch_(detail::batch_size(layout.update().x, 3)) {
    if (!kernels_.may_run() || !suits(grad, product)) return;
    const int64_t workspace = kernels_.workspace_size(), sums = (batch_ * kernels_.sums_size() + 3) / 4 * 4;
    memory_ =
        at::detail::empty_cuda({workspace + sums + 2 * layout.n() * layout.n()}, layout.options().dtype(at::kFloat));
    sums_ = memory_.mutable_data_ptr<float>() + workspace;
    moments_ = sums_ + sums;
  }

  /// Whether the kernels apply to this call: everything they compute is wanted, and TMA can read and write it.
  bool possible() const { return memory_.defined(); }

  /// From the cotangent of the update (N, N, c): d(o), in channels, with zeros in padded columns, and the gate's part
  /// of dz.
  void out(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& o, const at::Tensor& dz,
           const at::Tensor& d_o) const {
    kernels_.out(x, grad, o, layout_.eps_out(), dz, d_o, memory(/*transposed=*/false));
  }

  /// From the cotangents of a and b, all in the direction of the update: dx, which overwrites dz, plus the gradient of
  /// the residual if that is defined.
  void in(const detail::TriangleElement& e, const at::Tensor& da, const at::Tensor& db, const at::Tensor& dz,
          const at::Tensor& residual) {
    const bool transposed = !layout_.update().outgoing;
    kernels_.in(e.x, e.mask, da, db, layout_.scale(), dz, residual, memory(transposed));
    ++element_;
  }

  /// The gradients of the parameters.
  void finish() const { pair_steps::unfold_norms(layout_.update(), gradients_.results(), sums_, batch_); }

 private:
  bool suits(const at::Tensor& grad, const at::Tensor& product) {
    const detail::TriangleUpdate& t = layout_.update();
    if (!gradients_.wants_z() || gradients_.wants_mask() || grad.scalar_type() != t.dtype() ||
        product.scalar_type() != t.dtype() || !gemm::is_aligned(product.const_data_ptr())) {
      return false;
    }
    for (const auto layer : detail::kSummedLayers) {
      if (!gradients_.wants(layer)) return false;
    }
    for (int64_t i = 0; i < batch_; ++i) {
      const pair_steps::Step step(t, detail::batch_element(t.x, 3, i));
      if (!step.fits || !pair_steps::positions(gradients_.dz(i))) return false;
      if (i == 0 && !kernels_.choose(step)) return false;
    }
    return true;
  }

  pair_steps::GradientMemory memory(bool transposed) const {
    const int64_t n = layout_.n();
    return {sums_ + element_ * kernels_.sums_size(), moments_, transposed ? 1 : n, transposed ? n : 1,
            memory_.mutable_data_ptr()};
  }

  const detail::TriangleLayout& layout_;
  const detail::TriangleGradients& gradients_;
  pair_steps::GradientKernels kernels_;
  int64_t batch_, element_ = 0;
  // The kernels' workspace, which they use one after the other; the sums of each batch element; and two moments per
  // position.
  at::Tensor memory_;
  float *sums_ = nullptr, *moments_ = nullptr;
};

}  // namespace torchops::cuda
