#pragma once

#include <ATen/Dispatch.h>

#include "cuda/passes/pass.cuh"

// The passes of gates after their product.
namespace torchops::cuda {

// T is the type of the weights, V that of v: the same, or float.

/// y = v * sigmoid(z). y may be z or v.
template <class T, class V, int N>
struct GatePass {
  MatrixRows<const T> z;
  MatrixRows<const V> v;
  MatrixRows<V> y;

  struct Loaded {
    Packed<T, N> z;
    Packed<V, N> v;
  };

  __device__ Loaded load(int64_t row, int64_t column) const {
    return {z.template load<N>(row, column), v.template load<N>(row, column)};
  }
  __device__ void finish(int64_t row, int64_t column, const Loaded& loaded) const {
    Accumulate<T> sums[N];
    Accumulate<V> values[N];
    unpack(loaded.z, sums);
    unpack(loaded.v, values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= gate_of<V>(sums[i]);
    y.template store<N>(row, column, pack<V, N>(values));
  }
};

/// s = sigmoid(z) and 1 - s, as exactly as elements of type V need.
template <class V, class A>
__device__ inline A gate_and_complement(A z, A& complement) {
  if constexpr (sizeof(V) == 2) {
    return Sigmoid::with_complement<Exactness::kFast>(Sigmoid::kScale * z, complement);
  } else {
    const A s = Sigmoid::value(z);
    complement = 1 - s;
    return s;
  }
}

/// With s = sigmoid(z): dv = g * s, unless dv is null, and dz = g * v * s * (1 - s), which may overwrite z.
/// Sums dz. If v_is_y, v is v * s.
template <class T, class V, int N>
struct GateBackwardPass {
  static constexpr int kSums = 1;
  using Sum = Accumulate<T>;
  MatrixRows<const T> z;
  MatrixRows<const V> g, v;
  MatrixRows<V> dv;
  MatrixRows<T> dz;
  bool v_is_y;

  struct Loaded {
    Packed<T, N> z;
    Packed<V, N> g, v;
  };

  __device__ Loaded load(int64_t row, int64_t column) const {
    return {z.template load<N>(row, column), g.template load<N>(row, column), v.template load<N>(row, column)};
  }
  __device__ void finish(int64_t row, int64_t column, const Loaded& loaded, Sum (&sums)[kSums][N]) const {
    Accumulate<T> sums_of_row[N];
    Accumulate<V> gs[N], values[N];
    unpack(loaded.z, sums_of_row);
    unpack(loaded.g, gs);
    unpack(loaded.v, values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Accumulate<V> complement;
      const Accumulate<V> s = gate_and_complement<V>(sums_of_row[i], complement), g = gs[i];
      gs[i] *= s;
      sums_of_row[i] = (v_is_y ? g : gs[i]) * values[i] * complement;
      sums[0][i] += sums_of_row[i];
    }
    if (dv.data != nullptr) dv.template store<N>(row, column, pack<V, N>(gs));
    dz.template store<N>(row, column, pack<T, N>(sums_of_row));
  }
};

/// Calls f with the types of w and of v.
template <class F>
void dispatch_gate(const at::Tensor& w, const at::Tensor& v, const F& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, w.scalar_type(), "gate", [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      if (v.scalar_type() == at::kFloat) return f(scalar_t{}, float{});
    }
    f(scalar_t{}, scalar_t{});
  });
}

/// y = v * sigmoid(z); all have unit column stride.
inline void gate_rows(const at::Tensor& y, const at::Tensor& v, const at::Tensor& z) {
  const int64_t rows = y.size(0), columns = y.size(1);
  dispatch_gate(z, v, [&](auto weight, auto value) {
    using T = decltype(weight);
    using V = decltype(value);
    const auto from_z = read_rows<T>(z);
    const auto from_v = read_rows<V>(v);
    const auto to = write_rows<V>(y);
    const auto pass = [&](auto width, int64_t first, int64_t group) {
      return GatePass<T, V, width()>{from_z.part(first, group), from_v.part(first, group), to.part(first, group)};
    };
    constexpr int n = kVectorSize<V>;
    launch_widest<n>(pass, rows, columns, PassAccess::of<n>(columns, from_z, from_v, to));
  });
}

/// Makes dv, if it is wanted, and dz, which may overwrite z and is added to the sums.
inline void gate_backward_rows(PassSums& sums, const at::Tensor& dv, const at::Tensor& dz, const at::Tensor& z,
                               const at::Tensor& g, const at::Tensor& v, bool wants_dv, bool v_is_y) {
  const int64_t rows = z.size(0), columns = z.size(1);
  dispatch_gate(z, v, [&](auto weight, auto value) {
    using T = decltype(weight);
    using V = decltype(value);
    const auto from_g = read_rows<V>(g), from_v = read_rows<V>(v);
    const auto to_v = wants_dv ? write_rows<V>(dv) : MatrixRows<V>{nullptr, 0};
    const auto from_z = read_rows<T>(z);
    const auto to_z = write_rows<T>(dz);
    const auto pass = [&](auto width, int64_t first, int64_t group) {
      return GateBackwardPass<T, V, width()>{from_z.part(first, group), from_g.part(first, group),
                                             from_v.part(first, group), to_v.part(first, group),
                                             to_z.part(first, group),   v_is_y};
    };
    constexpr int n = kVectorSize<V>;
    sums.launch<n>(pass, rows, PassAccess::of<n>(columns, from_z, from_g, from_v, to_v, to_z));
  });
}

}  // namespace torchops::cuda
