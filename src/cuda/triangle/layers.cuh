#pragma once

#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <type_traits>
#include <utility>

#include "cuda/base/device.h"
#include "cuda/linear/batched_product.h"
#include "cuda/linear/products.h"
#include "cuda/linear/sm80_float32.cuh"
#include "cuda/linear/sm80_float64.cuh"
#include "cuda/passes/channel_transpose.cuh"
#include "cuda/triangle/forward.cuh"
#include "ops/glu.h"
#include "ops/kernel_path.h"
#include "ops/layer_norm.h"
#include "ops/triangle_layout.h"

// The layers of a triangle update on panels of positions, where no kernel of triangle/forward.cuh can run: cuBLAS
// products, and passes over a panel that is still in the second-level cache.
namespace torchops::cuda {

inline constexpr detail::TriangleBackend kTriangleBackend{
    [](at::IntArrayRef sizes, const at::TensorOptions& options) -> at::Tensor {
      return at::detail::empty_cuda(sizes, options);
    },
    batched_product_out, /*multiplies_padding=*/true,
    [] { return static_cast<int64_t>(device_properties().multiProcessorCount); }};

/// What all panels of a call share. A panel consists of whole rows of the pair matrix; its rows are positions.
class TriangleLayers : public detail::TriangleLayout {
 public:
  /// Forward passes keep the products for a backward pass, or not.
  enum class Pass { kForward, kForwardOnly, kBackward };
  TriangleLayers(const detail::TriangleUpdate& t, Pass pass) : TriangleLayers(t, pass, PairSteps(t)) {}

  const PairSteps& steps() const { return steps_; }
  const std::optional<at::Tensor>& norm_weight() const { return norm_weight_; }
  const std::optional<at::Tensor>& norm_bias() const { return norm_bias_; }

  /// Calls f on all panels. f uses `tensors` tensors of max(c, d) features for the positions of a panel, which may take
  /// as much memory as `pairs` pair tensors, or some tens of MiB. Fewer, larger panels are faster, because it takes
  /// some 16 MiB of a tensor to keep a large GPU busy. Small pair tensors, for which launches take most of the time,
  /// get a few panels at most.
  template <class F>
  void for_each_panel(int64_t tensors, int64_t pairs, const F& f) const {
    constexpr int64_t small_pair = int64_t{128} << 20, for_small_pairs = int64_t{256} << 20;
    const int64_t features = std::max({update().x.size(-1), channels(), int64_t{1}});
    const int64_t row_bytes = n() * features * static_cast<int64_t>(update().x.element_size());
    const int64_t pair_bytes = n() * row_bytes;
    const int64_t least = pairs > 0 && pair_bytes <= small_pair ? for_small_pairs : panel_bytes_;
    const int64_t rows = std::max(least, pairs * pair_bytes) / std::max(row_bytes * tensors, int64_t{1});
    for_each_panel_of(n(), even_step(n(), std::max(rows, int64_t{1})),
                      [&](int64_t begin, int64_t end) { f(detail::TrianglePanel{begin, end}); });
  }

  /// z for rows of x, in the dtype of the products.
  at::Tensor z(const at::Tensor& rows) const {
    return layer_norm(rows, at::IntArrayRef(rows.size(1)), norm_weight_, norm_bias_, update().eps).to(update().dtype());
  }
  at::Tensor gated(const at::Tensor& z, detail::TriangleParameter p, detail::TriangleParameter g) const {
    return glu(z, update().weight(p), update().weight(g), update().bias(p), update().bias(g));
  }
  /// The projection for rows of the normalised o.
  void project(const at::Tensor& out, const at::Tensor& rows) const {
    linear_out(out, rows, update().weight(detail::kPOut), update().bias(detail::kPOut));
  }

  enum class To { kChannels, kRows };
  /// Moves a panel of (rows, d) to its positions in padded channels or back, times the mask (N, N) and a factor.
  void transpose(To to, const detail::TrianglePanel& panel, const at::Tensor& rows, const at::Tensor& channels,
                 const at::Tensor& mask, double factor) const {
    with_channels(panel, channels, mask, factor, [&]<class T>(const ChannelPanel<T>& of) {
      to == To::kChannels ? of.from_rows(rows) : of.to_rows(rows);
    });
  }
  /// A panel of o as rows.
  at::Tensor rows_of(const at::Tensor& channels, const detail::TrianglePanel& panel, const at::Tensor& mask = {},
                     double factor = 1) const {
    const at::Tensor rows = empty({(panel.end - panel.begin) * n(), this->channels()});
    transpose(To::kRows, panel, rows, channels, mask, factor);
    return rows;
  }
  /// The layer norm of a panel of o, as rows.
  at::Tensor normalized_rows_of(const at::Tensor& channels, const detail::TrianglePanel& panel) const {
    at::Tensor rows = empty({(panel.end - panel.begin) * n(), this->channels()});
    std::optional<at::Tensor> weight = contiguous(update().parameters[detail::kNormOut]),
                              bias = contiguous(update().parameters[detail::kNormOut + 1]);
    if (weight && bias && weight->scalar_type() != bias->scalar_type()) {
      weight = weight->to(at::kFloat);
      bias = bias->to(at::kFloat);
    }
    with_channels(panel, channels, {}, 1, [&]<class T>(const ChannelPanel<T>& of) {
      if (of.to_normalized_rows(rows, weight, bias, eps_out())) return;
      of.to_rows(rows);
      layer_norm_(rows, at::IntArrayRef(rows.size(1)), weight, bias, eps_out());
    });
    return rows;
  }
  /// A gated linear unit z -> (z @ p.T + b) * sigmoid(z @ g.T + bg) of one call.
  struct Glu {
    detail::TriangleParameter p, g;
    std::optional<at::Tensor> weight, bias;  // stacked, for one product; no weight if a kernel computes the unit
  };
  Glu glu_of(detail::TriangleParameter p, detail::TriangleParameter g) const {
    const at::Tensor &w = update().weight(p), &wg = update().weight(g);
    const bool fused = w.element_size() == 2 && detail::kernel_path() != detail::KernelPath::kCublas;
    const bool full = gemm::wants_float64(w.scalar_type()) && gemm::are_full_weights(w, wg);
    if (fused || full || wants_exact(p, g)) return {p, g, {}, {}};
    return {p, g, stacked(w, wg), stacked(update().bias(p), update().bias(g))};
  }
  /// How many tensors of a panel it takes to make the channels of two such units from a panel of x. The float64 kernel
  /// stores no products, so there it is z, and before that x if its rows are copied. In float32, larger panels are not
  /// faster.
  int64_t input_tensors(const Glu& of_a, const Glu& of_b, const at::Tensor& x) const {
    if (of_a.weight || of_b.weight || update().dtype() != at::kDouble) return 3;
    return x.is_contiguous() ? 1 : 2;
  }
  /// How many tensors of a panel its update takes besides the result: z, then the normalised rows of o and, after
  /// these, products of the gate. Only in float64 are larger panels faster.
  int64_t output_tensors(const at::Tensor& x) const {
    return update().dtype() == at::kDouble && x.is_contiguous() ? 2 : 3;
  }
  /// Its channels for a panel of z, times the mask and a factor.
  void gated_to_channels(const detail::TrianglePanel& panel, const at::Tensor& z, const Glu& unit,
                         const at::Tensor& channels, const at::Tensor& mask, double factor) const {
    if (!unit.weight) {
      if (!gated_to_channels_by_kernel(panel, z, unit, channels, mask, factor)) {
        transpose(To::kChannels, panel, gated(z, unit.p, unit.g), channels, mask, factor);
      }
      return;
    }
    const int64_t d = this->channels();
    const at::Tensor both = empty({z.size(0), 2 * d});
    linear_out(both, z, *unit.weight, unit.bias);
    with_channels(panel, channels, mask, factor, [&]<class T>(const ChannelPanel<T>& of) {
      of.from_gated_rows(both.narrow(1, 0, d), both.narrow(1, d, d));
    });
  }

  /// The gradients of such a unit by a kernel in float32, as glu_gradients() makes them, from the cotangent of its
  /// channels. Returns false, with nothing done, if it cannot run.
  bool exact_gradients(const detail::GluGradients& gradients, const detail::TrianglePanel& panel, const at::Tensor& z,
                       detail::TriangleParameter p, detail::TriangleParameter g, const at::Tensor& channels,
                       const at::Tensor& mask, double factor, std::array<bool, 5> output_mask) const {
    if (!wants_exact(p, g)) return false;
    bool done = false;
    with_channels(panel, channels, mask, factor, [&]<class T>(const ChannelPanel<T>& from) {
      if constexpr (std::is_same_v<T, float>) {
        done = glu_gradients_from_channels(gradients, from, z, update().weight(p), update().weight(g), update().bias(p),
                                           update().bias(g), output_mask, /*accumulate=*/true);
      }
    });
    return done;
  }

 private:
  /// Whether a kernel in float32 should compute a gated linear unit, and can read its weights.
  bool wants_exact(detail::TriangleParameter p, detail::TriangleParameter g) const {
    const at::Tensor &w = update().weight(p), &wg = update().weight(g);
    const detail::KernelPath path = detail::kernel_path();
    return path != detail::KernelPath::kCublas && gemm::are_full_weights(w, wg) &&
           gemm::wants_float32(w.scalar_type(), n() * n(), w.size(0), w.size(1), detail::is_automatic(path));
  }
  /// gated_to_channels() by a kernel in float32 or float64. Returns false, with nothing done, if it cannot run.
  bool gated_to_channels_by_kernel(const detail::TrianglePanel& panel, const at::Tensor& z, const Glu& unit,
                                   const at::Tensor& channels, const at::Tensor& mask, double factor) const {
    const at::Tensor &w = update().weight(unit.p), &wg = update().weight(unit.g);
    if (!gemm::is_exact_float32(w.scalar_type()) && !gemm::wants_float64(w.scalar_type())) return false;
    const auto bias = contiguous(update().bias(unit.p)), gate_bias = contiguous(update().bias(unit.g));
    return attempt(Family::kSm80, [&] {
      bool done = false;
      with_channels(panel, channels, mask, factor, [&]<class T>(const ChannelPanel<T>& to) {
        using Rule = gemm::GluRule<Sigmoid>;
        const gemm::RuleTensors tensors{.d = channels, .a = z, .b = w, .bias = bias, .b2 = &wg, .bias2 = &gate_bias};
        if constexpr (std::is_same_v<T, float>) done = gemm::run_float32_to_channels<Rule>(tensors, to);
        if constexpr (std::is_same_v<T, double>) done = gemm::run_float64_to_channels<Sigmoid>(tensors, to);
      });
      return done;
    });
  }
  /// Calls f with a panel of padded channels, whose positions have the factors `mask` (N, N) times `factor`.
  template <class F>
  void with_channels(const detail::TrianglePanel& panel, const at::Tensor& channels, const at::Tensor& mask,
                     double factor, const F& f) const {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, channels.scalar_type(), "triangle_multiplicative_update", [&] {
          const at::Tensor factors = mask.defined() ? panel.of(mask).contiguous() : mask;
          const int64_t row_stride = channels.stride(1);
          f(ChannelPanel<scalar_t>{
              detail::strided_view(channels, {channels.size(0), (panel.end - panel.begin) * row_stride},
                                   {channels.stride(0), 1}, panel.begin * row_stride),
              {n(), row_stride},
              {mask.defined() ? factors.const_data_ptr<scalar_t>() : nullptr,
               static_cast<Accumulate<scalar_t>>(factor)}});
        });
  }

  struct Scratch {
    int64_t panels, group;
  };
  /// Whether the kernels of triangle/forward.cuh, if there are some for a call, can read its x and weights.
  static bool are_readable(const detail::TriangleUpdate& t) {
    for (int64_t index = 0; index < detail::batch_size(t.x, 3); ++index) {
      if (!pair_steps::positions(detail::batch_element(t.x, 3, index))) return false;
    }
    constexpr std::array weights{detail::kPA, detail::kPB, detail::kGA, detail::kGB, detail::kPOut, detail::kGOut};
    return std::all_of(weights.begin(), weights.end(),
                       [&](detail::TriangleParameter w) { return gemm::operand(t.weight(w)).has_value(); });
  }

  // The limits of panels and of a spare group of channels. Forward may take 2.1 pair tensors, backward 3.2 besides dx,
  // each plus 64 MiB, less two or three tensors of padded channels, and the workspace and moments of gradients. Fewer,
  // larger groups are faster: each launch of cuBLAS costs time besides its products. But a group is kept with the
  // products, so a forward pass that keeps them gives it at most half of the 64 MiB.
  static Scratch scratch_of(const detail::TriangleUpdate& t, Pass pass, const PairSteps& steps) {
    constexpr int64_t mib = int64_t{1} << 20, least_group = 8 * mib;
    const bool backward = pass == Pass::kBackward;
    const int64_t n = t.x.size(-2), d = t.weight(detail::kPA).size(0);
    const auto size = static_cast<int64_t>(c10::elementSize(t.dtype()));
    const int64_t pair = n * n * std::max(t.x.size(-1), d) * size;
    const int64_t padded = detail::padded_size(n, t.dtype()) * detail::padded_row_stride(n, d, t.dtype()) * d * size;
    const int64_t stacked_weights = 4 * d * t.x.size(-1) * size;
    const int64_t left = (backward ? 32 : 21) * (pair / 10) + 64 * mib - (backward ? 3 : 2) * padded - stacked_weights;
    // Panels consist of whole rows, and the allocator rounds all tensors up.
    constexpr int64_t rounding = 4 * mib;
    const int64_t most_panels = t.dtype() == at::kDouble && !backward ? 64 * mib : 48 * mib;
    const int64_t panels = std::clamp(left - least_group - rounding, 32 * mib, most_panels);
    const bool by_kernels = (backward ? steps.have_gradient_kernels() : steps.have_kernels()) && are_readable(t);
    const bool has_moments = backward || steps.stream_weights();
    const int64_t of_kernels =
        (backward ? 18 * mib + detail::batch_size(t.x, 3) * mib / 2 : 0) + (has_moments ? 8 * n * n : 0);
    const int64_t others = rounding + (by_kernels ? of_kernels : panels);
    const int64_t most_group = pass == Pass::kForward ? 32 : 88;
    return {panels, std::clamp(left - others, least_group, most_group * mib)};
  }
  TriangleLayers(const detail::TriangleUpdate& t, Pass pass, PairSteps steps)
      : TriangleLayers(t, scratch_of(t, pass, steps), std::move(steps)) {}
  TriangleLayers(const detail::TriangleUpdate& t, const Scratch& scratch, PairSteps steps)
      : TriangleLayout(t, kTriangleBackend, scratch.group),
        steps_(std::move(steps)),
        panel_bytes_(scratch.panels),
        norm_weight_(detail::norm_parameter(t.parameters[detail::kNormIn], t.x.scalar_type())),
        norm_bias_(detail::norm_parameter(t.parameters[detail::kNormIn + 1], t.x.scalar_type())) {}

  PairSteps steps_;
  int64_t panel_bytes_;
  std::optional<at::Tensor> norm_weight_, norm_bias_;
};

}  // namespace torchops::cuda
