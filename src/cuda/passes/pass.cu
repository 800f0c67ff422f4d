#include "cuda/base/column_sum.cuh"
#include "cuda/passes/pass.cuh"

// What is compiled once for all files that include pass.cuh.
namespace torchops::cuda {
namespace {

/// Sums the columns of a matrix.
template <class T, int N>
struct SumPass {
  static constexpr int kSums = 1;
  using Sum = Accumulate<T>;
  using Loaded = Packed<T, N>;
  MatrixRows<const T> from;

  __device__ Loaded load(int64_t row, int64_t column) const { return from.template load<N>(row, column); }
  __device__ void finish(int64_t, int64_t, const Loaded& loaded, Sum (&sums)[kSums][N]) const {
    Accumulate<T> values[N];
    unpack(loaded, values);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[0][i] += values[i];
  }
};

}  // namespace

void PassSums::finish(const at::Tensor& first, const at::Tensor& second) const {
  const at::Tensor& any = first.defined() ? first : second;
  if (!any.defined()) return;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, any.scalar_type(), "column_sums", [&] {
    using Sum = Accumulate<scalar_t>;
    const auto to = [](const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr<scalar_t>() : nullptr; };
    launch_column_sum<scalar_t, Sum, 1, 32, 32>(partial_.const_data_ptr<Sum>(), to(first), to(second), used_, columns_,
                                                kinds_ * columns_, kinds_ * columns_, at::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void sum_columns(const at::Tensor& sums, const at::Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  PassSums pass(true, matrix, 1, rows, rows, columns);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, matrix.scalar_type(), "sum_columns", [&] {
    const auto from = read_rows<scalar_t>(matrix);
    constexpr int n = kVectorSize<scalar_t>;
    const auto sum = [&](auto width, int64_t first, int64_t group) {
      return SumPass<scalar_t, width()>{from.part(first, group)};
    };
    pass.launch<n>(sum, rows, PassAccess::of<n>(columns, from));
  });
  pass.finish(sums);
}

}  // namespace torchops::cuda
