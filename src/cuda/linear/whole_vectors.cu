#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/base/device.h"
#include "cuda/base/vector.cuh"
#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/products.h"
#include "cuda/linear/whole_vectors.h"
#include "ops/common.h"
#include "ops/kernel_path.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

constexpr int kResizeBlock = 256, kElements = kVectorSize<uint16_t>, kMostOfLaunch = 8;

// to[r][c] = from[r][c], or 0 beyond the columns of `from`; beyond its rows, its last one.
struct Resize {
  uint16_t* to;
  const uint16_t* from;
  int64_t from_stride, from_rows, from_columns, columns, count;
  bool aligned;
  unsigned end;  // the block that begins the next one
};
struct Resizes {
  Resize at[kMostOfLaunch];
};

// Each thread gathers the elements of one vector of `to`, which has no gaps, so that reads are of neighbours and
// writes, if aligned, are whole.
__global__ void __launch_bounds__(kResizeBlock) resize_kernel(const __grid_constant__ Resizes resizes) {
  int which = 0;
  while (blockIdx.x >= resizes.at[which].end) ++which;
  const Resize& resize = resizes.at[which];
  const int64_t block = blockIdx.x - (which == 0 ? 0 : resizes.at[which - 1].end);
  const int64_t first = (block * kResizeBlock + threadIdx.x) * kElements;
  if (first >= resize.count) return;
  int64_t row = first / resize.columns, column = first - row * resize.columns;
  Packed<uint16_t, kElements> values;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int64_t from_row = row < resize.from_rows ? row : resize.from_rows - 1;
    values.at[i] = column < resize.from_columns ? resize.from[from_row * resize.from_stride + column] : uint16_t{0};
    if (++column == resize.columns) {
      column = 0;
      ++row;
    }
  }
  uint16_t* const to = resize.to + first;
  if (resize.aligned && first + kElements <= resize.count) return store<uint16_t, kElements>(to, values);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (first + i < resize.count) to[i] = values.at[i];
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

Copies& Copies::add(const Tensor& to, const Tensor& from) {
  pairs_.emplace_back(to, from.stride(1) == 1 || from.size(1) == 1 ? from : from.contiguous());
  return *this;
}

void Copies::run() {
  for (size_t begin = 0; begin < pairs_.size(); begin += kMostOfLaunch) {
    const size_t count = std::min(pairs_.size() - begin, size_t{kMostOfLaunch});
    Resizes resizes{};
    unsigned blocks = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto& [to, from] = pairs_[begin + i];
      blocks += static_cast<unsigned>(ceil_div(to.numel(), int64_t{kResizeBlock} * kElements));
      resizes.at[i] = {static_cast<uint16_t*>(to.mutable_data_ptr()),
                       static_cast<const uint16_t*>(from.const_data_ptr()),
                       from.stride(0),
                       from.size(0),
                       from.size(1),
                       to.size(1),
                       to.numel(),
                       gemm::is_aligned(to.const_data_ptr()),
                       blocks};
    }
    if (blocks == 0) continue;
    resize_kernel<<<blocks, kResizeBlock, 0, at::cuda::getCurrentCUDAStream()>>>(resizes);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  pairs_.clear();
}

namespace {

Tensor resized(const Tensor& t, int64_t rows, int64_t columns, Copies& copies) {
  const Tensor to = at::detail::empty_cuda({rows, columns}, t.options());
  copies.add(to, t);
  return to;
}

bool is_copied(const Tensor& t, int64_t columns) { return t.size(-1) != columns || !is_whole(t); }

Tensor whole_rows(const Tensor& t, int64_t columns, Copies& copies) {
  const Tensor rows = detail::as_rows(t);
  return is_copied(rows, columns) ? resized(rows, rows.size(0), columns, copies) : rows;
}

// How many elements of the rows of a matrix a kernel may load at once.
int elements_at_once(const Tensor& t) {
  return row_vector(static_cast<const uint16_t*>(t.const_data_ptr()), t.size(0) > 1 ? t.stride(0) : 0);
}

int64_t in_whole_vectors(int64_t features) { return ceil_div(features, kElements) * kElements; }

}  // namespace

std::optional<WholeVectors> WholeVectors::of(gemm::CopiedLayer layer, const Tensor& x, const Tensor& w,
                                             at::TensorList others) {
  const int64_t out_features = w.size(0);
  const auto has_other_dtype = [&](const Tensor& t) { return t.scalar_type() != w.scalar_type(); };
  if (w.element_size() != 2 || has_other_dtype(x) || std::ranges::any_of(others, has_other_dtype) || x.numel() == 0 ||
      !detail::is_automatic(detail::kernel_path()) || device_properties().major < 8) {
    return std::nullopt;
  }
  if (out_features % kElements == 0 && is_whole(w) && is_whole(x) && std::ranges::all_of(others, is_whole)) {
    return std::nullopt;
  }
  int vector = std::min(elements_at_once(x), elements_at_once(w));
  for (const Tensor& t : others) vector = std::min(vector, elements_at_once(t));
  const gemm::Case c = gemm::case_of(x.numel() / w.size(1), out_features, w.size(1), w.scalar_type());
  if (!gemm::copies_pay(layer, c, vector)) return std::nullopt;
  return WholeVectors{in_whole_vectors(w.size(1)), in_whole_vectors(out_features)};
}

Tensor WholeVectors::input(const Tensor& x, Copies& copies) const { return whole_rows(x, in_features, copies); }

Tensor WholeVectors::output(const Tensor& v, Copies& copies) const { return whole_rows(v, out_features, copies); }

Tensor WholeVectors::weight(const Tensor& w, Copies& copies) const {
  return w.size(0) == out_features && !is_copied(w, in_features) ? w : resized(w, out_features, in_features, copies);
}

std::optional<Tensor> WholeVectors::bias(const std::optional<Tensor>& b, Copies& copies) const {
  if (!b || b->size(0) == out_features) return b;
  return resized(b->contiguous().view({1, -1}), 1, out_features, copies).view({-1});
}

int64_t WholeVectors::input_bytes(const Tensor& x) const {
  return is_copied(x, in_features) ? in_features * x.element_size() : 0;
}

int64_t WholeVectors::output_bytes(const Tensor& v) const {
  return is_copied(v, out_features) ? out_features * v.element_size() : 0;
}

Tensor first_elements(const Tensor& from, at::IntArrayRef sizes, Copies& copies) {
  if (from.numel() == 0) return from;
  const int64_t columns = sizes.back(), rows = c10::multiply_integers(sizes) / columns;
  if (from.numel() == rows * columns) return from.view(sizes);
  return resized(from.dim() == 1 ? from.view({1, -1}) : from, rows, columns, copies).view(sizes);
}

int64_t PanelProduct::input_bytes(const Tensor& x) const {
  return whole_ ? whole_->input_bytes(x) : rounded_row_bytes(x, w);
}

Tensor PanelProduct::input(const Tensor& x, const Tensor& scratch) const {
  if (!copies(x)) return x;
  if (!whole_) return scratch.copy_(x);
  if (x.stride(1) != 1 && x.size(1) > 1) {  // Copies would make it contiguous first
    scratch.narrow(1, 0, x.size(1)).copy_(x);
    scratch.narrow(1, x.size(1), scratch.size(1) - x.size(1)).zero_();
    return scratch;
  }
  Copies().add(scratch, x).run();
  return scratch;
}

int64_t PanelProduct::product_bytes() const { return product_row_bytes(w); }

Tensor PanelProduct::empty(int64_t rows) const { return at::detail::empty_cuda({rows, w.size(0)}, w.options()); }

Tensor PanelProduct::operator()(const Tensor& z, const Tensor& input) const {
  linear_out(z, input, w, b);
  return has_more_features() ? z.narrow(1, 0, out_features_) : z;
}

}  // namespace torchops::cuda
