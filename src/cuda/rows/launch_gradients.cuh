#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>

#include <array>
#include <optional>

#include "cuda/base/device.h"
#include "cuda/base/overwrite_rows.h"
#include "cuda/rows/gradients.cuh"
#include "cuda/rows/launch.cuh"

// The host side of rows/gradients.cuh.
namespace torchops::cuda {

/// Calls f(T()), which returns whether it computed the gradients, for the element types with kernels here.
template <class F>
bool with_element_type(at::ScalarType dtype, const F& f) {
  switch (dtype) {
    case at::kFloat:
      return f(float());
    case at::kDouble:
      return f(double());
    case at::kHalf:
      return f(c10::Half());
    case at::kBFloat16:
      return f(c10::BFloat16());
    default:
      return false;
  }
}

/// Whether only rows that fit a warp have a kernel. Long rows of float64 are rare, and left to ATen: kernels for them
/// would take long to compile.
template <class T>
constexpr bool kShortRowsOnly = std::is_same_v<T, double>;

/// How rows are divided among threads and blocks.
struct RowDivision {
  enum class By { kLanes, kBlock, kCluster } by;
  int lanes, threads, cluster;
  int64_t parts;  // blocks or clusters of the grid, each with its own partial sums
};

template <class T, class Operator>
constexpr auto kClusterGradients = row_gradients_kernel<T, GradientCluster<Accumulate<T>, Operator::kSums>, Operator>;

/// The division of rows on the current device; nullopt if rows are too long, or not a whole number of vectors: loads of
/// single elements would be many more, and ATen's kernels handle them better. Which threads add up a row, and in which
/// order, only depends on its length.
template <class T, class Operator>
std::optional<RowDivision> divide_rows(int64_t rows, int64_t columns) {
  if (columns % kVectorSize<T> != 0) return std::nullopt;
  const cudaDeviceProp& device = device_properties();
  const int64_t processors = device.multiProcessorCount, vectors = columns / kVectorSize<T>;
  const auto blocks_that_fit = [&](int threads) {
    constexpr int64_t reserved = 2048;  // per block, by the system and for its own sums
    const int64_t bytes = int64_t{threads} * kGradientSharedBytes + reserved;
    if (bytes > static_cast<int64_t>(device.sharedMemPerBlockOptin)) return int64_t{0};
    return std::min<int64_t>(kGradientThreads / threads,
                             static_cast<int64_t>(device.sharedMemPerMultiprocessor) / bytes);
  };
  // Partial sums are written and read again, so a part has at least eight rows, unless multiprocessors would be idle.
  const auto parts = [&](int64_t resident, int64_t rows_at_once) {
    const int64_t most = ceil_div(rows, rows_at_once);
    if (Operator::kColumnSums == 0) return std::min(resident, most);
    return std::min({resident, most, std::max(processors, ceil_div(most, int64_t{8}))});
  };
  const auto power_of_two = [](int64_t least) {
    int64_t power = 1;
    while (power < least) power *= 2;
    return power;
  };
  if (vectors <= kWarp * kGradientVectors) {
    constexpr int threads = GradientLanes::kMaxThreads;
    const int64_t fit = blocks_that_fit(threads);
    if (fit == 0) return std::nullopt;
    // Neighbouring lanes read 128 bytes together, if rows are that long.
    const int64_t lanes =
        std::max(power_of_two(ceil_div(vectors, kGradientVectors)), std::min<int64_t>(8, power_of_two(vectors) / 2));
    return RowDivision{RowDivision::By::kLanes, static_cast<int>(lanes), threads, 1,
                       parts(fit * processors, threads / lanes)};
  }
  if constexpr (!kShortRowsOnly<T>) {
    const auto threads_of = [&](int blocks) { return threads_of_row(vectors, kGradientVectors, blocks); };
    if (const int threads = threads_of(1); threads <= kGradientThreads && blocks_that_fit(threads) > 0) {
      return RowDivision{RowDivision::By::kBlock, 1, threads, 1, parts(blocks_that_fit(threads) * processors, 1)};
    }
    static std::array<PerDevice, 4> caches;  // for 2, 4, 8 and 16 blocks
    size_t log_half = 0;
    while (threads_of(2 << log_half) > kGradientThreads && log_half < caches.size()) ++log_half;
    if (log_half == caches.size() || blocks_that_fit(kGradientThreads) == 0) return std::nullopt;
    const int cluster = 2 << log_half;
    static_assert(Cluster::kMaxBlocks == 16);
    int resident = 0;
    C10_CUDA_CHECK(caches[log_half].get(resident, [&](int& answer) {
      return query_clusters(kClusterGradients<T, Operator>, cluster, kGradientThreads,
                            kGradientThreads * kGradientSharedBytes, answer);
    }));
    if (resident == 0) return std::nullopt;
    return RowDivision{RowDivision::By::kCluster, 1, threads_of(cluster), cluster, std::min<int64_t>(resident, rows)};
  }
  return std::nullopt;
}

/// t (..., *trailing), not empty, as (rows, columns) whose rows can be read as vectors: a view if possible, otherwise a
/// copy.
inline at::Tensor vector_rows(const at::Tensor& t, int64_t trailing_dims) {
  return aligned_rows(t, trailing_dims, 0, 0);
}

/// Runs `op` on the current stream; `rows` is not empty.
template <class T, class Operator>
void launch_row_gradients(GradientRows<T> rows, const Operator& op, const RowDivision& division) {
  rows.lanes = division.lanes;
  const auto start = [&](auto kernel, PerDevice& cache, int most_threads) {
    int granted = 0;
    C10_CUDA_CHECK(cache.get(granted, [&](int& answer) {
      answer = 1;
      return allow_shared(kernel, most_threads * kGradientSharedBytes);
    }));
    launch_groups(kernel, division.parts * division.cluster, division.threads,
                  int64_t{division.threads} * kGradientSharedBytes, division.cluster, rows, op);
  };
  static std::array<PerDevice, 3> caches;
  if (division.by == RowDivision::By::kLanes) {
    return start(row_gradients_kernel<T, GradientLanes, Operator>, caches[0], GradientLanes::kMaxThreads);
  }
  if constexpr (!kShortRowsOnly<T>) {
    if (division.by == RowDivision::By::kCluster) {
      return start(kClusterGradients<T, Operator>, caches[2], kGradientThreads);
    }
    // The most that a block may have on this device, since the number of threads varies with the length of rows.
    const auto most = device_properties().sharedMemPerBlockOptin - 2048;
    start(row_gradients_kernel<T, GradientBlock, Operator>, caches[1],
          std::min<int>(kGradientThreads, static_cast<int>(most / kGradientSharedBytes)));
  }
}

}  // namespace torchops::cuda
