#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/gemm/choose.h"

// The one choice among all ways to compute a rule (rules.cuh) of products. Host code without torch or CUTLASS.
namespace torchops::cuda::gemm {

enum class Way : uint8_t {
  kFewRows,          // linear/few_rows.cuh
  kResidentWeights,  // in sm90/, for few features; NarrowTiling
  kStreamedWeights,  // in sm90/, for any number of features; Tiling
  kSplitFloat32,     // in sm90/, of split float32 numbers
  kSm80,             // sm80/kernel.cuh; Sm80Tiling
  kSm80Resident,     // sm80/resident.cuh; ResidentTiling
  kSm80Float32,      // sm80/float32_kernel.cuh
};

/// The tilings of sm80/kernel.cuh, by the outputs of a CTA.
enum class Sm80Tiling { k128x128, k128x64, k64x64, k64x32, k32x32 };

/// The tilings of sm80/resident.cuh, by the rows that a warp multiplies at a time; k16RowsAlone has all registers of a
/// multiprocessor for one CTA.
enum class ResidentTiling { k64Rows, k16Rows, k16RowsAlone };

/// Which tilings are compiled. Two products don't fit the registers of the largest, few are compiled for rows that are
/// not `aligned` to 16 bytes, and cotangents are for many rows.
constexpr bool has_sm80_tiling(Sm80Tiling tiling, bool aligned, bool single, bool gated, bool makes_cotangents) {
  switch (tiling) {
    case Sm80Tiling::k128x128:
      return single && (aligned || !gated);
    case Sm80Tiling::k128x64:
      return aligned;
    case Sm80Tiling::k64x64:
      return true;
    case Sm80Tiling::k64x32:
      return aligned && single && !makes_cotangents;
    case Sm80Tiling::k32x32:
      return (aligned && !makes_cotangents) || !gated;
  }
  return false;
}

/// What the ways depend on, besides a Case.
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
  bool has_one_product = false;   // cuBLAS multiplies by both weights at once
  bool automatic = false;         // what is predicted to take longer than cuBLAS and a pass is left out
  // How many bytes of rows may be read of a and the weights, and of what has n columns, at once.
  int load_bytes = 16, store_bytes = 16;

  bool reads_factor() const { return is_gated && products == 1; }
  bool operator==(const Conditions&) const = default;
};

/// A way, and the number of its tiling.
struct Candidate {
  Way way;
  uint8_t tiling = 0;

  template <class T>
  T as() const {
    return static_cast<T>(tiling);
  }
};

/// Candidates in the order in which they are to be tried, the one that is predicted to be fastest first. If none can
/// run, cuBLAS multiplies, and a pass does the rest.
class Plan {
 public:
  static constexpr size_t kMost = 32;
  void add(Candidate candidate) {
    if (count_ < candidates_.size()) candidates_[count_++] = candidate;
  }
  bool has(Way way) const {
    return std::any_of(begin(), end(), [&](const Candidate& c) { return c.way == way; });
  }
  const Candidate* begin() const { return candidates_.data(); }
  const Candidate* end() const { return candidates_.data() + count_; }

 private:
  std::array<Candidate, kMost> candidates_{};
  size_t count_ = 0;
};

/// By the predictions of times.h, but products of float32 by those of choose_float32.cpp, and operands in two dtypes in
/// an order of their own, whatever cuBLAS would take. A thread remembers the plans
/// that it made lately; the reference is valid until it makes the next one.
const Plan& plan(const Case& c, const Conditions& conditions);

/// For measurements, of the calling thread: the only candidate of its plans, or none of them; and what computed its
/// last rule, nullopt for cuBLAS.
struct Measured {
  bool restricts = false;
  std::optional<Candidate> only, taken;
};
Measured& measured();

}  // namespace torchops::cuda::gemm
