#pragma once

// From torch to the kernel of sm80_float32_kernel.cuh.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>

#include <optional>

#include "cuda/channels.cuh"
#include "cuda/gemm/launch.h"
#include "cuda/gemm/operand.h"
#include "cuda/gemm/sm80_float32_kernel.cuh"
#include "cuda/gemm/sm80_launch.cuh"
#include "cuda/gemm/sm80_tensors.h"
#include "ops/dense_path.h"

namespace torchops::cuda::gemm {

/// Whether tensor cores multiply split numbers faster than FFMAs multiply whole ones: they must take more than three
/// times as many of TF32 in the same time. They take eight times as many on compute capability 8.0 and 9.0, and as many
/// on 8.6, 8.9 and 12.0. kPortable is for what any of them can do.
inline bool splits_float32() {
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  return (device.major == 8 || device.major == 9) && device.minor == 0 &&
         detail::dense_path() != detail::DensePath::kPortable;
}

template <class Rule, InChannels in_channels = InChannels::kNothing>
void launch_float32(const Sm80Arguments<float, Rule::kProducts>& p, const Float32Channels& channels) {
  const auto launch = [&]<bool splits>() {
    const auto launch_tile = [&]<int warps_m>() {
      using Tile = Float32Tile<Rule::kProducts, warps_m>;
      launch_tiles<sm80_float32_kernel<Rule, splits, warps_m, in_channels>>(p, Tile::kRows, Tile::kColumns,
                                                                            Tile::kSharedBytes, 1, channels);
    };
    if constexpr (Rule::kProducts == 1) {
      if (p.n <= 64) return launch_tile.template operator()<8>();
    }
    launch_tile.template operator()<4>();
  };
  splits_float32() ? launch.template operator()<true>() : launch.template operator()<false>();
}

/// Whether products of a dtype are computed in float32, as torch's settings want, on a device that has the kernel.
inline bool is_exact_float32(at::ScalarType dtype) {
  return dtype == at::kFloat && !element_of(dtype) && at::cuda::getCurrentDeviceProperties()->major >= 8;
}

/// The arguments of the kernel but for the output, and the cotangent if that is in channels; nullopt if it cannot read
/// them.
template <class Rule, InChannels in_channels = InChannels::kNothing>
std::optional<Sm80Arguments<float, Rule::kProducts>> float32_arguments(const Sm80Tensors& t) {
  Sm80Arguments<float, Rule::kProducts> p{};
  const auto reads = [](const at::Tensor& from, const float*& data, int64_t& stride) {
    const auto of = operand(from);
    if (!of) return false;
    data = static_cast<const float*>(of->data);
    stride = of->row_stride;
    return true;
  };
  if (!reads(t.a, p.a, p.a_stride)) return std::nullopt;
  p.m = static_cast<int>(t.a.size(0));
  p.n = static_cast<int>(t.b.size(0));
  p.k = static_cast<int>(t.a.size(1));
  if (p.n % 4 != 0 || p.k == 0) return std::nullopt;
  for (int of = 0; of < Rule::kProducts; ++of) {
    const std::optional<at::Tensor>& bias = of == 0 ? t.bias : *t.bias2;
    if (!reads(of == 0 ? t.b : *t.b2, p.b[of], p.b_stride[of])) return std::nullopt;
    p.bias[of] = bias ? bias->const_data_ptr<float>() : nullptr;
  }
  if (Rule::kReadsC && !reads(*t.c, p.c, p.c_stride)) return std::nullopt;
  constexpr bool reads_g = kMakesCotangents<Rule> && in_channels != InChannels::kCotangent;
  if (reads_g && !reads(*t.g, p.g, p.g_stride)) return std::nullopt;
  return p;
}

/// Whether the kernel can read these weights of a rule with two products, and contiguous rows with as many features.
inline bool are_float32_weights(const at::Tensor& w, const at::Tensor& w2) {
  return w.size(0) % 4 == 0 && w.size(1) % 4 == 0 && operand(w) && operand(w2);
}

/// Whether to compute such products, of m rows with k features, to n, by the kernel, if it can read them; if
/// `automatic`, only where it is faster.
inline bool wants_float32(at::ScalarType dtype, int64_t m, int64_t n, int64_t k, bool automatic) {
  return is_exact_float32(dtype) && !(automatic && prefers_cublas_to_float32(m, n, k, splits_float32()));
}

/// Sets d and d2 of the arguments. Returns false if the kernel cannot write them.
template <int products>
bool set_float32_outputs(Sm80Arguments<float, products>& p, const Sm80Tensors& t) {
  const auto writes = [](const at::Tensor& to, float*& data, int64_t& stride) {
    const auto of = operand(to);
    if (!of) return false;
    data = to.mutable_data_ptr<float>();
    stride = of->row_stride;
    return true;
  };
  return writes(t.d, p.d, p.d_stride) && (!t.d2 || writes(*t.d2, p.d2, p.d2_stride));
}

/// What run_sm80() says, for float32. Rows must be aligned to 16 bytes, and the number of outputs a multiple of 4.
template <class Rule>
bool run_float32(const Sm80Tensors& t, bool automatic) {
  if (!wants_float32(t.a.scalar_type(), t.a.size(0), t.b.size(0), t.a.size(1), automatic)) return false;
  auto p = float32_arguments<Rule>(t);
  if (!p || !set_float32_outputs(*p, t)) return false;
  launch_float32<Rule>(*p, {});
  return true;
}

/// Whether the kernel reads and writes such channels.
inline bool are_float32_channels(const ChannelPanel<float>& of) {
  return operand(of.channels).has_value() && of.positions.padded % 4 == 0;
}
inline Float32Channels float32_channels(const ChannelPanel<float>& of) {
  return {of.channels.mutable_data_ptr<float>(), of.channels.stride(0), of.positions, of.factors};
}

/// The same for a rule with two products whose output is in channels; t.d is not used.
template <class Rule>
bool run_float32_to_channels(const Sm80Tensors& t, const ChannelPanel<float>& to) {
  const auto p = float32_arguments<Rule>(t);
  if (!p || !are_float32_channels(to)) return false;
  launch_float32<Rule, InChannels::kOutput>(*p, float32_channels(to));
  return true;
}

/// The same for cotangents of which that of the output is in channels; t.g is not used.
template <class Rule>
bool run_float32_from_channels(const Sm80Tensors& t, const ChannelPanel<float>& from) {
  auto p = float32_arguments<Rule, InChannels::kCotangent>(t);
  if (!p || !are_float32_channels(from) || !set_float32_outputs(*p, t)) return false;
  launch_float32<Rule, InChannels::kCotangent>(*p, float32_channels(from));
  return true;
}

}  // namespace torchops::cuda::gemm
