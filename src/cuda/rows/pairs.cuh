#pragma once

#include "cuda/rows/rows.cuh"

// The rows of rows/rows.cuh with two inputs: for gradients that read two rows, x (or the output) and its cotangent,
// write a third, and have no parameters.
namespace torchops::cuda {

/// Rows with unit column stride. dx may be x or grad.
template <class T>
struct RowPairs {
  const T *x, *grad;
  T* dx;
  int64_t rows, columns, x_stride, grad_stride, dx_stride;
};

/// Two rows that are read once. Per thread, up to kVectors vectors of each stay in registers, as in memory. x, grad and
/// dx must have the same distance to a 16-byte boundary.
template <class T, class Group, int kVectors>
class RowPair : RowPlaces<T, Group, kVectors> {
  using Places = RowPlaces<T, Group, kVectors>;
  using Places::kSize, Places::kEdges, Places::has_vector, Places::column, Places::has_edge, Places::edge_column;

 public:
  using Rows = RowPairs<T>;

  __device__ RowPair(const RowPairs<T>& rows, const Group& group)
      : Places(rows.x + group.row * rows.x_stride, rows.rows, rows.columns, group),
        dx_(rows.dx + group.row * rows.dx_stride) {
    const T *const x = rows.x + group.row * rows.x_stride, *const grad = rows.grad + group.row * rows.grad_stride;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (has_vector(k)) {
        x_[k] = load<T, kSize>(x + column(k));
        grad_[k] = load<T, kSize>(grad + column(k));
      }
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (has_edge(k)) {
        edge_of_x_[k] = x[edge_column(k)];
        edge_of_grad_[k] = grad[edge_column(k)];
      }
    }
  }

  /// Calls f(x, grad, index in their vector) for every element of this thread.
  template <class F>
  __device__ void for_each(F f) const {
    for_each_vector([&](int, auto& x, auto& grad) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) f(x[i], grad[i], i);
    });
    for_each_edge([&](int, A x, A grad) { f(x, grad, 0); });
  }

  /// dx = f(x, grad) for every element of this thread.
  template <class F>
  __device__ void write(F f) const {
    for_each_vector([&](int column, auto& x, auto& grad) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) grad[i] = f(x[i], grad[i]);
      store(dx_ + column, pack<T, kSize>(grad));
    });
    for_each_edge([&](int column, A x, A grad) { dx_[column] = static_cast<T>(f(x, grad)); });
  }

 private:
  using A = Accumulate<T>;

  template <class F>
  __device__ void for_each_vector(F f) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (has_vector(k)) {
        A x[kSize], grad[kSize];
        unpack(x_[k], x);
        unpack(grad_[k], grad);
        f(column(k), x, grad);
      }
    }
  }
  template <class F>
  __device__ void for_each_edge(F f) const {
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (has_edge(k)) f(edge_column(k), static_cast<A>(edge_of_x_[k]), static_cast<A>(edge_of_grad_[k]));
    }
  }

  T* const dx_;
  Packed<T, kSize> x_[kVectors], grad_[kVectors];
  T edge_of_x_[kEdges], edge_of_grad_[kEdges];
};

}  // namespace torchops::cuda
