#pragma once

// From torch to the kernels of sm80_kernel.cuh and sm80_resident.cuh.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "cuda/gemm/launch.h"
#include "cuda/gemm/sm80_float32.cuh"
#include "cuda/gemm/sm80_kernel.cuh"
#include "cuda/gemm/sm80_launch.cuh"
#include "cuda/gemm/sm80_resident.cuh"
#include "cuda/gemm/sm80_tensors.h"

namespace torchops::cuda::gemm {

/// Whether a matrix has contiguous rows, of any alignment, that may overlap; and an int has room for its extents and a
/// tile.
inline bool has_unit_columns(const at::Tensor& t) {
  constexpr int64_t most_extent = std::numeric_limits<int>::max() - 1024;
  return t.size(0) <= most_extent && t.size(1) <= most_extent && (t.stride(1) == 1 || t.size(1) == 1);
}

/// How many elements of 16 bits, up to 8, may be accessed at once at any multiple of that number in a row.
inline int row_vector(const void* data, int64_t stride) {
  const auto steps = reinterpret_cast<uintptr_t>(data) / 2 | static_cast<uintptr_t>(stride) | 8;
  return static_cast<int>(steps & ~(steps - 1));
}

template <class Rule, class T, Sm80Tiling tiling, int vector>
void launch_sm80_kernel(const Sm80Arguments<T, Rule::kProducts>& p) {
  constexpr Sm80Spec spec = kSm80Spec<tiling>;
  launch_tiles<sm80_kernel<Rule, T, tiling, vector>>(p, spec.tile_m, spec.tile_n, spec.shared_bytes(Rule::kProducts),
                                                     1);
}

/// Where there is no kernel for a tiling, a smaller one takes its place: two products don't fit the registers of the
/// largest, few of the others are compiled for rows that are not aligned to 16 bytes, and cotangents are for many rows.
template <class Rule, class T, int vector>
void launch_sm80_tiling(const Sm80Arguments<T, Rule::kProducts>& p, Sm80Tiling tiling) {
  using enum Sm80Tiling;
  constexpr bool aligned = vector == 8, single = Rule::kProducts == 1, gated = !single || Rule::kReadsC;
  constexpr bool few_outputs = !kMakesCotangents<Rule>;
  if constexpr (single && (aligned || !gated)) {
    if (tiling == k128x128) return launch_sm80_kernel<Rule, T, k128x128, vector>(p);
  }
  if constexpr (aligned) {
    if (tiling <= k128x64) return launch_sm80_kernel<Rule, T, k128x64, vector>(p);
  }
  if constexpr (aligned && few_outputs && single) {
    if (tiling == k64x32) return launch_sm80_kernel<Rule, T, k64x32, vector>(p);
  }
  if constexpr ((aligned && few_outputs) || !gated) {
    if (tiling > k64x64) return launch_sm80_kernel<Rule, T, k32x32, vector>(p);
  }
  launch_sm80_kernel<Rule, T, k64x64, vector>(p);
}

/// Returns false, with nothing done, if shared memory has no room for w, or the columns would leave more than a quarter
/// of the multiprocessors idle.
template <class Rule, class T, ResidentTiling tiling>
bool launch_resident_kernel(Sm80Arguments<T, Rule::kProducts> p) {
  constexpr ResidentSpec spec = kResidentSpec<tiling>;
  constexpr auto kernel = sm80_resident_kernel<Rule, T, tiling>;
  constexpr size_t reserved_bytes = 1024;  // of shared memory, by each CTA
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  const auto shared_bytes = static_cast<size_t>(spec.shared_bytes(static_cast<int>(ceil_div(p.k, kResidentStep))));
  if (shared_bytes > device.sharedMemPerBlockOptin) return false;
  static PerDevice granted;
  int multiprocessors = 0;
  C10_CUDA_CHECK(granted_multiprocessors(granted, kernel, device.sharedMemPerBlockOptin, multiprocessors));
  const auto fit = static_cast<int64_t>(device.sharedMemPerMultiprocessor / (shared_bytes + reserved_bytes));
  const int64_t ctas = std::min<int64_t>(spec.ctas, fit) * multiprocessors;
  p.tiles_n = static_cast<int>(ceil_div(p.n, spec.tile_n(Rule::kProducts)));
  const int64_t of_columns = ctas / p.tiles_n;
  if (of_columns * p.tiles_n * 4 < ctas * 3 || of_columns == 0) return false;
  const int64_t of_rows = ceil_div(p.m, spec.rows * spec.groups());
  kernel<<<static_cast<unsigned>(std::min(of_columns, of_rows) * p.tiles_n), kSm80Threads, shared_bytes,
           at::cuda::getCurrentCUDAStream()>>>(p);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

/// Returns false, with nothing done, if another kernel is faster, or there is no room for w.
template <class Rule, class T>
bool launch_resident(const Sm80Arguments<T, Rule::kProducts>& p, const Case& c) {
  using enum ResidentTiling;
  constexpr bool makes_cotangents = kMakesCotangents<Rule>;
  if constexpr (Rule::kReadsC && makes_cotangents) {
    return false;  // sm80_kernel.cuh is as fast: memory takes all the time
  } else {
    const std::optional<ResidentTiling> tiling = resident_tiling(c, Rule::kProducts, Rule::kReadsC, makes_cotangents);
    if (!tiling) return false;
    if constexpr (!Rule::kReadsC && !makes_cotangents) {
      if (tiling == k64Rows && launch_resident_kernel<Rule, T, k64Rows>(p)) return true;
    }
    // Less shared memory has room for one CTA. With as little on an H100, this took 0.45 to 0.89 of the time of
    // sm80_kernel.cuh (65536 and 524288 rows, 64 to 256 features).
    return launch_resident_kernel<Rule, T, k16Rows>(p);
  }
}

// Returns false, with nothing done, if there is no kernel for rows of this alignment.
template <class Rule, class T>
bool launch_sm80(const Sm80Tensors& t, const Case& of) {
  const auto read = [](const at::Tensor& from) { return static_cast<const T*>(from.const_data_ptr()); };
  // A single row may have any stride. The kernel computes aligned addresses with it, even of rows that it doesn't read.
  const auto stride = [](const at::Tensor& of) { return of.size(0) > 1 ? of.stride(0) : 0; };
  Sm80Arguments<T, Rule::kProducts> p{};
  p.m = static_cast<int>(t.d.size(0));
  p.n = static_cast<int>(t.d.size(1));
  p.k = static_cast<int>(t.a.size(1));
  p.a = read(t.a);
  p.a_stride = stride(t.a);
  p.d = static_cast<T*>(t.d.mutable_data_ptr());
  p.d_stride = stride(t.d);
  int vector = row_vector(p.a, p.a_stride);
  p.store_vector = std::min(row_vector(p.d, p.d_stride), row_vector(nullptr, p.n));
  if constexpr (Rule::kReadsC) {
    p.c = read(*t.c);
    p.c_stride = stride(*t.c);
    p.c_is_y = t.c_is_y;
    p.store_vector = std::min(p.store_vector, row_vector(p.c, p.c_stride));
  }
  if constexpr (kMakesCotangents<Rule>) {
    p.g = read(*t.g);
    p.g_stride = stride(*t.g);
    p.store_vector = std::min(p.store_vector, row_vector(p.g, p.g_stride));
    if (t.d2 != nullptr) {
      p.d2 = static_cast<T*>(t.d2->mutable_data_ptr());
      p.d2_stride = stride(*t.d2);
      p.store_vector = std::min(p.store_vector, row_vector(p.d2, p.d2_stride));
    }
  }
  if (p.store_vector == 4) p.store_vector = 2;
  for (int of = 0; of < Rule::kProducts; ++of) {
    const at::Tensor& b = of == 0 ? t.b : *t.b2;
    const std::optional<at::Tensor>& bias = of == 0 ? t.bias : *t.bias2;
    p.b[of] = read(b);
    p.b_stride[of] = stride(b);
    p.bias[of] = bias ? read(*bias) : nullptr;
    vector = std::min(vector, row_vector(p.b[of], p.b_stride[of]));
  }
  if (vector == 8 && p.store_vector == 8 && launch_resident<Rule, T>(p, of)) return true;
  const Sm80Tiling tiling = sm80_tiling(of);
  if constexpr (kMakesCotangents<Rule>) {
    if (vector < 8 || p.store_vector < 8) return false;
    launch_sm80_tiling<Rule, T, 8>(p, tiling);
  } else if (vector == 8) {
    launch_sm80_tiling<Rule, T, 8>(p, tiling);
  } else if (vector == 4) {
    launch_sm80_tiling<Rule, T, 4>(p, tiling);
  } else if (vector == 2) {
    launch_sm80_tiling<Rule, T, 2>(p, tiling);
  } else {
    launch_sm80_tiling<Rule, T, 1>(p, tiling);
  }
  return true;
}

/// d = rule(a @ b.T + bias, a @ b2.T + bias2, c) for rows of any alignment; d may be c. With CotangentsOf<rule>, d and
/// d2 are what its backward() makes of g, for rows aligned to 16 bytes; float32 rows always must be. Returns false,
/// with nothing done, if the elements are neither of 16 bits nor exact float32, if a tensor has no unit column stride
/// or no such rows, or if `automatic` and cuBLAS is faster.
template <class Rule>
bool run_sm80(const Sm80Tensors& t, bool automatic) {
  if (t.a.scalar_type() == at::kFloat) return run_float32<Rule>(t, automatic);
  constexpr bool gated = Rule::kProducts > 1 || Rule::kReadsC;
  const auto c = sm80_case(t.d.size(0), t.d.size(1), t.a.size(1), t.a.scalar_type());
  if (!c || c->k == 0 || !has_unit_columns(t.a) || !has_unit_columns(t.b) || !has_unit_columns(t.d) ||
      (t.b2 && !has_unit_columns(*t.b2)) || (t.c && !has_unit_columns(*t.c)) || (t.g && !has_unit_columns(*t.g)) ||
      (t.d2 && !has_unit_columns(*t.d2))) {
    return false;
  }
  if (automatic && (prefers_cublas_to_sm80(*c) || (gated && prefers_cublas_for_glu(*c)))) return false;
  return c->element == Element::kBFloat16 ? launch_sm80<Rule, c10::BFloat16>(t, *c)
                                          : launch_sm80<Rule, c10::Half>(t, *c);
}

}  // namespace torchops::cuda::gemm
