#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <span>

#include "cuda/gemm/spec.h"

// Chooses a kernel for a problem. Host code without torch or CUTLASS. Where no comment derives a limit, it comes from
// measurements on an H100.
namespace torchops::cuda::gemm {

/// What the choice depends on: the problem, its element type, and the device: the number of its multiprocessors, and
/// the bytes that large kernels read or write in a microsecond.
struct Case {
  int64_t m, n, k, batch;
  Element element;
  int sm_count;
  double bytes_per_us = 4e6;  // an H200's

  int64_t rows(int tile_m) const { return (m + tile_m - 1) / tile_m; }
  int64_t columns(int tile_n) const { return (n + tile_n - 1) / tile_n; }
  int64_t tiles(int tile_m, int tile_n) const { return batch * rows(tile_m) * columns(tile_n); }
  bool operator==(const Case&) const = default;
};

/// `tiling` for the cases that `suits` accepts. Rules are tried in order; a rule is skipped if this build lacks its
/// kernel or the kernel doesn't support the problem.
template <class Tiling>
struct Rule {
  bool (*suits)(const Case&);
  Tiling tiling;
};

/// The rules of an operation on compute capability 9.0.
template <class Operation>
std::span<const Rule<typename Operation::Tiling>> rules();

/// Calls f(kernel) for the kernels of this build that the operation's rules choose for such a case, until one returns
/// true. Whether one has.
template <class Operation, class F>
bool any_kernel(const Case& c, const F& f) {
  return std::ranges::any_of(rules<Operation>(), [&](const auto& rule) {
    const auto* const kernel = rule.suits(c) ? find<Operation>(c.element, rule.tiling) : nullptr;
    return kernel != nullptr && f(*kernel);
  });
}

/// Whether this build has such a kernel.
template <class Operation>
bool has_kernel(const Case& c) {
  return any_kernel<Operation>(c, [](const auto&) { return true; });
}

/// The tiling of attention for a Case of queries as m, keys as n, and the features of a head as k.
AttentionTiling attention_tiling(const Case& c);

/// Ways to compute all gradients of dense together: by a kernel for all of them; or by one for dx, which writes dz too,
/// and a product for dw.
enum class DenseGradientsWay { kOnePass, kInputGradients };

/// nullopt if this build has no kernel for it, or if `automatic` and a pass for dz and two products are faster.
std::optional<DenseGradientsWay> dense_gradients_way(const Case& c, bool automatic);

/// Whether sm90/products/split_float32.cuh is estimated to be faster than cuBLAS and, if the product `has_pass`, a pass
/// over its result.
bool prefers_split_sm90(const Case& c, bool has_pass);

/// A split product of longer sums, of which all parts are added in turn, would err more than cuBLAS.
constexpr int64_t kMostSplitColumns = 8192;

/// Whether cuBLAS and a pass over its result are estimated to be faster than linear/sm80_float32.cuh, by FFMAs or, if
/// it `splits`, by TF32, for so many products of a Case.
bool prefers_cublas_to_float32(const Case& c, int products, bool splits);

}  // namespace torchops::cuda::gemm
