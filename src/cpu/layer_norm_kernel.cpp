#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorGeometry.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_layer_norm_cpu_dispatch.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/capability.h"
#include "cpu/layer_norm.h"
#include "cpu/layer_norm_vector.h"
#include "cpu/panels.h"
#include "ops/common.h"
#include "ops/layer_norm.h"

namespace torchops::cpu {
namespace {

using OptionalTensor = std::optional<Tensor>;

// If x has no elements, mean and variance are 0 / 0.
std::tuple<Tensor, Tensor> moments_of_nothing(const Tensor& x, size_t trailing_dims) {
  const auto [mean, rstd] = detail::empty_moments(x, trailing_dims);
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  return {mean.fill_(nan), rstd.fill_(nan)};
}

// Weight and bias as the routine reads them: in the dtype of x, or else both in that of the moments.
struct AffineRow {
  OptionalTensor weight, bias;
  bool narrow;

  AffineRow(const Tensor& x, const OptionalTensor& w, const OptionalTensor& b) {
    const auto is_narrow = [&](const OptionalTensor& t) { return !t || t->scalar_type() == x.scalar_type(); };
    narrow = is_narrow(w) && is_narrow(b);
    const at::ScalarType dtype = narrow ? x.scalar_type() : detail::moments_dtype(x.scalar_type());
    const auto row = [&](const OptionalTensor& t) {
      return t ? OptionalTensor((t->scalar_type() == dtype ? *t : t->to(dtype)).contiguous()) : t;
    };
    weight = row(w);
    bias = row(b);
  }
};

// y = the layer norm of rows, which may be x; both are matrices (rows, *normalized_shape) whose rows are contiguous.
void normalize(const Tensor& y, const Tensor& x, const AffineRow& affine, double eps, const Tensor& mean,
               const Tensor& rstd) {
  const int64_t count = x.size(0), columns = x.numel() / count;
  const auto pointer = [](const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; };
  const LayerNormRows rows{x.const_data_ptr(),
                           y.mutable_data_ptr(),
                           pointer(affine.weight),
                           pointer(affine.bias),
                           affine.narrow,
                           mean.mutable_data_ptr(),
                           rstd.mutable_data_ptr(),
                           columns,
                           x.stride(0),
                           y.stride(0),
                           mean.stride(0),
                           rstd.stride(0),
                           eps};
  const LayerNormRoutine routine = TORCHOPS_FOR_THIS_PROCESSOR(find_layer_norm_routine)(x.scalar_type());
  constexpr int64_t grain = 8192;  // elements: a quarter of ATen's for one pointwise pass
  at::parallel_for(0, count, std::max(grain / columns, int64_t{1}),
                   [&](int64_t begin, int64_t end) { routine(rows, begin, end); });
}

// Whether each row of a matrix (rows, *normalized_shape) is contiguous.
bool has_contiguous_rows(const Tensor& x, int64_t trailing_dims) {
  return at::geometry_is_contiguous(x.sizes().slice(x.dim() - trailing_dims),
                                    x.strides().slice(x.dim() - trailing_dims));
}

// A row that is longer than a thread's scratch is the work of all threads, and ATen's where it is not overwritten.
bool has_long_rows(const Tensor& x, at::IntArrayRef normalized_shape) {
  return c10::multiply_integers(normalized_shape) * static_cast<int64_t>(x.element_size()) > kMaxScratchBytes;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_with_moments_cpu(const Tensor& x, at::IntArrayRef normalized_shape,
                                                               const OptionalTensor& weight, const OptionalTensor& bias,
                                                               double eps) {
  check_layer_norm(x, c10::fromIntArrayRefSlow(normalized_shape), weight, bias);
  if (x.numel() == 0) {
    return std::tuple_cat(std::tuple(at::empty(x.sizes(), x.options())),
                          moments_of_nothing(x, normalized_shape.size()));
  }
  if (has_long_rows(x, normalized_shape)) {
    const Affine affine(x, normalized_shape, weight, bias);
    return at::cpu::native_layer_norm(x.contiguous(), normalized_shape, affine.weight, affine.bias, eps);
  }
  const AffineRow affine(x, weight, bias);
  const auto dims = static_cast<int64_t>(normalized_shape.size());
  const auto [mean, rstd] = detail::empty_moments(x, normalized_shape.size());
  const Tensor y = at::detail::empty_cpu(x.sizes(), x.options());
  const Tensor source = has_contiguous_rows(x, dims) ? x : x.contiguous();
  for_each_matrix({source, y, mean, rstd}, dims,
                  [&](const Operands& of) { normalize(of[1], of[0], affine, eps, of[2], of[3]); });
  return {y, mean, rstd};
}

Tensor layer_norm_cpu(const Tensor& x, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps) {
  return std::get<0>(layer_norm_with_moments_cpu(x, normalized_shape, weight, bias, eps));
}

// Calls f(slice, weight, bias) on slices of at most `most` elements of a row, along the first dimension in which there
// are some.
void for_each_slice(const Tensor& row, int64_t most, const OptionalTensor& weight, const OptionalTensor& bias,
                    c10::function_ref<void(const Tensor&, const OptionalTensor&, const OptionalTensor&)> f) {
  const auto of = [](const OptionalTensor& t, const auto& part) { return t ? OptionalTensor(part(*t)) : t; };
  const int64_t length = row.size(0), width = row.numel() / length;
  if (row.dim() > 1 && width > most) {
    for (int64_t i = 0; i < length; ++i) {
      const auto part = [&](const Tensor& t) { return t.select(0, i); };
      for_each_slice(part(row), most, of(weight, part), of(bias, part), f);
    }
    return;
  }
  const int64_t step = std::max(most / width, int64_t{1});
  for (int64_t begin = 0; begin < length; begin += step) {
    const auto part = [&](const Tensor& t) { return t.narrow(0, begin, std::min(step, length - begin)); };
    f(part(row), of(weight, part), of(bias, part));
  }
}

// A row longer than a thread's scratch. The moments are merged slice by slice (Chan, Golub and LeVeque 1983): with the
// difference d of the means of n and m elements,
//   mean += d * m / (n + m),  M2 += M2' + d^2 * n * m / (n + m).
// Slices are computed in `scratch`, in float64: what a primitive would return in a new tensor stays in the heap.
void overwrite_long_row(const Tensor& row, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                        const Tensor& row_mean, const Tensor& row_rstd, const Tensor& scratch) {
  const auto widened = [&](const Tensor& slice) {
    return scratch.narrow(0, 0, slice.numel()).view(slice.sizes()).copy_(slice);
  };
  double mean = 0, squares = 0, count = 0;
  for_each_slice(row, scratch.numel(), std::nullopt, std::nullopt,
                 [&](const Tensor& slice, const OptionalTensor&, const OptionalTensor&) {
                   const auto more = static_cast<double>(slice.numel());
                   Tensor x = widened(slice);
                   const double slice_mean = x.mean().item<double>();
                   const double difference = slice_mean - mean, step = difference * (more / (count + more));
                   mean += step;
                   // Not difference^2 * count: if the first mean is huge, that is infinity times 0.
                   squares += x.sub_(slice_mean).square_().sum().item<double>() + difference * count * step;
                   count += more;
                 });
  const double rstd = 1 / std::sqrt(squares / count + eps);
  for_each_slice(row, scratch.numel(), weight, bias,
                 [&](const Tensor& slice, const OptionalTensor& w, const OptionalTensor& b) {
                   Tensor y = widened(slice).sub_(mean).mul_(rstd);
                   if (w) y.mul_(*w);
                   if (b) y.add_(*b);
                   slice.copy_(y);
                 });
  // fill_() would raise if rstd overflows the dtype of the moments, and x is overwritten already.
  row_mean.copy_(at::scalar_tensor(mean, at::kDouble));
  row_rstd.copy_(at::scalar_tensor(rstd, at::kDouble));
}

std::tuple<Tensor, Tensor> layer_norm_with_moments_cpu_(Tensor& x, at::IntArrayRef normalized_shape,
                                                        const OptionalTensor& weight, const OptionalTensor& bias,
                                                        double eps) {
  check_layer_norm_(x, c10::fromIntArrayRefSlow(normalized_shape), weight, bias);
  if (x.numel() == 0) return moments_of_nothing(x, normalized_shape.size());
  const OptionalTensor w = detail::read_first(x, weight), b = detail::read_first(x, bias);
  const auto dims = static_cast<int64_t>(normalized_shape.size());
  const auto [mean, rstd] = detail::empty_moments(x, normalized_shape.size());
  if (has_long_rows(x, normalized_shape)) {
    // Unlike the other operators, this one allocates while it writes: the sums of a slice.
    const Tensor scratch = at::empty({kSliceBytes / int64_t{sizeof(double)}}, x.options().dtype(at::kDouble));
    overwriting(x, [&] {
      for_each_matrix({x, mean, rstd}, dims, [&](const Operands& rows) {
        for (int64_t i = 0; i < rows[0].size(0); ++i) {
          overwrite_long_row(rows[0].select(0, i), w, b, eps, rows[1].select(0, i), rows[2].select(0, i), scratch);
        }
      });
    });
    return {mean, rstd};
  }
  const AffineRow affine(x, w, b);
  if (has_contiguous_rows(x, dims)) {
    for_each_matrix({x, mean, rstd}, dims,
                    [&](const Operands& of) { normalize(of[0], of[0], affine, eps, of[1], of[2]); });
  } else {
    for_each_row_panel(x, {x, mean, rstd}, {.trailing_dims = dims, .scratch = 1},
                       [&](const Operands& panel, const Operands& scratch) {
                         scratch[0].copy_(panel[0]);
                         normalize(scratch[0], scratch[0], affine, eps, panel[1], panel[2]);
                         panel[0].copy_(scratch[0]);
                       });
  }
  return {mean, rstd};
}

void layer_norm_cpu_(Tensor& x, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                     const OptionalTensor& bias, double eps) {
  layer_norm_with_moments_cpu_(x, normalized_shape, weight, bias, eps);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward_cpu(const Tensor& grad, const Tensor& x,
                                                           at::IntArrayRef normalized_shape, const Tensor& mean,
                                                           const Tensor& rstd, const OptionalTensor& weight,
                                                           std::array<bool, 3> output_mask) {
  detail::check_layer_norm_backward(grad, x, c10::fromIntArrayRefSlow(normalized_shape), mean, rstd, weight);
  const Affine affine(x, normalized_shape, weight, std::nullopt);
  const auto [dx, dweight, dbias] = layer_norm_gradients(grad, x, normalized_shape, mean, rstd, affine, output_mask);
  const auto where_wanted = [&](bool wanted, const Tensor& t, at::ScalarType dtype) {
    return wanted ? t.to(dtype) : at::empty({0}, x.options().dtype(dtype));
  };
  const at::ScalarType of_parameters = detail::norm_gradient_dtype(x, weight);
  return {where_wanted(output_mask[0], dx, x.scalar_type()), where_wanted(output_mask[1], dweight, of_parameters),
          where_wanted(output_mask[2], dbias, of_parameters)};
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("layer_norm", layer_norm_cpu);
  m.impl("layer_norm_", layer_norm_cpu_);
  m.impl("_layer_norm", layer_norm_with_moments_cpu);
  m.impl("_layer_norm_", layer_norm_with_moments_cpu_);
  m.impl("_layer_norm_backward", layer_norm_backward_cpu);
}

}  // namespace
}  // namespace torchops::cpu
