#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>

#include "cuda/gemm/problem.h"
#include "cuda/linear.h"

namespace torchops::cuda {

/// Gradients for float32 rows x with 16-bit weights, by the kernels of gemm/sm90 that sum those of weights and biases
/// in one pass: panels of x are rounded, and the kernels' sums, in float32, are added over the panels. A kernel that
/// makes dx, too, writes it in float32.
class RoundedPanels {
 public:
  /// dx may be undefined.
  RoundedPanels(const at::Tensor& x, const at::Tensor& w, const at::Tensor& dx, int products)
      : x_(x),
        dx_(dx),
        weights_(w.size(0) * w.size(1)),
        step_(rows_of_panel(x.size(0), rounded_row_bytes(x, w), rounded_row_bytes(x, w))),
        rounded_(at::detail::empty_cuda({step_, x.size(1)}, w.options())),
        sums_(at::zeros({products, weights_ + w.size(0)}, w.options().dtype(at::kFloat))),
        sums_of_panel_(at::detail::empty_cuda(sums_.sizes(), sums_.options())) {}

  int64_t rows() const { return step_; }

  /// Calls run(rounded, begin) for each panel. Returns false, with nothing done, if it does.
  bool for_each(c10::function_ref<bool(const at::Tensor&, int64_t)> run) const {
    bool done = true;
    for_each_panel_of(x_.size(0), step_, [&](int64_t begin, int64_t end) {
      if (!done) return;
      const at::Tensor rounded = rounded_.narrow(0, 0, end - begin).copy_(x_.narrow(0, begin, end - begin));
      done = run(rounded, begin);
      TORCH_INTERNAL_ASSERT(done || begin == 0);
      if (done) sums_.add_(sums_of_panel_);
    });
    return done;
  }

  /// Where the kernel writes the gradients of the panel from `begin` on.
  void set_outputs(gemm::GradientProblem& problem, int64_t begin) const {
    const auto of = [&](int product) { return sums_of_panel_.mutable_data_ptr<float>() + product * sums_.size(1); };
    problem.is_wide = true;
    if (dx_.defined()) problem.dx = dx_.mutable_data_ptr<float>() + begin * x_.size(1);
    problem.dw = of(0);
    problem.dbias = of(0) + weights_;
    if (sums_.size(0) == 2) {
      problem.dw2 = of(1);
      problem.dbias2 = of(1) + weights_;
    }
  }

  /// Rounds the sums of a product; db may be undefined.
  void finish(int product, const at::Tensor& dw, const at::Tensor& db) const {
    const at::Tensor of = sums_.select(0, product);
    dw.copy_(of.narrow(0, 0, weights_).view(dw.sizes()));
    if (db.defined()) db.copy_(of.narrow(0, weights_, of.size(0) - weights_));
  }

 private:
  at::Tensor x_, dx_;
  int64_t weights_, step_;
  at::Tensor rounded_, sums_, sums_of_panel_;
};

}  // namespace torchops::cuda
