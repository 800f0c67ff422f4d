#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "cuda/triangle/problem.h"

// The kernels for compute capability 9.0 that make the gradients of a triangle update, except those of its products:
// one pass over memory for the output step, one for each side of the input step, and then a small one for the
// parameters. They are given a batch element, or some of its rows.
namespace torchops::cuda::pair_steps {

/// Memory that the steps of one batch element, or of some of its rows, share.
struct GradientMemory {
  float* sums;     // of detail::kSummedLayers, one after the other; each step writes those of its own layers
  float* moments;  // two per position, of the layer norm of x: the output step writes them for the input step
  int64_t moments_row_stride, moments_stride;  // in positions
  void* workspace;
};

class GradientKernels {
 public:
  /// `t` must outlive this.
  GradientKernels(const TriangleUpdate& t, const std::optional<gemm::Case>& chosen) : t_(t), case_(chosen) {
    const auto begins = detail::triangle_sums_begin(t);
    for (size_t i = 0; i < begins.size(); ++i) begins_[i] = begins[i].expect_int();
  }

  /// Whether there may be kernels for these sizes and dtypes.
  bool may_run() const { return case_.has_value(); }

  /// Looks up the kernels for positions as many as this step has, which is all that the choice depends on besides the
  /// sizes of the weights; false if there are none, or TMA cannot read x or the weights.
  bool choose(const Step& step) {
    if (!may_run() || !step.fits) return false;
    for (const auto layer : detail::kSummedLayers) {
      if (!gemm::operand(t_.weight(layer))) return false;
    }
    gemm::PairGradientProblem p;
    static_cast<gemm::PairProblem&>(p) = step.problem;
    out_ = gemm::chosen<gemm::TriangleOutGradients>(p, *case_, bytes_out_);
    in_ = gemm::chosen<gemm::TriangleInGradients>(p, *case_, bytes_in_);
    return out_ != nullptr && in_ != nullptr;
  }

  /// What the workspace and sums of one element take, in floats.
  int64_t workspace_size() const { return (std::max(bytes_out_, bytes_in_) + 15) / 16 * 4; }
  int64_t sums_size() const { return begins_.back(); }

  /// From the cotangent of the update, like x (rows, N, c): d(o), in channels, with zeros in padded columns, and the
  /// gate's part of dz.
  void out(const Tensor& x, const Tensor& grad, const Tensor& o, double eps_out, const Tensor& dz, const Tensor& d_o,
           const GradientMemory& memory) const {
    Step step(t_, x);
    gemm::PairGradientProblem p = problem(step, 0, o, dz, memory);
    const Tensor readable = pair_steps::readable(grad);
    p.norm_o = step.norm(t_, detail::kNormOut, eps_out);
    p.d_o = {d_o.mutable_data_ptr(), d_o.stride(1), d_o.stride(0)};
    p.grad = *positions(readable);
    TORCH_INTERNAL_ASSERT(gemm::launch(*out_, p));
  }

  /// From the cotangents of a, which had been multiplied by `scale`, and b: dx, which overwrites dz, plus the gradient
  /// of the residual if that is defined. The mask is in the dtype of the products, or undefined. All are in the
  /// direction of the update.
  void in(const Tensor& x, const Tensor& mask, const Tensor& da, const Tensor& db, double scale, const Tensor& dz,
          const Tensor& residual, const GradientMemory& memory) const {
    side(x, mask, da, 2, scale, dz, /*last=*/false, {}, memory);
    side(x, mask, db, 4, 1, dz, /*last=*/true, residual, memory);
  }

 private:
  // The part that all have of a step whose value and gate are these two of the summed layers.
  gemm::PairGradientProblem problem(Step& step, size_t layer, const Tensor& channels, const Tensor& dz,
                                    const GradientMemory& memory) const {
    gemm::PairGradientProblem p;
    step.problem.value[0] = step.layer(t_, detail::kSummedLayers[layer]);
    step.problem.gate[0] = step.layer(t_, detail::kSummedLayers[layer + 1]);
    TORCH_INTERNAL_ASSERT(step.fits);
    static_cast<gemm::PairProblem&>(p) = step.problem;
    p.row_stride = channels.stride(1);
    p.channel_stride = channels.stride(0);
    p.channels[0] = const_cast<void*>(channels.const_data_ptr());  // only read
    p.dz = *positions(dz);
    p.moments = memory.moments;
    p.moments_row_stride = memory.moments_row_stride;
    p.moments_stride = memory.moments_stride;
    p.sums = memory.sums + begins_[layer];
    p.workspace = memory.workspace;
    return p;
  }

  void side(const Tensor& x, const Tensor& mask, const Tensor& grad, size_t layer, double scale, const Tensor& dz,
            bool last, const Tensor& residual, const GradientMemory& memory) const {
    Step step(t_, x);
    gemm::PairGradientProblem p = problem(step, layer, grad, dz, memory);
    p.scale[0] = static_cast<float>(scale);
    p.last = last;
    const Tensor readable = residual.defined() ? pair_steps::readable(residual) : residual;
    if (readable.defined()) {
      p.grad = *positions(readable);
      p.add_residual = true;
    }
    if (mask.defined()) {
      p.mask = mask.const_data_ptr();
      p.mask_row_stride = mask.stride(0);
      p.mask_stride = mask.stride(1);
    }
    TORCH_INTERNAL_ASSERT(gemm::launch(*in_, p));
  }

  const TriangleUpdate& t_;
  std::optional<gemm::Case> case_;
  std::array<int64_t, detail::kSummedLayers.size() + 1> begins_;  // of the layers in the sums, and the end
  const gemm::Kernel<gemm::PairGradientProblem>*out_ = nullptr, *in_ = nullptr;
  int64_t bytes_out_ = 0, bytes_in_ = 0;
};

/// The gradients of the parameters, written to those of `results` that are defined, all contiguous: from the sums of
/// `batch` elements, or of parts of elements, one after the other.
void unfold_norms(const TriangleUpdate& t, const detail::TriangleResults& results, const float* sums, int64_t batch);

}  // namespace torchops::cuda::pair_steps
