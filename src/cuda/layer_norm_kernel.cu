#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_layer_norm_backward_cuda_dispatch.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>

#include "cuda/base/column_sum.cuh"
#include "cuda/base/overwrite_rows.h"
#include "cuda/linear/layer_gradients.h"
#include "cuda/rows/launch.cuh"
#include "cuda/rows/launch_gradients.cuh"
#include "ops/common.h"
#include "ops/layer_norm.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Calls f(P()) for the type of the parameters beside elements of type T.
template <class T, class F>
auto with_parameter_type(bool are_float32, const F& f) {
  if constexpr (sizeof(T) == 2) {
    if (are_float32) return f(float());
  }
  return f(T());
}

// The variance is computed from the squared distances from the mean, not from the squares, so no digits cancel. P is
// the type of the parameters.
template <class T, class P>
struct LayerNorm {
  using A = Accumulate<T>;
  // Shared memory for x would shrink L1, and each long row would read weight and bias from L2.
  static constexpr int kStaged = 0, kParameters = 2, kReductions = 3;

  // The number of elements, their mean in two parts, which add up to more digits than A has, and the sum of their
  // squared distances from it.
  struct State {
    A count, mean, rest, squares;
  };

  Parameters<P, kParameters> parameters;  // weight and bias
  A* mean;                                // null, or one number per row, with moment_stride; like rstd
  A* rstd;
  int64_t moment_stride, rows;
  A columns, eps;

  template <class Row, class Group>
  __device__ State measure(const Row& row, Group& group) const {
    A sums[kChains] = {};
    row.for_each([&](A x, int i) { sums[i % kChains] += x; });
    A count = columns;
    if constexpr (!Group::kWholeRow) count = group.template reduce<0>(static_cast<A>(row.count()), Sum());
    const A sum = group.template reduce<1>(reduce_chains(sums, Sum()), Sum());
    const A inverse = count > 0 ? A{1} / count : A{0}, center = sum * inverse;
    // The rounding error of the mean: without it, the distances would add up to 0.
    A rests[kChains] = {}, squares[kChains] = {};
    row.for_each([&](A x, int i) {
      const A distance = x - center;
      rests[i % kChains] += distance;
      squares[i % kChains] += distance * distance;
    });
    const A rest = group.template reduce<2>(reduce_chains(rests, Sum()), Sum()) * inverse;
    const A square = group.template reduce<3>(reduce_chains(squares, Sum()), Sum()) - rest * rest * count;
    return {count, center, rest, square < 0 ? A{0} : square};
  }

  // Chan, Golub and LeVeque 1983.
  template <class Reduce>
  __device__ State pool(const State& part, const Reduce& reduce) const {
    const A count = reduce(part.count, Sum()), inverse = A{1} / count;
    const A mean = reduce(part.count * part.mean, Sum()) * inverse;
    const A distance = (part.mean - mean) + part.rest, weighted = part.count * distance;
    const A rest = reduce(weighted, Sum()) * inverse;
    const A square = reduce(part.squares + weighted * distance, Sum()) - rest * rest * count;
    return {count, mean, rest, square < 0 ? A{0} : square};
  }
  __device__ State nothing() const { return {}; }

  template <class Row, class Group>
  __device__ void write(const Row& row, const Group& group, const State& total) const {
    const A scale = rsqrt(total.squares / columns + eps), shift = -total.rest * scale;
    row.write(parameters, [&](auto& values, const auto& read) {
      constexpr int kSize = sizeof(values) / sizeof(A);
      A w[kSize], b[kSize];
      read(0, w);
      read(1, b);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = ((values[i] - total.mean) * scale + shift) * w[i] + b[i];
    });
    if (mean != nullptr && group.rank == 0 && group.row < rows) {
      mean[group.row * moment_stride] = total.mean + total.rest;
      rstd[group.row * moment_stride] = scale;
    }
  }
};

bool is_float32(const OptionalTensor& t) { return t && t->scalar_type() == at::kFloat; }

struct Affine {
  Tensor weight, bias;  // contiguous and of one dtype, or undefined
  bool are_float32;

  // Parameters in memory that will be overwritten are copied.
  Affine(const Tensor& x, const OptionalTensor& w, const OptionalTensor& b, bool in_place)
      : are_float32(is_float32(w) || is_float32(b)) {
    const auto prepare = [&](const OptionalTensor& parameter) {
      if (!parameter) return Tensor();
      const Tensor t = are_float32 ? parameter->to(at::kFloat) : *parameter;
      return in_place && detail::may_alias(x, t) ? t.clone(at::MemoryFormat::Contiguous) : t.contiguous();
    };
    weight = prepare(w);
    bias = prepare(b);
  }
};

// x and y are (rows, columns) with unit column stride; mean and rstd have one number per row, or are undefined.
void layer_norm_rows(const Tensor& x, const Tensor& y, const Affine& affine, double eps, const Tensor& mean,
                     const Tensor& rstd) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "layer_norm", [&] {
    using A = Accumulate<scalar_t>;
    const auto written = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr<A>() : nullptr; };
    with_parameter_type<scalar_t>(affine.are_float32, [&]<class P>(P) {
      const auto read = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<P>() : nullptr; };
      launch_rows(Rows<scalar_t>{x.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(), x.size(0), x.size(1),
                                 x.stride(0), y.stride(0)},
                  LayerNorm<scalar_t, P>{{{read(affine.weight), read(affine.bias)}, {P(1), P(0)}},
                                         written(mean),
                                         written(rstd),
                                         mean.defined() ? mean.stride(0) : 0,
                                         x.size(0),
                                         static_cast<A>(x.size(1)),
                                         static_cast<A>(eps)});
    });
  });
}

struct Moments {
  Tensor mean, rstd;

  Moments(const Tensor& x, at::IntArrayRef normalized_shape) {
    std::tie(mean, rstd) = detail::empty_moments(x, normalized_shape.size());
    // Without elements, mean and variance are 0 / 0.
    if (x.numel() == 0) {
      mean.fill_(std::numeric_limits<double>::quiet_NaN());
      rstd.fill_(std::numeric_limits<double>::quiet_NaN());
    }
  }
};

Tensor forward(const Tensor& x, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
               const OptionalTensor& bias, double eps, const Tensor& mean, const Tensor& rstd) {
  Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() == 0) return y;
  const auto dims = static_cast<int64_t>(normalized_shape.size());
  const Tensor rows = y.view({-1, c10::multiply_integers(normalized_shape)});
  const auto in = as_unit_rows(x, dims);
  if (!in) y.copy_(x);
  const auto flat = [](const Tensor& moment) { return moment.defined() ? moment.view({-1}) : moment; };
  layer_norm_rows(in.value_or(rows), rows, Affine(x, weight, bias, false), eps, flat(mean), flat(rstd));
  return y;
}

void overwrite(const Tensor& x, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
               const OptionalTensor& bias, double eps, detail::Operands operands) {
  if (x.numel() == 0) return;
  const Affine affine(x, weight, bias, true);
  overwrite_rows(operands, static_cast<int64_t>(normalized_shape.size()), [&](const detail::Operands& rows) {
    const bool moments = rows.size() > 1;
    layer_norm_rows(rows[0], rows[0], affine, eps, moments ? rows[1] : Tensor(), moments ? rows[2] : Tensor());
  });
}

Tensor layer_norm_cuda(const Tensor& x, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps) {
  check_layer_norm(x, c10::fromIntArrayRefSlow(normalized_shape), weight, bias);
  const c10::cuda::CUDAGuard on_device(x.device());
  return forward(x, normalized_shape, weight, bias, eps, Tensor(), Tensor());
}

void layer_norm_cuda_(Tensor& x, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps) {
  check_layer_norm_(x, c10::fromIntArrayRefSlow(normalized_shape), weight, bias);
  const c10::cuda::CUDAGuard on_device(x.device());
  overwrite(x, normalized_shape, weight, bias, eps, {x});
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_with_moments_cuda(const Tensor& x, at::IntArrayRef normalized_shape,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& bias, double eps) {
  check_layer_norm(x, c10::fromIntArrayRefSlow(normalized_shape), weight, bias);
  const c10::cuda::CUDAGuard on_device(x.device());
  const Moments moments(x, normalized_shape);
  return {forward(x, normalized_shape, weight, bias, eps, moments.mean, moments.rstd), moments.mean, moments.rstd};
}

std::tuple<Tensor, Tensor> layer_norm_with_moments_cuda_(Tensor& x, at::IntArrayRef normalized_shape,
                                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                                         double eps) {
  check_layer_norm_(x, c10::fromIntArrayRefSlow(normalized_shape), weight, bias);
  const c10::cuda::CUDAGuard on_device(x.device());
  const Moments moments(x, normalized_shape);
  overwrite(x, normalized_shape, weight, bias, eps, {x, moments.mean, moments.rstd});
  return {moments.mean, moments.rstd};
}

// dx = rstd * (w g - mean(w g) - xhat * mean(w g xhat)), xhat = (x - mean) * rstd; with kColumnSums = 2, also the sums
// of g xhat and of g over the rows: dweight and dbias.
template <class T, class P, int kSumsOfColumn>
struct LayerNormGradient {
  using A = Accumulate<T>;
  static constexpr int kSums = 2, kColumnSums = kSumsOfColumn;
  using Columns = Packed<P, kVectorSize<T>>;
  struct OfRow {
    A mean, rstd;
  };

  const P* weight;  // or null
  const A *mean, *rstd;
  A inverse_columns;

  __device__ Columns columns(int64_t column) const {
    Columns out;
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) out.at[i] = weight == nullptr ? P(1) : weight[column + i];
    return out;
  }
  __device__ OfRow of_row(int64_t row) const { return {mean[row], rstd[row]}; }

  template <int N, class Sums>
  __device__ void add(OfRow row, const Columns& weights, const A (&x)[N], const A (&grad)[N], A (&sums)[2],
                      Sums& column_sums) const {
    A w[N];
    unpack(weights, w);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A xhat = (x[i] - row.mean) * row.rstd, scaled = w[i] * grad[i];
      sums[0] += scaled;
      sums[1] += scaled * xhat;
      if constexpr (kColumnSums > 0) {
        column_sums[0][i] += grad[i] * xhat;
        column_sums[1][i] += grad[i];
      }
    }
  }

  template <int N>
  __device__ void gradient(OfRow row, const Columns& weights, const A (&x)[N], A (&grad)[N], const A (&sums)[2]) const {
    A w[N];
    unpack(weights, w);
    const A mean_grad = sums[0] * inverse_columns, mean_product = sums[1] * inverse_columns;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A xhat = (x[i] - row.mean) * row.rstd;
      grad[i] = row.rstd * (w[i] * grad[i] - mean_grad - xhat * mean_product);
    }
  }
};

// grad and x are (rows, columns) with unit column stride and aligned rows. Computes the gradients that are defined in
// `out`: dx (rows, columns), and in the type of the weight dweight and dbias (columns).
template <class T, class P, int kSumsOfColumn>
void layer_norm_row_gradients(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                              const Tensor& weight, const std::array<Tensor, 3>& out, const RowDivision& division) {
  using A = Accumulate<T>;
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor partial;
  if constexpr (kSumsOfColumn > 0) partial = at::empty({division.parts, kSumsOfColumn * columns}, mean.options());
  const bool reads_x = out[0].defined() || out[1].defined();
  launch_row_gradients(GradientRows<T>{reads_x ? x.const_data_ptr<T>() : nullptr, grad.const_data_ptr<T>(),
                                       out[0].defined() ? out[0].mutable_data_ptr<T>() : nullptr,
                                       partial.defined() ? partial.mutable_data_ptr<A>() : nullptr, rows, columns,
                                       x.stride(0), grad.stride(0), 1},
                       LayerNormGradient<T, P, kSumsOfColumn>{weight.defined() ? weight.const_data_ptr<P>() : nullptr,
                                                              mean.const_data_ptr<A>(), rstd.const_data_ptr<A>(),
                                                              A{1} / static_cast<A>(columns)},
                       division);
  if constexpr (kSumsOfColumn > 0) {
    const auto to = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr<P>() : nullptr; };
    launch_column_sum<P, A, std::min(4, kVectorSize<T>), 32, 32>(
        partial.const_data_ptr<A>(), to(out[1]), to(out[2]), division.parts, columns, kSumsOfColumn * columns,
        kSumsOfColumn * columns, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// Computes the gradients that are defined in `out`. Returns false, and computes nothing, if the kernel does not support
// these rows. dx may be `grad`: a thread only writes the elements of a row that it has read before.
bool gradients_by_rows(const std::array<Tensor, 3>& out, const Tensor& grad, const Tensor& x, const Tensor& mean,
                       const Tensor& rstd, const OptionalTensor& weight, int64_t dims) {
  const int64_t rows = mean.numel(), columns = x.numel() / rows;
  return with_element_type(x.scalar_type(), [&](auto element) {
    using scalar_t = decltype(element);
    const bool parameters = out[1].defined() || out[2].defined();
    const bool are_float32 = (weight || parameters) && detail::norm_gradient_dtype(x, weight) == at::kFloat;
    return with_parameter_type<scalar_t>(are_float32, [&]<class P>(P) {
      const auto division = parameters ? divide_rows<scalar_t, LayerNormGradient<scalar_t, P, 2>>(rows, columns)
                                       : divide_rows<scalar_t, LayerNormGradient<scalar_t, P, 0>>(rows, columns);
      if (!division) return false;
      const auto run = parameters ? layer_norm_row_gradients<scalar_t, P, 2> : layer_norm_row_gradients<scalar_t, P, 0>;
      run(vector_rows(grad, dims), vector_rows(x, dims), mean.contiguous(), rstd.contiguous(),
          weight ? weight->contiguous() : Tensor(), out, *division);
      return true;
    });
  });
}

// ATen takes the shape and dtype of the parameters' gradients from the parameters, so there have to be some. For more
// than 65536 rows, it writes beyond its memory unless the normalised shape has one dimension
// (https://github.com/pytorch/pytorch/pull/192016), and the gradient of the bias is empty if that of the weight is not
// wanted.
std::tuple<Tensor, Tensor, Tensor> gradients_by_aten(const Tensor& grad, const Tensor& x,
                                                     at::IntArrayRef normalized_shape, const Tensor& mean,
                                                     const Tensor& rstd, const OptionalTensor& weight,
                                                     std::array<bool, 3> output_mask) {
  if ((weight || output_mask[1] || output_mask[2]) && detail::norm_gradient_dtype(x, weight) != x.scalar_type()) {
    auto [dx, dweight, dbias] =
        gradients_by_aten(grad.to(at::kFloat), x.to(at::kFloat), normalized_shape, mean, rstd, weight, output_mask);
    return {output_mask[0] ? dx.to(x.scalar_type()) : dx, dweight, dbias};
  }
  const int64_t rows = mean.numel(), columns = c10::multiply_integers(normalized_shape);
  const auto matrix = [&](const Tensor& t, int64_t width) { return t.contiguous().view({rows, width}); };
  const bool parameters = output_mask[1] || output_mask[2];
  const OptionalTensor w = weight       ? OptionalTensor(weight->contiguous().view({columns}))
                           : parameters ? OptionalTensor(at::ones({columns}, x.options()))
                                        : std::nullopt;
  auto [dx, dweight, dbias] = at::cuda::native_layer_norm_backward(
      matrix(grad, columns), matrix(x, columns), at::IntArrayRef(columns), matrix(mean, 1), matrix(rstd, 1), w,
      /*bias=*/w, {output_mask[0], parameters, parameters});
  const auto shaped = [](bool wanted, const Tensor& t, at::IntArrayRef sizes) { return wanted ? t.view(sizes) : t; };
  return {shaped(output_mask[0], dx, x.sizes()), shaped(parameters, dweight, normalized_shape),
          shaped(parameters, dbias, normalized_shape)};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward_cuda(const Tensor& grad, const Tensor& x,
                                                            at::IntArrayRef normalized_shape, const Tensor& mean,
                                                            const Tensor& rstd, const OptionalTensor& weight,
                                                            std::array<bool, 3> output_mask) {
  detail::check_layer_norm_backward(grad, x, c10::fromIntArrayRefSlow(normalized_shape), mean, rstd, weight);
  const c10::cuda::CUDAGuard on_device(x.device());
  const at::TensorOptions of_parameters = x.options().dtype(detail::norm_gradient_dtype(x, weight));
  const auto where_wanted = [](bool wanted, const Tensor& t, const at::TensorOptions& options) {
    return wanted ? t : at::empty({0}, options);
  };
  const auto results = [&](const Tensor& dx, const Tensor& dweight, const Tensor& dbias) {
    return std::tuple(where_wanted(output_mask[0], dx, x.options()),
                      where_wanted(output_mask[1], dweight, of_parameters),
                      where_wanted(output_mask[2], dbias, of_parameters));
  };
  if (x.numel() > 0 && (output_mask[0] || output_mask[1] || output_mask[2])) {
    const auto empty_if = [](bool wanted, at::IntArrayRef sizes, const at::TensorOptions& options) {
      return wanted ? at::empty(sizes, options) : Tensor();
    };
    const std::array<Tensor, 3> out{empty_if(output_mask[0], x.sizes(), x.options()),
                                    empty_if(output_mask[1], normalized_shape, of_parameters),
                                    empty_if(output_mask[2], normalized_shape, of_parameters)};
    if (gradients_by_rows(out, grad, x, mean, rstd, weight, static_cast<int64_t>(normalized_shape.size()))) {
      return results(out[0], out[1], out[2]);
    }
  }
  const auto [dx, dweight, dbias] = gradients_by_aten(grad, x, normalized_shape, mean, rstd, weight, output_mask);
  return results(dx, dweight, dbias);
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("layer_norm", layer_norm_cuda);
  m.impl("layer_norm_", layer_norm_cuda_);
  m.impl("_layer_norm", layer_norm_with_moments_cuda);
  m.impl("_layer_norm_", layer_norm_with_moments_cuda_);
  m.impl("_layer_norm_backward", layer_norm_backward_cuda);
}

}  // namespace

void layer_norm_gradients(const std::array<Tensor, 3>& out, const Tensor& grad, const Tensor& x, const Tensor& mean,
                          const Tensor& rstd, const OptionalTensor& weight) {
  if (x.numel() == 0) {
    for (const Tensor& t : out) {
      if (t.defined()) t.zero_();
    }
    return;
  }
  if (gradients_by_rows(out, grad, x, mean, rstd, weight, 1)) return;
  const auto [dx, dweight, dbias] = gradients_by_aten(grad, x, {x.size(1)}, mean, rstd, weight,
                                                      {out[0].defined(), out[1].defined(), out[2].defined()});
  if (out[0].defined()) out[0].copy_(dx);
  if (out[1].defined()) out[1].copy_(dweight);
  if (out[2].defined()) out[2].copy_(dbias);
}

}  // namespace torchops::cuda
