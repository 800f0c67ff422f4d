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

/// What the choice depends on: the problem, its element type, and the number of multiprocessors.
struct Case {
  int64_t m, n, k, batch;
  Element element;
  int sm_count;

  int64_t rows(int tile_m) const { return (m + tile_m - 1) / tile_m; }
  int64_t columns(int tile_n) const { return (n + tile_n - 1) / tile_n; }
  int64_t tiles(int tile_m, int tile_n) const { return batch * rows(tile_m) * columns(tile_n); }
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

/// Ways to compute a rule (rules.cuh) of products.
enum class Way {
  kFewRows,          // linear/few_rows.cuh
  kResidentWeights,  // in sm90/, for few features
  kStreamedWeights,  // in sm90/, for any number of features
  kSplitFloat32,     // in sm90/, of split float32 numbers
  kSm80,             // linear/sm80.cuh
};

/// What the ways to compute a rule depend on, besides its Case.
struct Conditions {
  bool is_gated = false;          // a second product, or another matrix, multiplies
  int products = 1;               // of n columns each
  bool makes_cotangents = false;  // instead of the rule's value
  bool writes_products = false;   // too
  bool has_sm90 = false;          // the kernels of sm90/ can read and write the operands, on this device
  bool has_split_sm90 = false;    // and those of split float32 numbers
  bool is_float32 = false;        // of exact products
  bool splits_float32 = false;    // these are split products
  bool is_mixed = false;          // of operands in two dtypes
  bool automatic = false;         // measurements choose; otherwise, whatever can run is tried
};

/// Ways in the order in which they are to be tried. If none can run, cuBLAS multiplies, and a pass does the rest.
class Plan {
 public:
  void add(Way way) { ways_[count_++] = way; }
  bool has(Way way) const { return std::find(begin(), end(), way) != end(); }
  const Way* begin() const { return ways_.data(); }
  const Way* end() const { return ways_.data() + count_; }

 private:
  std::array<Way, 5> ways_{};
  size_t count_ = 0;
};

Plan plan(const Case& c, const Conditions& conditions);

/// Ways to compute all gradients of dense together: by a kernel for all of them; or by one for dx, which writes dz too,
/// and a product for dw.
enum class DenseGradientsWay { kOnePass, kInputGradients };

/// nullopt if this build has no kernel for it, or if `automatic` and a pass for dz and two products are faster.
std::optional<DenseGradientsWay> dense_gradients_way(const Case& c, bool automatic);

/// The tilings of sm80/kernel.cuh, by the outputs of a CTA.
enum class Sm80Tiling { k128x128, k128x64, k64x64, k64x32, k32x32 };

/// The tilings of sm80/resident.cuh, by the rows that a warp multiplies at a time; k16RowsAlone has all registers of a
/// multiprocessor for one CTA.
enum class ResidentTiling { k64Rows, k16Rows, k16RowsAlone };

/// What the kernels of linear/sm80.cuh compute of a Case, besides what is in Conditions.
struct Sm80Conditions {
  int products;
  bool is_gated, reads_factor, makes_cotangents, is_mixed, automatic;
  int load_vector, store_vector;  // how many elements of rows may be loaded, or stored and loaded as factors, at once
};

/// The tiling of sm80/resident.cuh, if there may be a kernel of it that is faster, and that of sm80/kernel.cuh, which
/// does not read operands in two dtypes.
struct Sm80Plan {
  std::optional<ResidentTiling> resident;
  Sm80Tiling tiling;
};

/// nullopt if cuBLAS and a pass over its result are faster.
std::optional<Sm80Plan> sm80_plan(const Case& c, const Sm80Conditions& conditions);

/// Whether sm90/products/split_float32.cuh is estimated to be faster than cuBLAS and, if the product `has_pass`, a pass
/// over its result.
bool prefers_split_sm90(const Case& c, bool has_pass);

/// A split product of longer sums, of which all parts are added in turn, would err more than cuBLAS.
constexpr int64_t kMostSplitColumns = 8192;

/// Whether cuBLAS and a pass over its result are faster than linear/sm80_float32.cuh, by FFMAs or, if it `splits`, by
/// TF32.
bool prefers_cublas_to_float32(int64_t m, int64_t n, int64_t k, bool splits);

}  // namespace torchops::cuda::gemm
