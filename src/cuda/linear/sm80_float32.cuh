#pragma once

// From torch to the kernel of sm80/float32_kernel.cuh.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>

#include "cuda/base/device.h"
#include "cuda/gemm/sm80/float32_kernel.cuh"
#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/rule_tensors.h"
#include "cuda/linear/sm80_arguments.cuh"
#include "cuda/linear/sm80_launch.cuh"
#include "cuda/passes/channel_transpose.cuh"
#include "ops/kernel_path.h"

namespace torchops::cuda::gemm {

/// Whether tensor cores multiply split numbers faster than FFMAs multiply whole ones: they must take more than three
/// times as many of TF32 in the same time. They take eight times as many on compute capability 8.0 and 9.0, and as many
/// on 8.6, 8.9 and 12.0. kPortable is for what any of them can do.
inline bool splits_float32() {
  const cudaDeviceProp& device = device_properties();
  return (device.major == 8 || device.major == 9) && device.minor == 0 &&
         detail::kernel_path() != detail::KernelPath::kPortable;
}

template <class Rule, InChannels in_channels = InChannels::kNothing>
void launch_float32(const Sm80Arguments<float, Rule::kProducts>& p, const ChannelRows<float>& channels) {
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
  return dtype == at::kFloat && !element_of(dtype) && device_properties().major >= 8 && !is_refused(Family::kSm80);
}

/// Whether to compute such products, of m rows with k features, to n, by the kernel, if it can read them; if
/// `automatic`, only where it is faster.
inline bool wants_float32(at::ScalarType dtype, int64_t m, int64_t n, int64_t k, bool automatic) {
  return is_exact_float32(dtype) && plan(case_of(m, n, k, dtype), {.is_gated = true,
                                                                   .products = 2,
                                                                   .is_float32 = true,
                                                                   .splits_float32 = splits_float32(),
                                                                   .automatic = automatic})
                                        .has(Way::kSm80Float32);
}

/// Sets d and d2 of the arguments. Returns false if the kernel cannot write them.
template <int products>
bool set_float32_outputs(Sm80Arguments<float, products>& p, const RuleTensors& t) {
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
bool run_float32(const RuleTensors& t) {
  if (!is_exact_float32(t.a.scalar_type())) return false;
  auto p = full_arguments<float, Rule>(t);
  if (!p || !set_float32_outputs(*p, t)) return false;
  launch_float32<Rule>(*p, {});
  return true;
}

/// Whether the kernel reads and writes such channels.
inline bool are_float32_channels(const ChannelPanel<float>& of) {
  return operand(of.channels).has_value() && of.positions.padded % 4 == 0;
}
inline ChannelRows<float> float32_channels(const ChannelPanel<float>& of) {
  return {of.channels.mutable_data_ptr<float>(), of.channels.stride(0), of.positions, of.factors};
}

/// The same for a rule with two products whose output is in channels; t.d is not used.
template <class Rule>
bool run_float32_to_channels(const RuleTensors& t, const ChannelPanel<float>& to) {
  const auto p = full_arguments<float, Rule>(t);
  if (!p || !are_float32_channels(to)) return false;
  launch_float32<Rule, InChannels::kOutput>(*p, float32_channels(to));
  return true;
}

/// The same for cotangents of which that of the output is in channels; t.g is not used.
template <class Rule>
bool run_float32_from_channels(const RuleTensors& t, const ChannelPanel<float>& from) {
  auto p = full_arguments<float, Rule, /*reads_g=*/false>(t);
  if (!p || !are_float32_channels(from) || !set_float32_outputs(*p, t)) return false;
  launch_float32<Rule, InChannels::kCotangent>(*p, float32_channels(from));
  return true;
}

}  // namespace torchops::cuda::gemm
