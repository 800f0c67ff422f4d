#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/gemm/operand.h"
#include "cuda/linear.h"
#include "cuda/vector.cuh"
#include "cuda/whole_vectors.h"
#include "ops/common.h"
#include "ops/dense_path.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

constexpr int kResizeBlock = 256, kElements = kVectorSize<uint16_t>;

// to[r][c] = from[r][c], or 0 beyond the columns of `from`; beyond its rows, its last one. Each thread gathers the
// elements of one vector of `to`, which has no gaps, so that reads are of neighbours and writes, if aligned, are whole.
__global__ void __launch_bounds__(kResizeBlock)
    resize_kernel(uint16_t* __restrict__ to, const uint16_t* __restrict__ from, int64_t from_stride, int64_t from_rows,
                  int64_t from_columns, int64_t columns, int64_t count, bool aligned) {
  const int64_t first = (int64_t{blockIdx.x} * kResizeBlock + threadIdx.x) * kElements;
  if (first >= count) return;
  int64_t row = first / columns, column = first - row * columns;
  Packed<uint16_t, kElements> values;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int64_t from_row = row < from_rows ? row : from_rows - 1;
    values.at[i] = column < from_columns ? from[from_row * from_stride + column] : uint16_t{0};
    if (++column == columns) {
      column = 0;
      ++row;
    }
  }
  if (aligned && first + kElements <= count) return store<uint16_t, kElements>(to + first, values);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (first + i < count) to[first + i] = values.at[i];
  }
}

// Kernels need no copy of these rows, the last dimension of t, or make one that is contiguous.
bool is_whole(const Tensor& t) {
  if (t.size(-1) % kElements != 0) return false;
  if (t.stride(-1) != 1) return true;
  for (int64_t d = 0; d < t.dim() - 1; ++d) {
    if (t.size(d) != 1 && t.stride(d) % kElements != 0) return false;
  }
  return gemm::is_aligned(t.const_data_ptr());
}

}  // namespace

void copy_first(const Tensor& to, const Tensor& from) {
  const Tensor rows = from.stride(1) == 1 || from.size(1) == 1 ? from : from.contiguous();
  const int64_t blocks = ceil_div(to.numel(), int64_t{kResizeBlock} * kElements);
  resize_kernel<<<static_cast<unsigned>(blocks), kResizeBlock, 0, at::cuda::getCurrentCUDAStream()>>>(
      static_cast<uint16_t*>(to.mutable_data_ptr()), static_cast<const uint16_t*>(rows.const_data_ptr()),
      rows.stride(0), rows.size(0), rows.size(1), to.size(1), to.numel(), gemm::is_aligned(to.const_data_ptr()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {

Tensor resized(const Tensor& t, int64_t rows, int64_t columns) {
  const Tensor to = at::detail::empty_cuda({rows, columns}, t.options());
  copy_first(to, t);
  return to;
}

bool is_copied(const Tensor& t, int64_t columns) { return t.size(-1) != columns || !is_whole(t); }

Tensor whole_rows(const Tensor& t, int64_t columns) {
  const Tensor rows = detail::as_rows(t);
  return is_copied(rows, columns) ? resized(rows, rows.size(0), columns) : rows;
}

int64_t in_whole_vectors(int64_t features) { return ceil_div(features, kElements) * kElements; }

}  // namespace

std::optional<WholeVectors> WholeVectors::of(const Tensor& x, const Tensor& w, at::TensorList others, int64_t least) {
  const int64_t out_features = w.size(0);
  const auto has_other_dtype = [&](const Tensor& t) { return t.scalar_type() != w.scalar_type(); };
  if (w.element_size() != 2 || has_other_dtype(x) || std::ranges::any_of(others, has_other_dtype) ||
      x.numel() * out_features < std::max(least, int64_t{1}) || !detail::is_automatic(detail::dense_path()) ||
      at::cuda::getCurrentDeviceProperties()->major < 8) {
    return std::nullopt;
  }
  if (out_features % kElements == 0 && is_whole(w) && is_whole(x) && std::ranges::all_of(others, is_whole)) {
    return std::nullopt;
  }
  return WholeVectors{in_whole_vectors(w.size(1)), in_whole_vectors(out_features)};
}

Tensor WholeVectors::input(const Tensor& x) const { return whole_rows(x, in_features); }

Tensor WholeVectors::output(const Tensor& v) const { return whole_rows(v, out_features); }

Tensor WholeVectors::weight(const Tensor& w) const {
  return w.size(0) == out_features && !is_copied(w, in_features) ? w : resized(w, out_features, in_features);
}

std::optional<Tensor> WholeVectors::bias(const std::optional<Tensor>& b) const {
  if (!b || b->size(0) == out_features) return b;
  return resized(b->contiguous().view({1, -1}), 1, out_features).view({-1});
}

int64_t WholeVectors::input_bytes(const Tensor& x) const {
  return is_copied(x, in_features) ? in_features * x.element_size() : 0;
}

int64_t WholeVectors::output_bytes(const Tensor& v) const {
  return is_copied(v, out_features) ? out_features * v.element_size() : 0;
}

Tensor first_elements(const Tensor& from, at::IntArrayRef sizes) {
  if (from.numel() == 0) return from;
  const int64_t columns = sizes.back(), rows = c10::multiply_integers(sizes) / columns;
  if (from.numel() == rows * columns) return from.view(sizes);
  return resized(from.dim() == 1 ? from.view({1, -1}) : from, rows, columns).view(sizes);
}

int64_t PanelProduct::input_bytes(const Tensor& x) const {
  return whole_ ? whole_->input_bytes(x) : rounded_row_bytes(x, w);
}

Tensor PanelProduct::input(const Tensor& x, const Tensor& scratch) const {
  if (!copies(x)) return x;
  if (!whole_) return scratch.copy_(x);
  if (x.stride(1) != 1 && x.size(1) > 1) {  // copy_first() would make it contiguous first
    scratch.narrow(1, 0, x.size(1)).copy_(x);
    scratch.narrow(1, x.size(1), scratch.size(1) - x.size(1)).zero_();
    return scratch;
  }
  copy_first(scratch, x);
  return scratch;
}

int64_t PanelProduct::product_bytes() const { return product_row_bytes(w); }

Tensor PanelProduct::empty(int64_t rows) const { return at::detail::empty_cuda({rows, w.size(0)}, w.options()); }

Tensor PanelProduct::operator()(const Tensor& z, const Tensor& input) const {
  linear_out(z, input, w, b);
  return has_more_features() ? z.narrow(1, 0, out_features_) : z;
}

}  // namespace torchops::cuda
