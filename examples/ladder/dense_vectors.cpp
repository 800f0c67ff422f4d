// Step 4 of docs/ladder.md: the same sums, a tile of them in the vector registers at a time.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>

#include "matrices.h"

namespace {

using at::Tensor;
using Vector = at::vec::Vectorized<float>;  // 16 floats with AVX-512, 8 with AVX2

constexpr int64_t kLanes = Vector::size(), kRows = 6, kVectors = 2, kColumns = kVectors * kLanes;

// The columns of w.T in groups of kColumns, each contiguous for every k, so that the innermost loop loads whole
// vectors. What a last group has too much is zero.
Tensor packed(const Tensor& w) {
  const int64_t in = w.size(1), out = w.size(0), groups = (out + kColumns - 1) / kColumns;
  Tensor to = at::empty({groups, in, kColumns}, w.options());
  const float* from = w.const_data_ptr<float>();
  float* data = to.mutable_data_ptr<float>();
  for (int64_t column = 0; column < groups * kColumns; ++column) {
    float* lane = data + column / kColumns * in * kColumns + column % kColumns;
    for (int64_t k = 0; k < in; ++k) lane[k * kColumns] = column < out ? from[column * in + k] : 0;
  }
  return to;
}

// A tile of `rows` x kColumns sums: 6 x 2 vectors stay in registers for all of k, and each step loads two vectors and
// `rows` numbers for 12 multiply-adds, none of which waits for another. Bias and sigmoid follow where the sums are, so
// the pre-activation is never in memory.
template <int64_t rows>
void tile(const float* x, const float* w, const float* bias, float* y, int64_t in, int64_t out, int64_t columns) {
  Vector sums[rows][kVectors];
  for (int64_t v = 0; v < kVectors; ++v) {
    const int64_t present = std::clamp(columns - v * kLanes, int64_t{0}, kLanes);
    const Vector initial = present > 0 ? Vector::loadu(bias + v * kLanes, present) : Vector(0.f);
    for (auto& row : sums) row[v] = initial;
  }
  for (int64_t k = 0; k < in; ++k) {
    const Vector first = Vector::loadu(w + k * kColumns), second = Vector::loadu(w + k * kColumns + kLanes);
#pragma GCC unroll 6
    for (int64_t row = 0; row < rows; ++row) {
      const Vector value(x[row * in + k]);
      sums[row][0] = at::vec::fmadd(value, first, sums[row][0]);
      sums[row][1] = at::vec::fmadd(value, second, sums[row][1]);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const int64_t present = std::clamp(columns - v * kLanes, int64_t{0}, kLanes);
      const Vector sigmoid = (Vector(1.f) + sums[row][v].neg().exp()).reciprocal();
      if (present > 0) sigmoid.store(y + row * out + v * kLanes, present);
    }
  }
}

Tensor dense_vectors(const Tensor& x, const Tensor& w, const Tensor& b) {
  Tensor y = ladder::result_of(x, w, b);
  const int64_t rows = x.size(0), in = x.size(1), out = w.size(0);
  const Tensor w_packed = packed(w);
  const float *x_data = x.const_data_ptr<float>(), *w_data = w_packed.const_data_ptr<float>();
  const float* bias = b.const_data_ptr<float>();
  float* y_data = y.mutable_data_ptr<float>();
  at::parallel_for(0, (rows + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kRows; row < std::min(end * kRows, rows); row += kRows) {
      for (int64_t column = 0; column < out; column += kColumns) {
        const float *from = x_data + row * in, *group = w_data + column * in;
        float* to = y_data + row * out + column;
        if (row + kRows <= rows) {
          tile<kRows>(from, group, bias + column, to, in, out, out - column);
        } else {
          for (int64_t i = 0; i < rows - row; ++i) {
            tile<1>(from + i * in, group, bias + column, to + i * out, in, out, out - column);
          }
        }
      }
    }
  });
  return y;
}

TORCH_LIBRARY_FRAGMENT(ladder, m) { m.def("dense_vectors(Tensor x, Tensor w, Tensor b) -> Tensor"); }

TORCH_LIBRARY_IMPL(ladder, CPU, m) { m.impl("dense_vectors", dense_vectors); }

}  // namespace
