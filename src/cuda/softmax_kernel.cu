#include <ATen/Dispatch.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_softmax_backward_data_cuda_dispatch.h>
#include <ATen/ops/_softmax_cuda_dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "cuda/base/overwrite_rows.h"
#include "cuda/rows/launch.cuh"
#include "cuda/rows/launch_pairs.cuh"
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
  static constexpr int kReductions = 1;
  struct State {
    A sum;
  };

  template <class Row, class Group>
  __device__ State measure(const Row& row, Group& group) const {
    A sums[kChains] = {};
    row.for_each([&](A y, A grad, int i) { sums[i % kChains] += grad * y; });
    return {group.template reduce<0>(reduce_chains(sums, Sum()), Sum())};
  }

  template <class Reduce>
  __device__ State pool(const State& part, const Reduce& reduce) const {
    return {reduce(part.sum, Sum())};
  }
  __device__ State nothing() const { return {0}; }

  template <class Row, class Group>
  __device__ void write(const Row& row, const Group&, const State& total) const {
    row.write([&](A y, A grad) { return y * (grad - total.sum); });
  }
};

// dx = y * (grad - sum(grad * y)) for the rows of dx, without gaps. Returns false, with nothing done, if they are too
// long for the kernel.
bool softmax_row_gradients(const Tensor& grad, const Tensor& y, const Tensor& dx) {
  bool done = false;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dx.scalar_type(), "softmax_backward", [&] {
    using Operator = SoftmaxGradient<scalar_t>;
    const int blocks = blocks_of_row_pair<scalar_t, Operator>(dx.size(1));
    if (blocks == 0) return;
    const auto like_dx = [&](const Tensor& t) {
      return aligned_rows(t, 1, reinterpret_cast<uintptr_t>(dx.const_data_ptr()),
                          dx.stride(0) * static_cast<int64_t>(sizeof(scalar_t)));
    };
    const Tensor y_rows = like_dx(y), grad_rows = like_dx(grad);
    launch_row_pairs(RowPairs<scalar_t>{y_rows.const_data_ptr<scalar_t>(), grad_rows.const_data_ptr<scalar_t>(),
                                        dx.mutable_data_ptr<scalar_t>(), dx.size(0), dx.size(1), y_rows.stride(0),
                                        grad_rows.stride(0), dx.stride(0)},
                     Operator(), blocks);
    done = true;
  });
  return done;
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
