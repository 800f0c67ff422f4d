#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "ops/kernel_path.h"
#include "ops/triangle_multiplicative_update.h"

// From the arguments of a triangle update to the problem that the kernels of gemm/ solve.
namespace torchops::cuda::pair_steps {

using at::Tensor;
using detail::OptionalTensor;
using detail::TriangleParameter;
using detail::TriangleUpdate;

/// Whether the rows of a tensor (outer, inner, columns) begin at whole pieces of 16 bytes, as TMA and cp.async read
/// them.
inline bool has_whole_rows(const Tensor& t) {
  const int64_t size = t.element_size(), most = gemm::kMostStrideBytes / size;
  const auto fits = [&](int64_t stride) { return stride > 0 && stride < most && stride % (16 / size) == 0; };
  return t.stride(2) == 1 && fits(t.stride(0)) && fits(t.stride(1)) && gemm::is_aligned(t.const_data_ptr());
}

/// A tensor of positions (rows, N, features) of such rows, with as many features; its second dimension has row_stride.
inline std::optional<gemm::Operand> positions(const Tensor& t) {
  if (t.size(2) * t.element_size() % 16 != 0 || !has_whole_rows(t)) return std::nullopt;
  return gemm::Operand{t.const_data_ptr(), t.stride(1), t.stride(0)};
}

/// Such a tensor, or else a copy that is one.
inline Tensor readable(const Tensor& t) { return positions(t) ? t : t.clone(at::MemoryFormat::Contiguous); }

/// The part of the problem of one batch element, or of some of its rows, that both steps share, and what keeps its
/// memory alive.
struct Step {
  gemm::PairProblem problem;
  gemm::Vectors vectors;
  bool fits = true;

  Step(const TriangleUpdate& t, const Tensor& x) {
    const auto from = positions(x);
    problem.n = static_cast<int>(x.size(1));
    problem.rows = static_cast<int>(x.size(0));
    problem.c = static_cast<int>(x.size(2));
    problem.d = static_cast<int>(t.weight(detail::kPA).size(0));
    fits = from && problem.d % 8 == 0;
    if (!fits) return;
    problem.x = *from;
    problem.norm_x = norm(t, detail::kNormIn, t.eps);
  }

  gemm::Norm norm(const TriangleUpdate& t, TriangleParameter layer, double eps) {
    // Never 0: after the last position, tiles have rows of zeros, which must not become NaN.
    constexpr double least = 1e-30;
    return {vectors.of_norm(t.parameters[layer]), vectors.of_norm(t.parameters[layer + 1]),
            static_cast<float>(std::max(eps, least))};
  }
  gemm::Layer layer(const TriangleUpdate& t, TriangleParameter layer) {
    const auto weight = gemm::operand(t.weight(layer));
    fits = fits && weight;
    return {weight.value_or(gemm::Operand{}), vectors.bias(t.bias(layer))};
  }
  /// The input step: from x and the mask, or none, to a, times `scale`, and b, whose channels may be another distance
  /// apart. `owns_gaps` is that of the problem.
  void set_input(const TriangleUpdate& t, const Tensor& mask, const Tensor& a, const Tensor& b, double scale,
                 bool owns_gaps) {
    problem.owns_gaps = owns_gaps;
    problem.value[0] = layer(t, detail::kPA);
    problem.value[1] = layer(t, detail::kPB);
    problem.gate[0] = layer(t, detail::kGA);
    problem.gate[1] = layer(t, detail::kGB);
    set_channels(b);
    problem.second_channel_stride = problem.channel_stride;
    set_channels(a);
    fits = fits && a.stride(1) == b.stride(1);
    if (!fits) return;
    problem.channels[0] = a.mutable_data_ptr();
    problem.channels[1] = b.mutable_data_ptr();
    problem.scale[0] = static_cast<float>(scale);
    if (!mask.defined()) return;
    problem.mask = mask.const_data_ptr();
    problem.mask_row_stride = mask.stride(0);
    problem.mask_stride = mask.stride(1);
  }
  /// The output step: from the product o and x to `out`, of which positions(out) is `to`; with x if `add_residual`.
  void set_output(const TriangleUpdate& t, const Tensor& o, const Tensor& out, const gemm::Operand& to, double eps_out,
                  bool add_residual) {
    problem.value[0] = layer(t, detail::kPOut);
    problem.gate[0] = layer(t, detail::kGOut);
    problem.norm_o = norm(t, detail::kNormOut, eps_out);
    set_channels(o);
    if (!fits) return;
    problem.channels[0] = const_cast<void*>(o.const_data_ptr());  // only read
    problem.out = out.mutable_data_ptr();
    problem.out_row_stride = to.row_stride;
    problem.out_stride = to.batch_stride;
    problem.add_residual = add_residual;
  }

  void set_channels(const Tensor& channels) {
    problem.channel_stride = channels.stride(0);
    problem.row_stride = channels.stride(1);
    fits = fits && channels.stride(2) == 1 && gemm::is_aligned(channels.const_data_ptr());
  }
};

/// Whether kernels may compute a call with x in the dtype of the products: rows are whole pieces of 16 bytes.
inline bool may_run(const TriangleUpdate& t) {
  const int64_t row_bytes = t.x.size(-1) * static_cast<int64_t>(c10::elementSize(t.dtype()));
  return detail::kernel_path() != detail::KernelPath::kCublas && t.x.numel() > 0 && row_bytes % 16 == 0 &&
         t.weight(detail::kPA).size(0) % 8 == 0;
}

/// The case of the kernels of sm90/ for all batch elements, which are for 16 bits; nullopt if they don't apply.
inline std::optional<gemm::Case> chosen_case(const TriangleUpdate& t) {
  if (t.x.scalar_type() != t.dtype() || t.dtype() == at::kFloat || !may_run(t)) return std::nullopt;
  return gemm::sm90_case(t.x.size(-2), t.weight(detail::kPA).size(0), t.x.size(-1), t.dtype());
}

}  // namespace torchops::cuda::pair_steps
