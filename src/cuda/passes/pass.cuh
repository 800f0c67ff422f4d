#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <type_traits>

#include "cuda/base/activation.cuh"
#include "cuda/base/vector.cuh"

// An elementwise pass over matrices, which may also sum their columns: the step after a product.
namespace torchops::cuda {

constexpr int kPassBlock = 256;
// Rows that a thread has in flight: this many independent loads hide the latency of memory.
constexpr int kPassRows = 4;

/// A matrix with rows `stride` elements apart and contiguous columns.
template <class T>
struct MatrixRows {
  T* data;
  int64_t stride;

  template <int N>
  __device__ Packed<std::remove_const_t<T>, N> load(int64_t row, int64_t column) const {
    return cuda::load<std::remove_const_t<T>, N>(data + row * stride + column);
  }
  template <int N>
  __device__ void store(int64_t row, int64_t column, const Packed<T, N>& values) const {
    cuda::store<T, N>(data + row * stride + column, values);
  }
  /// From row `first` on, with `group` rows, which have no gaps between them, taken as one.
  MatrixRows part(int64_t first, int64_t group) const { return {data + first * stride, stride * group}; }

  bool begins_aligned(int64_t n) const {
    return reinterpret_cast<uintptr_t>(data) % (n * static_cast<int64_t>(sizeof(T))) == 0;
  }
  /// Whether all rows are aligned for vectors of N elements.
  bool fits(int64_t n) const { return stride % n == 0 && begins_aligned(n); }
};

/// How a pass may access its matrices, of `columns` columns.
struct PassAccess {
  bool in_vectors;  // all rows begin at multiples of N elements
  bool in_groups;   // N rows do, taken as one: no matrix has gaps, though a row is not whole vectors

  template <int N, class... T>
  static PassAccess of(int64_t columns, const MatrixRows<T>&... matrices) {
    return {columns % N == 0 && (matrices.fits(N) && ...),
            columns % N != 0 && ((matrices.data == nullptr || matrices.stride == columns) && ...) &&
                (matrices.begins_aligned(N) && ...)};
  }
};

/// What the block of this number does with its rows, N columns at a time:
///   Pass::Loaded load(int64_t row, int64_t column)
///   void finish(int64_t row, int64_t column, const Loaded&)
template <int N, class Pass>
__device__ inline void pass_block_rows(const Pass& pass, int64_t block, int64_t rows, int64_t columns) {
  const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * N;
  if (column >= columns) return;
  const int64_t first = block * blockDim.y * kPassRows + threadIdx.y;
  typename Pass::Loaded loaded[kPassRows];
#pragma unroll
  for (int i = 0; i < kPassRows; ++i) {
    const int64_t row = first + int64_t{i} * blockDim.y;
    if (row < rows) loaded[i] = pass.load(row, column);
  }
#pragma unroll
  for (int i = 0; i < kPassRows; ++i) {
    const int64_t row = first + int64_t{i} * blockDim.y;
    if (row < rows) pass.finish(row, column, loaded[i]);
  }
}

template <int N, class Pass>
__global__ void __launch_bounds__(kPassBlock) pass_kernel(Pass pass, int64_t rows, int64_t columns) {
  pass_block_rows<N>(pass, blockIdx.x, rows, columns);
}

/// The same for groups of N rows, taken as one, and in the blocks from group_blocks on, for the rows that are no whole
/// group: by themselves, these few would cost as much as a small pass.
template <int N, class Pass, class RestPass>
__global__ void __launch_bounds__(kPassBlock) grouped_pass_kernel(Pass pass, RestPass rest_pass, int64_t groups,
                                                                  int64_t rest, int64_t columns, int64_t group_blocks) {
  if (blockIdx.x < group_blocks) {
    pass_block_rows<N>(pass, blockIdx.x, groups, columns * N);
  } else {
    pass_block_rows<1>(rest_pass, blockIdx.x - group_blocks, rest, columns);
  }
}

/// Threads along the columns, each with N of them, and along the rows.
inline dim3 pass_block(int64_t columns, int n) {
  const int64_t vectors = ceil_div(columns, n);
  unsigned width = 1;
  while (width < kPassBlock && width < vectors) width *= 2;
  return {width, kPassBlock / width};
}

template <int N, class Pass>
void launch_pass(const Pass& pass, int64_t rows, int64_t columns) {
  const dim3 block = pass_block(columns, N);
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, int64_t{block.y} * kPassRows)),
                  static_cast<unsigned>(ceil_div(ceil_div(columns, N), block.x)));
  pass_kernel<N><<<grid, block, 0, at::cuda::getCurrentCUDAStream()>>>(pass, rows, columns);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// Launches pass(width, first, group), a pass for vectors of `width` from row `first` on, with `group` rows taken as
/// one, for all rows: with width N, and if neither rows nor groups of them are whole vectors, with 1.
template <int N, class MakePass>
void launch_widest(const MakePass& pass, int64_t rows, int64_t columns, const PassAccess& access) {
  constexpr std::integral_constant<int, N> wide;
  constexpr std::integral_constant<int, 1> narrow;
  if (rows == 0 || columns == 0) return;  // a grid has no fewer than one block
  if (access.in_vectors) return launch_pass<N>(pass(wide, 0, 1), rows, columns);
  const int64_t groups = access.in_groups ? rows / N : 0, done = groups * N;
  if (groups == 0) return launch_pass<1>(pass(narrow, 0, 1), rows, columns);
  // A group has as many vectors as a row has elements, so blocks have the same shape for both.
  const dim3 block = pass_block(columns, 1);
  const int64_t rows_of_block = int64_t{block.y} * kPassRows, group_blocks = ceil_div(groups, rows_of_block);
  const dim3 grid(static_cast<unsigned>(group_blocks + ceil_div(rows - done, rows_of_block)),
                  static_cast<unsigned>(ceil_div(columns, int64_t{block.x})));
  grouped_pass_kernel<N><<<grid, block, 0, at::cuda::getCurrentCUDAStream()>>>(
      pass(wide, 0, N), pass(narrow, done, 1), groups, rows - done, columns, group_blocks);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// What a block does with its rows, in a pass that also sums over rows, into Pass::kSums sums per column, of the type
/// Pass::Sum:
///   void finish(int64_t row, int64_t column, const Loaded&, Sum (&sums)[kSums][N])
/// A block has `rows_of_block` rows and writes its sums, side by side, to `partial`, unless that is null. If a row is a
/// group of N rows, it has all their columns, and adds those of one column up. The order of the additions depends only
/// on sizes. `shared` has kSums * N elements for each thread.
template <int N, bool kGroups, class Pass, class Sum = typename Pass::Sum>
__device__ inline void summing_pass_block(const Pass& pass, Sum* __restrict__ partial, Sum* shared, int64_t block,
                                          int64_t rows, int64_t columns, int64_t rows_of_block) {
  constexpr int kSums = Pass::kSums, kOfThread = kSums * N;
  const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * N;
  Sum sums[kSums][N] = {};
  if (column < columns) {
    const int64_t begin = block * rows_of_block;
    const int64_t end = begin + rows_of_block < rows ? begin + rows_of_block : rows;
    for (int64_t first = begin + threadIdx.y; first < end; first += int64_t{blockDim.y} * kPassRows) {
      typename Pass::Loaded loaded[kPassRows];
#pragma unroll
      for (int i = 0; i < kPassRows; ++i) {
        const int64_t row = first + int64_t{i} * blockDim.y;
        if (row < end) loaded[i] = pass.load(row, column);
      }
#pragma unroll
      for (int i = 0; i < kPassRows; ++i) {
        const int64_t row = first + int64_t{i} * blockDim.y;
        if (row < end) pass.finish(row, column, loaded[i], sums);
      }
    }
  }
  if (partial == nullptr) return;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) shared[thread * kOfThread + i] = sums[i / N][i % N];
  __syncthreads();
  if constexpr (kGroups) {
    const int sum_columns = static_cast<int>(columns) / N;
    if (thread >= sum_columns) return;
    for (int i = 0; i < kSums; ++i) {
      Sum sum{};
      for (int y = 0; y < static_cast<int>(blockDim.y); ++y) {
        for (int c = thread; c < columns; c += sum_columns) {
          sum += shared[(y * blockDim.x + c / N) * kOfThread + i * N + c % N];
        }
      }
      partial[i * sum_columns + thread] = sum;
    }
    return;
  }
  const int row_sums = static_cast<int>(blockDim.x) * kOfThread;
  for (int s = thread; s < row_sums; s += kPassBlock) {
    const int i = s % kOfThread;
    const int64_t to = (int64_t{blockIdx.y} * blockDim.x + s / kOfThread) * N + i % N;
    if (to >= columns) continue;
    Sum sum{};
    for (int y = 0; y < static_cast<int>(blockDim.y); ++y) sum += shared[y * row_sums + s];
    partial[i / N * columns + to] = sum;
  }
}

/// Blocks write their sums one after the other to `partial`.
template <int N, class Pass>
__global__ void __launch_bounds__(kPassBlock)
    summing_pass_kernel(Pass pass, typename Pass::Sum* __restrict__ partial, int64_t rows, int64_t columns,
                        int64_t rows_of_block) {
  __shared__ typename Pass::Sum shared[kPassBlock * Pass::kSums * N];
  auto* const to = partial == nullptr ? nullptr : partial + blockIdx.x * Pass::kSums * columns;
  summing_pass_block<N, false>(pass, to, shared, blockIdx.x, rows, columns, rows_of_block);
}

/// The same for groups of N rows, taken as one, and in the block after group_blocks, for the rows that are no whole
/// group. blockDim.x covers all columns.
template <int N, class Pass, class RestPass>
__global__ void __launch_bounds__(kPassBlock)
    grouped_summing_pass_kernel(Pass pass, RestPass rest_pass, typename Pass::Sum* __restrict__ partial, int64_t groups,
                                int64_t rest, int64_t columns, int64_t groups_of_block, int64_t group_blocks) {
  __shared__ typename Pass::Sum shared[kPassBlock * Pass::kSums * N];
  auto* const to = partial == nullptr ? nullptr : partial + blockIdx.x * Pass::kSums * columns;
  if (blockIdx.x < group_blocks) {
    summing_pass_block<N, true>(pass, to, shared, blockIdx.x, groups, columns * N, groups_of_block);
  } else {
    summing_pass_block<1, false>(rest_pass, to, shared, 0, rest, columns, rest);
  }
}

/// The sums of summing passes over the panels of rows of one matrix.
class PassSums {
 public:
  /// For matrices of the type and device of `like`. The largest panel has `most_rows` of the `rows`. Sums nothing
  /// unless `wanted`.
  PassSums(bool wanted, const at::Tensor& like, int kinds, int64_t rows, int64_t most_rows, int64_t columns)
      : kinds_(kinds), columns_(columns) {
    // At most about eight blocks for each multiprocessor of a large chip. Threads have many rows, so that sums are few,
    // unless that leaves fewer than two blocks for each; and as many as they can have in flight.
    constexpr int64_t most_blocks = 1056, few_blocks = 264;
    const int vector = kVectorBytes / static_cast<int>(like.element_size());
    const dim3 block = pass_block(columns, vector);
    const int64_t at_once = int64_t{kPassRows} * block.y;
    const int64_t blocks_rows = most_rows * ceil_div(columns, int64_t{vector} * block.x);  // of all columns
    rows_of_block_ = std::max(ceil_div(blocks_rows, most_blocks),
                              std::clamp(ceil_div(blocks_rows, few_blocks), at_once, 4 * at_once));
    rows_of_block_ = ceil_div(rows_of_block_, vector) * vector;  // whole groups
    if (!wanted) return;
    // One more for rows of a panel that are no whole group.
    const int64_t blocks = ceil_div(rows, most_rows) * (ceil_div(most_rows, rows_of_block_) + 1);
    const at::ScalarType wide = like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    partial_ = at::detail::empty_cuda({blocks, kinds * columns}, like.options().dtype(wide));
  }

  /// Runs the pass on a panel: the rows that follow those of the previous one. See launch_widest(). Groups are for few
  /// columns, so that a block has all of them.
  template <int N, class MakePass>
  void launch(const MakePass& pass, int64_t rows, const PassAccess& access) {
    constexpr std::integral_constant<int, N> wide;
    constexpr std::integral_constant<int, 1> narrow;
    if (rows == 0 || columns_ == 0) return;
    if (access.in_vectors) return launch_rows<N>(pass(wide, 0, 1), rows);
    const int64_t groups = access.in_groups && columns_ <= kPassBlock ? rows / N : 0, done = groups * N;
    if (groups == 0) return launch_rows<1>(pass(narrow, 0, 1), rows);
    const auto of_groups = pass(wide, 0, N);
    const int64_t groups_of_block = rows_of_block_ / N, group_blocks = ceil_div(groups, groups_of_block);
    const auto blocks = static_cast<unsigned>(group_blocks + (done < rows ? 1 : 0));
    grouped_summing_pass_kernel<N><<<blocks, pass_block(columns_, 1), 0, at::cuda::getCurrentCUDAStream()>>>(
        of_groups, pass(narrow, done, 1), next_sums(of_groups), groups, rows - done, columns_, groups_of_block,
        group_blocks);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    used_ += blocks;
  }

  /// The sums over all panels, rounded; the second kind goes to `second`. Undefined tensors are not written.
  void finish(const at::Tensor& first, const at::Tensor& second = {}) const;

 private:
  template <class Pass>
  typename Pass::Sum* next_sums(const Pass&) const {
    using Sum = typename Pass::Sum;
    return partial_.defined() ? partial_.mutable_data_ptr<Sum>() + used_ * kinds_ * columns_ : nullptr;
  }

  template <int N, class Pass>
  void launch_rows(const Pass& pass, int64_t rows) {
    const dim3 block = pass_block(columns_, N);
    const dim3 grid(static_cast<unsigned>(ceil_div(rows, rows_of_block_)),
                    static_cast<unsigned>(ceil_div(ceil_div(columns_, N), block.x)));
    summing_pass_kernel<N>
        <<<grid, block, 0, at::cuda::getCurrentCUDAStream()>>>(pass, next_sums(pass), rows, columns_, rows_of_block_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    used_ += grid.x;
  }

  int kinds_;
  int64_t columns_, rows_of_block_, used_ = 0;
  at::Tensor partial_;
};

template <class T>
MatrixRows<const T> read_rows(const at::Tensor& t) {
  return {t.const_data_ptr<T>(), t.stride(0)};
}
template <class T>
MatrixRows<T> write_rows(const at::Tensor& t) {
  return {t.mutable_data_ptr<T>(), t.stride(0)};
}

/// sums = the sums of the columns of a matrix, in one pass; they have its dtype, or are float32 if it has 16 bits.
void sum_columns(const at::Tensor& sums, const at::Tensor& matrix);

/// F(z) and its derivative, as exactly as elements of type T need.
template <class F, class T, class A>
__device__ inline A activate(A z, A& slope) {
  if constexpr (sizeof(T) == 2) {
    return F::template with_slope<Exactness::kFast>(F::kScale * z, slope);
  } else if constexpr (sizeof(T) == 4) {
    return F::template with_slope<Exactness::kExact>(z, slope);
  } else {
    const A y = F::value(z);
    slope = F::backward(A{1}, z, y);
    return y;
  }
}

/// The rows z * F(u), N columns at a time.
template <class F, class T, int N>
struct GluRows {
  MatrixRows<const T> z, u;

  struct Loaded {
    Packed<T, N> z, u;
  };

  __device__ Loaded load(int64_t row, int64_t column) const {
    return {z.template load<N>(row, column), u.template load<N>(row, column)};
  }
  __device__ void values(const Loaded& loaded, Accumulate<T> (&values)[N]) const {
    Accumulate<T> gates[N];
    unpack(loaded.z, values);
    unpack(loaded.u, gates);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= activate<F, T>(gates[i]);
  }
};

}  // namespace torchops::cuda
