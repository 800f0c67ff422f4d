#include <ATen/Dispatch.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_softmax_backward_data_cuda_dispatch.h>
#include <ATen/ops/_softmax_cuda_dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/launch_row_gradients.cuh"
#include "cuda/launch_rows.cuh"
#include "cuda/overwrite_rows.h"
#include "ops/softmax.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

// The maximum, and the sum of exp(x - maximum). If all x are -inf, the sum is 0; with NaN, it is NaN.
template <class A>
struct Denominator {
  A max, sum;

  __device__ A shift() const { return max == Max::identity<A> ? A{0} : max; }
};

// The output computes the exponentials a second time, which is cheaper than keeping them in registers.
template <class T>
struct Softmax {
  using A = Accumulate<T>;
  using State = Denominator<A>;
  static constexpr int kStaged = 8;  // vectors per thread
  static constexpr int kParameters = 0, kReductions = 2;

  Parameters<T, kParameters> parameters;

  template <class Row, class Group>
  __device__ State measure(const Row& row, Group& group) const {
    A maxima[kChains], sums[kChains] = {};
    for (A& max : maxima) max = Max::identity<A>;
    row.for_each([&](A x, int i) { maxima[i % kChains] = Max()(maxima[i % kChains], x); });
    State total{group.template reduce<0>(reduce_chains(maxima, Max()), Max()), 0};
    const A shift = total.shift();
    row.for_each([&](A x, int i) { sums[i % kChains] += exp_nonpositive<T>(x - shift); });
    total.sum = group.template reduce<1>(reduce_chains(sums, Sum()), Sum());
    return total;
  }

  template <class Reduce>
  __device__ State pool(const State& part, const Reduce& reduce) const {
    State total{reduce(part.max, Max()), 0};
    total.sum = reduce(part.sum * exp_nonpositive<T>(part.max - total.shift()), Sum());
    return total;
  }
  __device__ State nothing() const { return {Max::identity<A>, 0}; }

  template <class Row, class Group>
  __device__ void write(const Row& row, const Group&, const State& total) const {
    const A shift = total.shift();
    // If all of a row is -inf, this is 0 / 0, as in ATen.
    row.write(parameters, [&](auto& values, const auto&) {
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

// dx = y * (g - sum(g * y))
template <class T>
struct SoftmaxGradient {
  using A = Accumulate<T>;
  static constexpr int kSums = 1, kColumnSums = 0;
  struct Columns {};
  struct OfRow {};

  __device__ Columns columns(int64_t) const { return {}; }
  __device__ OfRow of_row(int64_t) const { return {}; }

  template <int N, class Sums>
  __device__ void add(OfRow, Columns, const A (&y)[N], const A (&grad)[N], A (&sums)[1], Sums&) const {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[0] += grad[i] * y[i];
  }

  template <int N>
  __device__ void gradient(OfRow, Columns, const A (&y)[N], A (&grad)[N], const A (&sums)[1]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = y[i] * (grad[i] - sums[0]);
  }
};

// Returns false, and computes nothing, if the kernel does not support these rows.
bool softmax_row_gradients(const Tensor& grad, const Tensor& y, const Tensor& dx) {
  return with_element_type(y.scalar_type(), [&](auto element) {
    using scalar_t = decltype(element);
    using Operator = SoftmaxGradient<scalar_t>;
    const auto division = divide_rows<scalar_t, Operator>(dx.size(0), dx.size(1));
    if (!division) return false;
    const Tensor y_rows = vector_rows(y, 1), grad_rows = vector_rows(grad, 1);
    launch_row_gradients(GradientRows<scalar_t>{y_rows.const_data_ptr<scalar_t>(), grad_rows.const_data_ptr<scalar_t>(),
                                                dx.mutable_data_ptr<scalar_t>(), nullptr, dx.size(0), dx.size(1),
                                                y_rows.stride(0), grad_rows.stride(0), 1},
                         Operator(), *division);
    return true;
  });
}

Tensor softmax_backward_cuda(const Tensor& grad, const Tensor& y, int64_t dim) {
  detail::check_softmax_backward(grad, y, dim);
  const c10::cuda::CUDAGuard on_device(y.device());
  Tensor dx = at::empty(y.sizes(), y.options());
  if (dx.numel() == 0) return dx;
  const bool last = y.dim() > 0 && at::maybe_wrap_dim(dim, y.dim()) == y.dim() - 1;
  if (last && softmax_row_gradients(grad, y, dx.view({-1, y.size(-1)}))) return dx;
  at::cuda::_softmax_backward_data_out(dx, grad, y, dim, y.scalar_type());
  return dx;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("softmax", softmax_cuda);
  m.impl("softmax_", softmax_cuda_);
  m.impl("_softmax_backward", softmax_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
