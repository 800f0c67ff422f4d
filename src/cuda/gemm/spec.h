#pragma once

#include "cuda/gemm/problem.h"

/// What the library of the GEMM kernels shows, which is built with hidden visibility.
#define TORCHOPS_GEMM_API __attribute__((visibility("default")))

// table.def as enums and numbers. No torch, no CUTLASS.
namespace torchops::cuda::gemm {

enum class Element {
#define TORCHOPS_ELEMENT(name, type) name,
#include "cuda/gemm/table.def"
};

enum class Tiling {
#define TORCHOPS_TILING(name, ...) name,
#include "cuda/gemm/table.def"
};

enum class NarrowTiling {
#define TORCHOPS_NARROW_TILING(name, ...) name,
#include "cuda/gemm/table.def"
};

enum class GradientTiling {
#define TORCHOPS_GRADIENT_TILING(name, ...) name,
#include "cuda/gemm/table.def"
};

enum class AttentionTiling {
#define TORCHOPS_ATTENTION_TILING(name, ...) name,
#include "cuda/gemm/table.def"
};

/// With kPingPong, each of a CTA's two consumer warpgroups has its own tile, and the epilogue of one overlaps the
/// matrix instructions of the other; with kCooperative they share one tile.
enum class Schedule { kPingPong, kCooperative };

/// A CTA computes tile_m x tile_n of the output; cluster_m x cluster_n CTAs share what they load. The epilogue handles
/// epilogue_n columns (of 16 bits, or half as many of 32, but at least 32) at a time: more columns mean fewer barriers,
/// but less shared memory for loads. With resident_k, b stays in shared memory, and k is at most resident_k. The loads
/// have `stages` buffers; 0: as many as fit.
struct TilingSpec {
  int tile_m, tile_n, cluster_m, cluster_n;
  Schedule schedule;
  int epilogue_n, resident_k, stages;
};

/// A warpgroup computes rows x tile_n of the output; k is at most most_k. The loads have at most `stages` buffers, but
/// more in some kernels (see products/resident_weights.cuh).
struct NarrowSpec {
  int rows, tile_n, most_k, stages;
};

/// n and k are at most most_n and most_k; `consumers` warpgroups split n. With most_n = 0, n is any, and they split the
/// rows.
struct GradientSpec {
  int most_n, most_k, consumers;
};

/// A CTA computes `rows` rows of the same queries, 64 for each of its `warpgroups`, `keys` keys at a time, with heads
/// of up to d features.
struct AttentionSpec {
  int rows, keys, d, warpgroups, stages;
};

template <auto tiling>
inline constexpr int kSpec = 0;
#define TORCHOPS_TILING(name, families, elements, m, n, cluster_m, cluster_n, schedule, ...) \
  template <>                                                                                \
  inline constexpr TilingSpec kSpec<Tiling::name>{m, n, cluster_m, cluster_n, Schedule::schedule, __VA_ARGS__};
#define TORCHOPS_NARROW_TILING(name, families, elements, ...) \
  template <>                                                 \
  inline constexpr NarrowSpec kSpec<NarrowTiling::name>{__VA_ARGS__};
#define TORCHOPS_GRADIENT_TILING(name, families, elements, ...) \
  template <>                                                   \
  inline constexpr GradientSpec kSpec<GradientTiling::name>{__VA_ARGS__};
#define TORCHOPS_ATTENTION_TILING(name, families, elements, ...) \
  template <>                                                    \
  inline constexpr AttentionSpec kSpec<AttentionTiling::name>{__VA_ARGS__};
#include "cuda/gemm/table.def"

/// The operations, by name: the types of their problems and of their tilings.
#define TORCHOPS_OPERATION(name, problem, tiling, ...) \
  struct TORCHOPS_GEMM_API name {                      \
    using Problem = gemm::problem;                     \
    using Tiling = gemm::tiling;                       \
  };
#include "cuda/gemm/table.def"

/// The kernel of an operation for an element type and a tiling, or null if this build has none: for combinations that
/// table.def does not name, and for all of them in builds without code for compute capability 9.0.
template <class Operation>
TORCHOPS_GEMM_API const Kernel<typename Operation::Problem>* find(Element element, typename Operation::Tiling tiling);

/// Whether this build has GEMM kernels for compute capability 9.0.
TORCHOPS_GEMM_API bool has_sm90_kernels();

/// The two functions of a kernel. CMake writes translation units from unit.cu.in; each defines them for a few kernels.
template <class Operation, Element element, typename Operation::Tiling tiling>
Status prepare(const typename Operation::Problem& problem, int64_t& workspace_bytes);
template <class Operation, Element element, typename Operation::Tiling tiling>
Status run(const typename Operation::Problem& problem, cudaStream_t stream);

}  // namespace torchops::cuda::gemm
