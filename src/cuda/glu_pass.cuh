#pragma once

#include "cuda/pass.cuh"

// The passes of gated linear units after, and in backward between, their products.
namespace torchops::cuda {

/// y = (z + bias) * F(u + gate_bias). y may be z.
template <class F, class T, int N>
struct GluPass : GluRows<F, T, N> {
  using typename GluRows<F, T, N>::Columns, typename GluRows<F, T, N>::Loaded;
  MatrixRows<T> y;

  __device__ void finish(int64_t row, int64_t column, const Loaded& loaded, const Columns& biases) const {
    Accumulate<T> values[N];
    this->values(loaded, biases, values);
    y.template store<N>(row, column, pack<T, N>(values));
  }
};

/// dz = g * F(u + gate_bias) and du = g * (z + bias) * F'(u + gate_bias). dz may be z, and du may be u. Sums both.
template <class F, class T, int N>
struct GluBackwardPass {
  static constexpr int kSums = 2;
  using Sum = Accumulate<T>;
  MatrixRows<const T> g, z, u;
  MatrixRows<T> dz, du;
  const T *bias, *gate_bias;

  struct Columns {
    Biases<T, N> value, gate;
  };
  struct Loaded {
    Packed<T, N> g, z, u;
  };

  __device__ Columns columns(int64_t column) const { return {{bias, column}, {gate_bias, column}}; }
  __device__ Loaded load(int64_t row, int64_t column) const {
    return {g.template load<N>(row, column), z.template load<N>(row, column), u.template load<N>(row, column)};
  }
  __device__ void finish(int64_t row, int64_t column, const Loaded& loaded, const Columns& biases,
                         Sum (&sums)[kSums][N]) const {
    Accumulate<T> grads[N], values[N], gates[N];
    unpack(loaded.g, grads);
    biases.value.add_to(loaded.z, values);
    biases.gate.add_to(loaded.u, gates);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Accumulate<T> slope;
      const Accumulate<T> gate = activate<F, T>(gates[i], slope);
      gates[i] = grads[i] * values[i] * slope;
      values[i] = grads[i] * gate;
      sums[0][i] += values[i];
      sums[1][i] += gates[i];
    }
    dz.template store<N>(row, column, pack<T, N>(values));
    du.template store<N>(row, column, pack<T, N>(gates));
  }
};

}  // namespace torchops::cuda
