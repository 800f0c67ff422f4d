#pragma once

#include "cuda/gemm/choose.h"

// Chooses among ways to compute what has more steps than the rules that plan.h orders candidates for. Host code without
// torch. Limits come from measurements on an H100.
namespace torchops::cuda::gemm {

/// Layers of 16-bit rows that may be copied to rows of whole pieces of 16 bytes first (linear/whole_vectors.h).
enum class CopiedLayer { kGate, kGateGradients, kGlu, kGluGradients };

/// Whether copies pay for a layer that has rows of other sizes, or unaligned ones. Without them, its kernels could load
/// `vector` elements at once.
bool copies_pay(CopiedLayer layer, const Case& c, int vector);

/// Ways to compute a product of matrices, or of batches of them.
enum class ProductWay { kSplit, kCublas, kCublasWithoutWorkspace };

/// `splits`: products are of split float32, unless cuBLAS is faster and `automatic`, or errs less.
ProductWay product_way(const Case& c, bool splits, bool automatic);

/// Which products of the gradients of glu are one with stacked weights, or cotangents, instead of two.
struct StackedProducts {
  bool of_inputs, of_weights;
};
StackedProducts stacked_products(const Case& c, bool is_exact_float32);

/// Whether the two products of glu, of this Case each, are faster as one with both weights, which are `adjacent` in
/// memory or have to be copied beside each other.
bool stacks_products(const Case& c, bool adjacent);

/// Whether rows that are to be overwritten by their product are copied and multiplied by cuBLAS faster than by the
/// kernel that needs no copy.
bool copies_overwritten_rows(const Case& c);

/// Whether the kernel of attention is faster than Triton's, by predicted times. `heads` are those of the whole batch; a
/// Case has queries as m, keys as n, and the features of a head as k.
bool attention_pays(const Case& c, int64_t heads, int64_t rows);

/// The most features or channels of a triangle update for kernels of one pass. With more, weights are streamed.
constexpr int kMostFeatures = 128;

/// The kernels that may compute the steps of a triangle update, in the order in which they are to be tried. If none can
/// run, layers do.
struct PairWays {
  bool streams = false, one_pass = false, sm80 = false;

  bool any() const { return streams || one_pass || sm80; }
};
PairWays pair_ways(int64_t c, int64_t d, bool has_sm90, bool has_sm80);

}  // namespace torchops::cuda::gemm
