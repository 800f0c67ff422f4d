#include <ATen/Dispatch.h>

#include "cuda/passes/glu.h"
#include "cuda/passes/pass.cuh"

namespace torchops::cuda {
namespace {

/// y = z * F(u). y may be z.
template <class F, class T, int N>
struct GluPass : GluRows<F, T, N> {
  using typename GluRows<F, T, N>::Loaded;
  MatrixRows<T> y;

  __device__ void finish(int64_t row, int64_t column, const Loaded& loaded) const {
    Accumulate<T> values[N];
    this->values(loaded, values);
    y.template store<N>(row, column, pack<T, N>(values));
  }
};

/// dz = g * F(u) and du = g * z * F'(u). dz may be z, and du may be u. Sums both.
template <class F, class T, int N>
struct GluBackwardPass {
  static constexpr int kSums = 2;
  using Sum = Accumulate<T>;
  MatrixRows<const T> g, z, u;
  MatrixRows<T> dz, du;

  struct Loaded {
    Packed<T, N> g, z, u;
  };

  __device__ Loaded load(int64_t row, int64_t column) const {
    return {g.template load<N>(row, column), z.template load<N>(row, column), u.template load<N>(row, column)};
  }
  __device__ void finish(int64_t row, int64_t column, const Loaded& loaded, Sum (&sums)[kSums][N]) const {
    Accumulate<T> grads[N], values[N], gates[N];
    unpack(loaded.g, grads);
    unpack(loaded.z, values);
    unpack(loaded.u, gates);
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

/// Calls f with the activation and the type of w.
template <class Call>
void dispatch_glu(const at::Tensor& w, detail::GluActivation activation, const Call& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, w.scalar_type(), "glu", [&] {
    activation == detail::GluActivation::kSilu ? f(Silu{}, scalar_t{}) : f(Sigmoid{}, scalar_t{});
  });
}

}  // namespace

void glu_rows(const at::Tensor& y, const at::Tensor& z, const at::Tensor& u, detail::GluActivation activation) {
  const int64_t rows = z.size(0), columns = z.size(1);
  dispatch_glu(z, activation, [&](auto act, auto type) {
    using F = decltype(act);
    using T = decltype(type);
    const auto from_z = read_rows<T>(z), from_u = read_rows<T>(u);
    const auto to = write_rows<T>(y);
    const auto pass = [&](auto width, int64_t first, int64_t group) {
      return GluPass<F, T, width()>{{from_z.part(first, group), from_u.part(first, group)}, to.part(first, group)};
    };
    constexpr int n = kVectorSize<T>;
    launch_widest<n>(pass, rows, columns, PassAccess::of<n>(columns, from_z, from_u, to));
  });
}

void glu_backward_rows(PassSums& sums, const GluPair& cotangents, const at::Tensor& g, const GluPair& products,
                       detail::GluActivation activation) {
  const int64_t rows = g.size(0), columns = g.size(1);
  dispatch_glu(g, activation, [&](auto act, auto type) {
    using F = decltype(act);
    using T = decltype(type);
    const auto from_g = read_rows<T>(g), from_z = read_rows<T>(products.z), from_u = read_rows<T>(products.u);
    const auto to_z = write_rows<T>(cotangents.z), to_u = write_rows<T>(cotangents.u);
    const auto pass = [&](auto width, int64_t first, int64_t group) {
      return GluBackwardPass<F, T, width()>{from_g.part(first, group), from_z.part(first, group),
                                            from_u.part(first, group), to_z.part(first, group),
                                            to_u.part(first, group)};
    };
    constexpr int n = kVectorSize<T>;
    sums.launch<n>(pass, rows, PassAccess::of<n>(columns, from_g, from_z, from_u, to_z, to_u));
  });
}

}  // namespace torchops::cuda
