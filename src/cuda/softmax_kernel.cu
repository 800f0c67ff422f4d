#include <ATen/Dispatch.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_softmax_cuda_dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/launch_rows.cuh"
#include "cuda/overwrite_rows.h"
#include "ops/softmax.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

// The maximum, and the sum of exp(x - maximum). Of -inf alone (or with NaN) the sum is that of exp(x) = 0 (NaN).
template <class A>
struct Denominator {
  A max, sum;

  __device__ A shift() const { return max == Max::identity<A> ? A{0} : max; }
};

template <class T>
struct Together {
  using State = Denominator<Accumulate<T>>;

  __device__ State operator()(const State& a, const State& b) const {
    State both{Max()(a.max, b.max), 0};
    both.sum = a.sum * exp_nonpositive<T>(a.max - both.shift()) + b.sum * exp_nonpositive<T>(b.max - both.shift());
    return both;
  }
};

// The exponentials are computed a second time for the output: that is cheaper than registers for them.
template <class T>
struct Softmax {
  static constexpr int kStaged = 8;  // vectors a thread

  template <class Row, class Group>
  __device__ void operator()(const Row& row, Group& group) const {
    using A = Accumulate<T>;
    Denominator<A> total{Max::identity<A>, 0};
    row.for_each([&](A x, int) { total.max = Max()(total.max, x); });
    total.max = group.template reduce<0>(total.max, Max());
    A shift = total.shift();
    // Four sums make shorter chains of roundings, where those show.
    constexpr int kSums = std::is_same_v<T, float> ? 4 : 1;
    A sums[kSums] = {};
    row.for_each([&](A x, int i) { sums[i % kSums] += exp_nonpositive<T>(x - shift); });
#pragma unroll
    for (int i = 0; i < kSums; ++i) total.sum += sums[i];
    total.sum = group.template reduce<1>(total.sum, Sum());
    total = group.merge(total, Together<T>());
    shift = total.shift();
    // A row of -inf alone is 0 / 0, as in ATen.
    row.write([&](auto& values, int64_t) {
      for (A& value : values) value = divide<T>(exp_nonpositive<T>(value - shift), total.sum);
    });
  }
};

// y and x are (rows, columns) with unit column stride.
void softmax_rows(const Tensor& x, const Tensor& y) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softmax", [&] {
    launch_rows(Rows<scalar_t>{x.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(), x.size(0), x.size(1),
                               x.stride(0), y.stride(0)},
                Softmax<scalar_t>());
  });
}

Tensor softmax_cuda(const Tensor& x, int64_t dim) {
  check_softmax(x, dim);
  const c10::cuda::CUDAGuard on_device(x.device());
  Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() == 0) return y;
  if (at::maybe_wrap_dim(dim, x.dim()) != std::max<int64_t>(x.dim() - 1, 0)) {
    at::cuda::_softmax_out(y, x, dim, /*half_to_float=*/false);
    return y;
  }
  const int64_t columns = x.dim() == 0 ? 1 : x.size(-1);
  const Tensor rows = y.view({-1, columns});
  const auto in = as_unit_rows(x, std::min<int64_t>(x.dim(), 1));
  if (!in) y.copy_(x);
  softmax_rows(in.value_or(rows), rows);
  return y;
}

void softmax_cuda_(Tensor& x, int64_t dim) {
  check_softmax_(x, dim);
  const c10::cuda::CUDAGuard on_device(x.device());
  if (x.numel() == 0) return;
  const Tensor lines = x.dim() == 0 ? x.view({1, 1}) : x.movedim(dim, -1);
  overwrite_rows({lines}, 1, [](const detail::Operands& rows) { softmax_rows(rows[0], rows[0]); });
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("softmax", softmax_cuda);
  m.impl("softmax_", softmax_cuda_);
}

}  // namespace
}  // namespace torchops::cuda
