#pragma once

#include <ATen/Dispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include <array>
#include <vector>

#include "cuda/pair_steps.cuh"
#include "ops/triangle_layout.h"

// The gradients of a triangle update, except those of its products, by the kernels for compute capability 9.0: one pass
// over memory for the output step, one for each side of the input step, and then a small kernel for all parameters.
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
    const T *weight, *bias;
    T *dweight, *dbias;
  } norms[2];
  const float* sums;
  int64_t batch, batch_stride;
};

constexpr int kUnfoldColumns = 8, kUnfoldRows = 32;

/// A block has some columns of one of the norms (blockIdx.y), and all rows of each layer that reads it.
template <class T, int count>
__global__ void __launch_bounds__(kUnfoldColumns* kUnfoldRows) unfold_norms_kernel(const FoldedLayers<T, count> all) {
  const int column = static_cast<int>(blockIdx.x) * kUnfoldColumns + threadIdx.x, of = blockIdx.y;
  const auto& norm = all.norms[of];
  float dgamma = 0, dbeta = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const FoldedLayer<T>& layer = all.layers[i];
    if (layer.norm != of || column >= layer.columns) continue;
    const float gamma = norm.weight == nullptr ? 1.f : static_cast<float>(norm.weight[column]);
    const float beta = norm.bias == nullptr ? 0.f : static_cast<float>(norm.bias[column]);
    for (int row = threadIdx.y; row < layer.rows; row += kUnfoldRows) {
      float m = 0, db = 0;
      for (int64_t element = 0; element < all.batch; ++element) {
        const float* const sums = all.sums + element * all.batch_stride + layer.offset;
        m += sums[int64_t{row} * layer.columns + column];
        db += sums[int64_t{layer.rows} * layer.columns + row];
      }
      const auto w = static_cast<float>(layer.weight[row * layer.row_stride + column]);
      dgamma = fmaf(w, m, dgamma);
      dbeta = fmaf(w, db, dbeta);
      layer.dweight[int64_t{row} * layer.columns + column] = static_cast<T>(fmaf(m, gamma, db * beta));
      if (column == 0 && layer.dbias != nullptr) layer.dbias[row] = static_cast<T>(db);
    }
  }
  __shared__ float2 shared[kUnfoldRows][kUnfoldColumns];
  shared[threadIdx.y][threadIdx.x] = make_float2(dgamma, dbeta);
  __syncthreads();
  if (threadIdx.y != 0) return;
  for (int row = 1; row < kUnfoldRows; ++row) {
    dgamma += shared[row][threadIdx.x].x;
    dbeta += shared[row][threadIdx.x].y;
  }
  const int columns = all.layers[of == 0 ? 1 : 0].columns;
  if (column >= columns) return;
  if (norm.dweight != nullptr) norm.dweight[column] = static_cast<T>(dgamma);
  if (norm.dbias != nullptr) norm.dbias[column] = static_cast<T>(dbeta);
}

}  // namespace pair_steps

/// The gradients of one call: out() and then both sides of in() for each batch element, and at last finish().
class PairGradientSteps {
 public:
  /// `grad` is like x; `product` is that of the whole batch.
  PairGradientSteps(const detail::TriangleLayout& layout, const detail::TriangleGradients& gradients,
                    const at::Tensor& grad, const at::Tensor& product)
      : layout_(layout), gradients_(gradients), case_(pair_steps::chosen_case(layout.update())) {
    int64_t offset = 0;
    for (size_t i = 0; i < kLayers.size(); ++i) {
      const at::Tensor& w = layout.update().weight(kLayers[i]);
      offsets_[i] = offset;
      offset += w.size(0) * (w.size(1) + 1);
    }
    if (!case_ || !suits(grad, product)) return;
    sums_of_element_ = offset;
    const int64_t workspace = (std::max(bytes_out_, bytes_in_) + 15) / 16 * 4;
    const int64_t sums = (detail::batch_size(layout.update().x, 3) * offset + 3) / 4 * 4;
    memory_ =
        at::detail::empty_cuda({workspace + sums + 2 * layout.n() * layout.n()}, layout.options().dtype(at::kFloat));
    sums_ = memory_.mutable_data_ptr<float>() + workspace;
    moments_ = sums_ + sums;
  }

  /// Whether the kernels apply to this call: everything they compute is wanted, and TMA can read and write it.
  bool possible() const { return memory_.defined(); }

  /// From the cotangent of the update (N, N, c): d(o), in channels like o, with zeros in padded
  /// columns, and the gate's part of dz.
  void out(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& o, const at::Tensor& dz,
           const at::Tensor& d_o) {
    const detail::TriangleUpdate& t = layout_.update();
    pair_steps::Step step(t, x);
    gemm::PairGradientProblem p = problem(step, 0, detail::kPOut, detail::kGOut, dz, /*in_direction=*/false);
    const at::Tensor readable = pair_steps::readable(grad);
    p.norm_o = step.norm(t, detail::kNormOut, layout_.eps_out());
    p.row_stride = o.stride(1);
    p.channel_stride = o.stride(0);
    p.channels[0] = const_cast<void*>(o.const_data_ptr());  // only read
    p.d_o = d_o.mutable_data_ptr();
    p.grad = *pair_steps::positions(readable);
    TORCH_INTERNAL_ASSERT(d_o.strides() == o.strides());
    run(*out_, p);
  }

  /// From the cotangents of a and b, all in the direction of the update: dx, which overwrites dz, plus the gradient of
  /// the residual if that is defined.
  void in(const detail::TriangleElement& e, const at::Tensor& da, const at::Tensor& db, const at::Tensor& dz,
          const at::Tensor& residual) {
    side(e, da, 2, detail::kPA, detail::kGA, layout_.scale(), dz, /*last=*/false, {});
    side(e, db, 4, detail::kPB, detail::kGB, 1, dz, /*last=*/true, residual);
    ++element_;
  }

  /// The gradients of the parameters.
  void finish() const {
    const at::ScalarType dtype = layout_.update().dtype();
    dtype == at::kHalf ? unfold<at::Half>() : unfold<at::BFloat16>();
  }

 private:
  static constexpr std::array<detail::TriangleParameter, 6> kLayers{detail::kPOut, detail::kGOut, detail::kPA,
                                                                    detail::kGA,   detail::kPB,   detail::kGB};

  bool suits(const at::Tensor& grad, const at::Tensor& product) {
    const detail::TriangleUpdate& t = layout_.update();
    if (!gradients_.wants_z() || gradients_.wants_mask() || grad.scalar_type() != t.dtype() ||
        product.scalar_type() != t.dtype() || !gemm::is_aligned(product.const_data_ptr())) {
      return false;
    }
    for (const auto layer : kLayers) {
      if (!gradients_.wants(layer) || !gemm::operand(t.weight(layer))) return false;
    }
    for (int64_t i = 0; i < detail::batch_size(t.x, 3); ++i) {
      const pair_steps::Step step(t, detail::batch_element(t.x, 3, i));
      gemm::PairGradientProblem p;
      static_cast<gemm::PairProblem&>(p) = step.problem;
      if (!step.fits || !pair_steps::positions(gradients_.dz(i))) return false;
      if (i > 0) continue;  // the choice of kernels depends only on sizes
      out_ = gemm::chosen<gemm::TriangleOutGradients>(p, *case_, bytes_out_);
      in_ = gemm::chosen<gemm::TriangleInGradients>(p, *case_, bytes_in_);
      if (out_ == nullptr || in_ == nullptr) return false;
    }
    return true;
  }

  gemm::PairGradientProblem problem(pair_steps::Step& step, size_t layer, detail::TriangleParameter value,
                                    detail::TriangleParameter gate, const at::Tensor& dz, bool in_direction) const {
    gemm::PairGradientProblem p;
    step.problem.value[0] = step.layer(layout_.update(), value);
    step.problem.gate[0] = step.layer(layout_.update(), gate);
    TORCH_INTERNAL_ASSERT(step.fits);
    static_cast<gemm::PairProblem&>(p) = step.problem;
    p.dz = *pair_steps::positions(dz);
    const bool transposed = in_direction && !layout_.update().outgoing;
    p.moments = moments_;
    p.moments_row_stride = transposed ? 1 : layout_.n();
    p.moments_stride = transposed ? layout_.n() : 1;
    p.sums = sums_ + element_ * sums_of_element_ + offsets_[layer];
    p.workspace = memory_.mutable_data_ptr();
    return p;
  }

  void run(const gemm::Kernel<gemm::PairGradientProblem>& kernel, const gemm::PairGradientProblem& p) const {
    const gemm::Status status = kernel.run(p, at::cuda::getCurrentCUDAStream());
    C10_CUDA_CHECK(status.error);
    TORCH_INTERNAL_ASSERT(status.done());
  }

  void side(const detail::TriangleElement& e, const at::Tensor& grad, size_t layer, detail::TriangleParameter value,
            detail::TriangleParameter gate, double scale, const at::Tensor& dz, bool last,
            const at::Tensor& residual) const {
    pair_steps::Step step(layout_.update(), e.x);
    gemm::PairGradientProblem p = problem(step, layer, value, gate, dz, /*in_direction=*/true);
    p.row_stride = grad.stride(1);
    p.channel_stride = grad.stride(0);
    p.channels[0] = const_cast<void*>(grad.const_data_ptr());  // only read
    p.scale[0] = static_cast<float>(scale);
    p.last = last;
    const at::Tensor readable = residual.defined() ? pair_steps::readable(residual) : residual;
    if (readable.defined()) {
      p.grad = *pair_steps::positions(readable);
      p.adds = true;
    }
    if (e.mask.defined()) {
      p.mask = e.mask.const_data_ptr();
      p.mask_row_stride = e.mask.stride(0);
      p.mask_stride = e.mask.stride(1);
    }
    run(*in_, p);
  }

  template <class T>
  void unfold() const {
    const detail::TriangleUpdate& t = layout_.update();
    std::vector<at::Tensor> kept;
    const auto vector = [&](const detail::OptionalTensor& parameter) -> const T* {
      if (!parameter) return nullptr;
      kept.push_back(parameter->contiguous());
      return kept.back().const_data_ptr<T>();
    };
    const auto result = [&](size_t parameter) {
      return gradients_.wants(parameter) ? gradients_.result(parameter).mutable_data_ptr<T>() : nullptr;
    };
    pair_steps::FoldedLayers<T, kLayers.size()> all{};
    int columns = 0;
    for (size_t i = 0; i < kLayers.size(); ++i) {
      const at::Tensor& w = t.weight(kLayers[i]);
      const int norm = kLayers[i] == detail::kPOut ? 1 : 0;
      columns = std::max(columns, static_cast<int>(w.size(1)));
      all.layers[i] = {
          w.const_data_ptr<T>(), w.stride(0),        static_cast<int>(w.size(0)), static_cast<int>(w.size(1)), norm,
          offsets_[i],           result(kLayers[i]), result(kLayers[i] + 1)};
    }
    for (const auto& [norm, layer] : {std::pair(0, detail::kNormIn), std::pair(1, detail::kNormOut)}) {
      all.norms[norm] = {vector(t.parameters[layer]), vector(t.parameters[layer + 1]), result(layer),
                         result(layer + 1)};
    }
    all.sums = sums_;
    all.batch = detail::batch_size(t.x, 3);
    all.batch_stride = sums_of_element_;
    const dim3 blocks((columns + pair_steps::kUnfoldColumns - 1) / pair_steps::kUnfoldColumns, 2);
    pair_steps::unfold_norms_kernel<<<blocks, dim3(pair_steps::kUnfoldColumns, pair_steps::kUnfoldRows), 0,
                                      at::cuda::getCurrentCUDAStream()>>>(all);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  const detail::TriangleLayout& layout_;
  const detail::TriangleGradients& gradients_;
  std::optional<gemm::Case> case_;
  std::array<int64_t, kLayers.size()> offsets_;
  const gemm::Kernel<gemm::PairGradientProblem>*out_ = nullptr, *in_ = nullptr;
  int64_t bytes_out_ = 0, bytes_in_ = 0, sums_of_element_ = 0, element_ = 0;
  // The kernels' workspace, which they use one after the other; the sums of each batch
  // element; and two moments per position.
  at::Tensor memory_;
  float *sums_ = nullptr, *moments_ = nullptr;
};

}  // namespace torchops::cuda
