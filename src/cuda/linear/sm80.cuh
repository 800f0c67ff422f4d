#pragma once

// From torch to the kernels of sm80/kernel.cuh and sm80/resident.cuh.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "cuda/base/device.h"
#include "cuda/gemm/sm80/kernel.cuh"
#include "cuda/gemm/sm80/resident.cuh"
#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/rule_tensors.h"
#include "cuda/linear/sm80_float32.cuh"
#include "cuda/linear/sm80_launch.cuh"

namespace torchops::cuda::gemm {

/// Whether a matrix has contiguous rows, of any alignment, that may overlap; and an int has room for its extents and a
/// tile.
inline bool has_unit_columns(const at::Tensor& t) {
  return t.size(0) <= kMostExtent && t.size(1) <= kMostExtent && (t.stride(1) == 1 || t.size(1) == 1);
}

template <class Rule, class T, Sm80Tiling tiling, int vector>
void launch_sm80_kernel(const Sm80Arguments<T, Rule::kProducts>& p) {
  constexpr Sm80Spec spec = kSm80Spec<tiling>;
  static_assert(spec.shared_bytes(Rule::kProducts) <= kLeastSharedBytes);
  launch_tiles<sm80_kernel<Rule, T, tiling, vector>>(p, spec.tile_m, spec.tile_n, spec.shared_bytes(Rule::kProducts),
                                                     1);
}

/// Returns false if that tiling is not compiled.
template <class Rule, class T, int vector>
bool launch_sm80_tiling(const Sm80Arguments<T, Rule::kProducts>& p, Sm80Tiling tiling) {
  const auto launch = [&]<Sm80Tiling of>() {
    if constexpr (has_sm80_tiling(of, vector == 8, Rule::kProducts == 1, kIsGated<Rule>, kMakesCotangents<Rule>)) {
      if (tiling == of) launch_sm80_kernel<Rule, T, of, vector>(p);
      return tiling == of;
    } else {
      return false;
    }
  };
  using enum Sm80Tiling;
  return launch.template operator()<k128x128>() || launch.template operator()<k128x64>() ||
         launch.template operator()<k64x64>() || launch.template operator()<k64x32>() ||
         launch.template operator()<k32x32>();
}

/// Returns false, with nothing done, if shared memory has no room for w, or the columns would leave more than a quarter
/// of the multiprocessors idle.
template <class Rule, class T, ResidentTiling tiling, class X, class V>
bool launch_resident_kernel(ResidentArguments<Rule, T, X, V> p) {
  constexpr ResidentSpec spec = kResidentSpec<tiling>;
  constexpr auto kernel = sm80_resident_kernel<Rule, T, tiling, X, V>;
  constexpr size_t reserved_bytes = 1024;  // of shared memory, by each CTA
  const cudaDeviceProp& device = device_properties();
  const auto shared_bytes = static_cast<size_t>(spec.shared_bytes(p.k));
  if (shared_bytes > device.sharedMemPerBlockOptin) return false;
  static PerDevice granted;
  int multiprocessors = 0;
  begin_launch(Family::kSm80);
  check_launch(Family::kSm80, granted_multiprocessors(granted, kernel, device.sharedMemPerBlockOptin, multiprocessors));
  const auto fit = static_cast<int64_t>(device.sharedMemPerMultiprocessor / (shared_bytes + reserved_bytes));
  const int64_t ctas = std::min<int64_t>(spec.ctas, fit) * multiprocessors;
  p.tiles_n = static_cast<int>(ceil_div(p.n, spec.tile_n(Rule::kProducts)));
  const int64_t of_columns = ctas / p.tiles_n;
  if (of_columns * p.tiles_n * 4 < ctas * 3 || of_columns == 0) return false;
  const int64_t of_rows = ceil_div(p.m, spec.rows * spec.groups());
  kernel<<<static_cast<unsigned>(std::min(of_columns, of_rows) * p.tiles_n), kSm80Threads, shared_bytes,
           at::cuda::getCurrentCUDAStream()>>>(p);
  check_launch(Family::kSm80, cudaGetLastError());
  return true;
}

/// Returns false, with nothing done, if there is no kernel or no room for w.
template <class Rule, class T, class X, class V>
bool launch_resident(const ResidentArguments<Rule, T, X, V>& p, ResidentTiling tiling) {
  using enum ResidentTiling;
  constexpr bool mixed = !std::is_same_v<X, T> || !std::is_same_v<V, T>, makes_cotangents = kMakesCotangents<Rule>;
  if constexpr (Rule::kReadsC && makes_cotangents && !mixed) {
    return false;
  } else {
    if constexpr (!Rule::kReadsC && !makes_cotangents) {
      if (tiling == k64Rows) return launch_resident_kernel<Rule, T, k64Rows, X, V>(p);
    }
    constexpr ResidentTiling small =
        Rule::kReadsC && makes_cotangents && std::is_same_v<V, float> ? k16RowsAlone : k16Rows;
    return launch_resident_kernel<Rule, T, small, X, V>(p);
  }
}

/// The arguments, and how many neighbouring elements of rows of a and of b may be read at once.
template <class Rule, class T, class X, class V>
struct AlignedArguments {
  ResidentArguments<Rule, T, X, V> p{};
  int a_vector = 0, b_vector = kVectorSize<T>;
};

template <class Rule, class T, class X = T, class V = T>
AlignedArguments<Rule, T, X, V> aligned_arguments(const RuleTensors& t) {
  AlignedArguments<Rule, T, X, V> of;
  auto& p = of.p;
  p.m = static_cast<int>(t.d.size(0));
  p.n = static_cast<int>(t.d.size(1));
  p.k = static_cast<int>(t.a.size(1));
  // A single row may have any stride. The kernel computes aligned addresses with it, even of rows that it doesn't read.
  const auto vector = [](const auto* data, const at::Tensor& rows, int64_t& stride) {
    stride = rows.size(0) > 1 ? rows.stride(0) : 0;
    return row_vector(data, stride);
  };
  const auto reads = [&]<class E>(const at::Tensor& from, const E*& data, int64_t& stride) {
    return vector(data = static_cast<const E*>(from.const_data_ptr()), from, stride);
  };
  const auto writes = [&]<class E>(const at::Tensor& to, E*& data, int64_t& stride) {
    return vector(data = static_cast<E*>(to.mutable_data_ptr()), to, stride);
  };
  of.a_vector = reads(t.a, p.a, p.a_stride);
  for (int i = 0; i < Rule::kProducts; ++i) {
    const std::optional<at::Tensor>& bias = i == 0 ? t.bias : *t.bias2;
    of.b_vector = std::min(of.b_vector, reads(i == 0 ? t.b : *t.b2, p.b[i], p.b_stride[i]));
    p.bias[i] = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  }
  p.store_vector = std::min({kVectorSize<V>, writes(t.d, p.d, p.d_stride), row_vector<T>(nullptr, p.n)});
  if constexpr (Rule::kReadsC) {
    p.store_vector = std::min(p.store_vector, reads(*t.c, p.c, p.c_stride));
    p.c_is_y = t.c_is_y;
  }
  if constexpr (kMakesCotangents<Rule>) {
    p.store_vector = std::min(p.store_vector, reads(*t.g, p.g, p.g_stride));
    if (t.d2 != nullptr) p.store_vector = std::min(p.store_vector, writes(*t.d2, p.d2, p.d2_stride));
  }
  return of;
}

// Returns false, with nothing done, if there is no such kernel for rows of this alignment.
template <class Rule, class T>
bool launch_sm80(const RuleTensors& t, const Candidate& candidate) {
  auto [p, a_vector, b_vector] = aligned_arguments<Rule, T>(t);
  const int vector = std::min(a_vector, b_vector);
  if (candidate.way == Way::kSm80Resident) {
    return vector == 8 && p.store_vector == 8 && launch_resident<Rule, T, T, T>(p, candidate.as<ResidentTiling>());
  }
  if (p.store_vector == 4) p.store_vector = 2;
  const Sm80Tiling tiling = candidate.as<Sm80Tiling>();
  if constexpr (kMakesCotangents<Rule>) {
    return vector == 8 && p.store_vector == 8 && launch_sm80_tiling<Rule, T, 8>(p, tiling);
  } else if (vector == 8) {
    return launch_sm80_tiling<Rule, T, 8>(p, tiling);
  } else if (vector == 4) {
    return launch_sm80_tiling<Rule, T, 4>(p, tiling);
  } else if (vector == 2) {
    return launch_sm80_tiling<Rule, T, 2>(p, tiling);
  } else {
    return launch_sm80_tiling<Rule, T, 1>(p, tiling);
  }
}

// The same where a, or c and the output, are float32; a is rounded to T as it is read.
template <class Rule, class T>
bool launch_mixed(const RuleTensors& t, const Candidate& candidate) {
  const auto launch = [&]<class X, class V>() {
    const auto [p, a_vector, b_vector] = aligned_arguments<Rule, T, X, V>(t);
    constexpr int least_b_vector = std::is_same_v<X, float> ? 2 : kVectorSize<T>;
    return candidate.way == Way::kSm80Resident && a_vector == kVectorSize<X> && b_vector >= least_b_vector &&
           p.store_vector == kVectorSize<V> && launch_resident<Rule, T, X, V>(p, candidate.as<ResidentTiling>());
  };
  if constexpr (Rule::kReadsC) {
    if (t.a.scalar_type() != at::kFloat) return launch.template operator()<T, float>();
    if (t.c->scalar_type() == at::kFloat) return launch.template operator()<float, float>();
  }
  return launch.template operator()<float, T>();
}

/// d = rule(a @ b.T + bias, a @ b2.T + bias2, c) for rows of any alignment; d may be c. With CotangentsOf<rule>, d and
/// d2 are what its backward() makes of g, for rows aligned to 16 bytes, as rows of float32 always must be. With b of 16
/// bits, a, or c and the output, may be float32; see sm80_resident_kernel() for what is beside it. Returns false, with
/// nothing done, if the elements are neither of 16 bits nor exact float32, or if the candidate has no kernel for such
/// rows.
template <class Rule>
bool run_sm80(const RuleTensors& t, const Candidate& candidate) {
  if (candidate.way == Way::kSm80Float32) return run_float32<Rule>(t);
  constexpr bool gated = kIsGated<Rule>;
  const auto c = sm80_case(t.d.size(0), t.d.size(1), t.a.size(1), t.b.scalar_type());
  if (!c || c->k == 0 || !has_unit_columns(t.a) || !has_unit_columns(t.b) || !has_unit_columns(t.d) ||
      (t.b2 && !has_unit_columns(*t.b2)) || (t.c && !has_unit_columns(*t.c)) || (t.g && !has_unit_columns(*t.g)) ||
      (t.d2 && !has_unit_columns(*t.d2))) {
    return false;
  }
  if constexpr (gated) {
    if (t.a.scalar_type() != t.b.scalar_type() || (t.c && t.c->scalar_type() != t.b.scalar_type())) {
      return c->element == Element::kBFloat16 ? launch_mixed<Rule, c10::BFloat16>(t, candidate)
                                              : launch_mixed<Rule, c10::Half>(t, candidate);
    }
  }
  return c->element == Element::kBFloat16 ? launch_sm80<Rule, c10::BFloat16>(t, candidate)
                                          : launch_sm80<Rule, c10::Half>(t, candidate);
}

}  // namespace torchops::cuda::gemm
