#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/gemm/launch.h"
#include "cuda/gemm/operand.h"
#include "cuda/gemm/sm80.cuh"
#include "cuda/layer_gradients.h"
#include "cuda/linear.h"
#include "cuda/pass.cuh"
#include "ops/common.h"
#include "ops/dense_path.h"
#include "ops/gate.h"
#include "ops/overwriting.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// T is the type of the weights, V that of v: the same, or float.

// y = v * sigmoid(z). y may be z or v.
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

// s = sigmoid(z) and 1 - s, as exactly as elements of type V need.
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

// With s = sigmoid(z): dv = g * s, unless dv is null, and dz = g * v * s * (1 - s), which overwrites z.
// Sums dz. If v_is_y, v is v * s.
template <class T, class V, int N>
struct GateBackwardPass {
  static constexpr int kSums = 1;
  using Sum = Accumulate<T>;
  MatrixRows<const V> g, v;
  MatrixRows<V> dv;
  MatrixRows<T> z;
  bool v_is_y;

  struct Loaded {
    Packed<T, N> z;
    Packed<V, N> g, v;
  };

  __device__ Loaded load(int64_t row, int64_t column) const {
    return {z.template load<N>(row, column), g.template load<N>(row, column), v.template load<N>(row, column)};
  }
  __device__ void finish(int64_t row, int64_t column, const Loaded& loaded, Sum (&sums)[kSums][N]) const {
    Accumulate<T> dz[N];
    Accumulate<V> gs[N], values[N];
    unpack(loaded.z, dz);
    unpack(loaded.g, gs);
    unpack(loaded.v, values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Accumulate<V> complement;
      const Accumulate<V> s = gate_and_complement<V>(dz[i], complement), g = gs[i];
      gs[i] *= s;
      dz[i] = (v_is_y ? g : gs[i]) * values[i] * complement;
      sums[0][i] += dz[i];
    }
    if (dv.data != nullptr) dv.template store<N>(row, column, pack<V, N>(gs));
    z.template store<N>(row, column, pack<T, N>(dz));
  }
};

// Calls f with the types of w and of v.
template <class F>
void dispatch(const Tensor& w, const Tensor& v, const F& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, w.scalar_type(), "gate", [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      if (v.scalar_type() == at::kFloat) return f(scalar_t{}, float{});
    }
    f(scalar_t{}, scalar_t{});
  });
}

// y = v * sigmoid(z); all have unit column stride, and z has no gaps.
void gate_rows(const Tensor& y, const Tensor& v, const Tensor& z) {
  const int64_t rows = y.size(0), columns = y.size(1);
  dispatch(z, v, [&](auto weight, auto value) {
    using T = decltype(weight);
    using V = decltype(value);
    const auto launch = [&](auto width) {
      launch_pass<width()>(GatePass<T, V, width()>{read_rows<T>(z), read_rows<V>(v), write_rows<V>(y)}, rows, columns);
    };
    constexpr int n = kVectorSize<V>;
    const bool in_vectors =
        columns % n == 0 && read_rows<T>(z).fits(n) && read_rows<V>(v).fits(n) && write_rows<V>(y).fits(n);
    in_vectors ? launch(std::integral_constant<int, n>{}) : launch(std::integral_constant<int, 1>{});
  });
}

// y = v * sigmoid(x @ w.T + b) by the kernel of gemm/sm90 for few features, which reads and writes each row once, or by
// that for longer sums. False, with nothing done, if none can run or if cuBLAS is faster and `automatic`. All are
// matrices of one dtype; y may be v.
bool fused_aligned(const Tensor& y, const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b,
                   bool automatic) {
  const at::ScalarType dtype = w.scalar_type();
  if (w.size(0) % 8 != 0) return false;  // TMA writes whole pieces of 16 bytes
  const auto from_x = gemm::operand(x), from_w = gemm::operand(w), from_v = gemm::operand(v), to_y = gemm::operand(y);
  const auto c = gemm::sm90_case(x.size(0), w.size(0), w.size(1), dtype);
  if (!from_x || !from_w || !from_v || !to_y || !c) return false;
  gemm::Problem problem;
  problem.m = static_cast<int>(c->m);
  problem.n = static_cast<int>(c->n);
  problem.k = static_cast<int>(c->k);
  problem.a = *from_x;
  problem.b = *from_w;
  problem.c = *from_v;
  problem.d = *to_y;
  problem.bias = b ? b->const_data_ptr() : nullptr;
  // Several tiles of a row of the result read the whole row of x.
  if (x.const_data_ptr() == y.const_data_ptr() && c->n > 128) return false;
  if (gemm::run_chosen<gemm::Gate>(problem, *c, y)) return true;
  return !(automatic && gemm::prefers_cublas_for_glu(*c)) && gemm::run_chosen<gemm::WideGate>(problem, *c, y);
}

// The same by any fused kernel, if that is wanted.
bool fused(const Tensor& y, const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  const detail::DensePath path = detail::dense_path();
  const bool automatic = detail::is_automatic(path);
  if (path == detail::DensePath::kCublas || x.size(1) == 0) return false;
  const bool mixed = v.scalar_type() != w.scalar_type() || x.scalar_type() != w.scalar_type();
  if (!mixed && fused_aligned(y, v, x, w, b, automatic)) return true;
  if (x.const_data_ptr() == y.const_data_ptr() && y.size(1) > gemm::kSm80LeastColumns) return false;
  return gemm::run_sm80<gemm::GateRule>({.d = y, .a = x, .b = w, .bias = b, .c = &v}, automatic);
}

Tensor gate_cuda(const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check_gate(v, x, w, b);
  const c10::cuda::CUDAGuard guard(v.device());
  Tensor y = at::detail::empty_cuda(v.sizes(), v.options());
  if (y.numel() == 0) return y;
  const Tensor y_rows = detail::as_rows(y), v_rows = unit_columns(detail::as_rows(v)), x_rows = detail::as_rows(x);
  const OptionalTensor bias = contiguous(b);
  if (fused(y_rows, v_rows, x_rows, w, bias)) return y;
  // If v has the dtype of w, the product can be written to the result.
  const bool scratch = v.scalar_type() != w.scalar_type(), rounded = x.scalar_type() != w.scalar_type();
  const int64_t product_bytes = scratch ? product_row_bytes(w) : 0;
  const int64_t rows = y_rows.size(0);
  const int64_t step = rows_of_panel(rows, w, bias.has_value(), product_bytes + rounded_row_bytes(x, w));
  for_each_panel_of(rows, step, [&](int64_t begin, int64_t end) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    const Tensor out = panel(y_rows), x_panel = panel(x_rows).to(w.scalar_type());
    if (rounded && fused(out, panel(v_rows), x_panel, w, bias)) return;
    const Tensor z = scratch ? Tensor(at::detail::empty_cuda(out.sizes(), w.options())) : out;
    linear_out(z, x_panel, w, bias);
    gate_rows(out, panel(v_rows), z);
  });
  return y;
}

void gate_cuda_(Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  check_gate_(v, x, w, b);
  if (v.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(v.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor input = detail::coincide(v, x) ? x : detail::read_first(v, x), weight = detail::read_first(v, w);
  const OptionalTensor bias = contiguous(detail::read_first(v, b));
  // Scratch for a panel of rows: the product, and x if it is rounded. It is allocated once, for the first matrix,
  // and gives the panels of all: by itself, a last matrix of fewer rows could have longer ones.
  const bool rounded = x.scalar_type() != w.scalar_type();
  Tensor products, rounded_rows;
  const auto overwrite = [&](const detail::Operands& matrices) {
    const Tensor &target = matrices[0], &x_rows = matrices[1];
    if (fused(target, target, x_rows, weight, bias)) return;
    const int64_t scratch_bytes = product_row_bytes(w) + rounded_row_bytes(x, w);
    const int64_t step =
        products.defined() ? products.size(0) : rows_of_panel(target.size(0), w, bias.has_value(), scratch_bytes);
    for_each_panel_of(target.size(0), step, [&](int64_t begin, int64_t end) {
      const int64_t rows = end - begin;
      if (!products.defined()) {
        products = at::detail::empty_cuda({rows, w.size(0)}, w.options());
        if (rounded) rounded_rows = at::detail::empty_cuda({rows, w.size(1)}, w.options());
      }
      const Tensor out = target.narrow(0, begin, rows), x_panel = x_rows.narrow(0, begin, rows);
      const Tensor z = products.narrow(0, 0, rows);
      const Tensor factor = rounded ? rounded_rows.narrow(0, 0, rows).copy_(x_panel) : x_panel;
      if (rounded && fused(out, out, factor, weight, bias)) return;
      linear_out(z, factor, weight, bias);
      gate_rows(out, out, z);
    });
  };
  detail::overwriting(v, [&] { overwrite_rows({v, input}, 1, overwrite); });
}

// Makes dv, if it is wanted, and dz, which overwrites z and is added to the sums.
void gate_backward_rows(PassSums& sums, const Tensor& dv, const Tensor& z, const Tensor& g, const Tensor& v,
                        bool wants_dv, bool v_is_y) {
  const int64_t rows = z.size(0), columns = z.size(1);
  dispatch(z, v, [&](auto weight, auto value) {
    using T = decltype(weight);
    using V = decltype(value);
    const MatrixRows<V> to = wants_dv ? write_rows<V>(dv) : MatrixRows<V>{nullptr, 0};
    const auto launch = [&](auto width) {
      sums.launch<width()>(
          GateBackwardPass<T, V, width()>{read_rows<V>(g), read_rows<V>(v), to, write_rows<T>(z), v_is_y}, rows);
    };
    constexpr int n = kVectorSize<V>;
    const bool in_vectors = columns % n == 0 && read_rows<V>(g).fits(n) && read_rows<V>(v).fits(n) && to.fits(n) &&
                            write_rows<T>(z).fits(n);
    in_vectors ? launch(std::integral_constant<int, n>{}) : launch(std::integral_constant<int, 1>{});
  });
}

using GradientCall = std::optional<std::pair<gemm::GradientProblem, gemm::Case>>;

// The arguments of the gradient kernels; nullopt if none can run. All tensors are matrices. With a float32 x, only
// in_one_pass() can use them.
GradientCall gradient_call(const Tensor& g, const Tensor& v, const Tensor& x, const Tensor& w, const OptionalTensor& b,
                           bool v_is_y) {
  const at::ScalarType dtype = w.scalar_type();
  if (detail::dense_path() == detail::DensePath::kCublas || v.scalar_type() != dtype || w.size(0) % 8 != 0 ||
      w.size(1) == 0) {
    return std::nullopt;
  }
  const auto from_g = gemm::operand(g), from_v = gemm::operand(v), from_x = gemm::operand(x), from_w = gemm::operand(w);
  const auto c = gemm::sm90_case(x.size(0), w.size(0), w.size(1), dtype);
  if (!from_g || !from_v || !from_x || !from_w || !c) return std::nullopt;
  gemm::GradientProblem problem;
  problem.m = static_cast<int>(c->m);
  problem.n = static_cast<int>(c->n);
  problem.k = static_cast<int>(c->k);
  problem.grad = *from_g;
  (v_is_y ? problem.y : problem.c) = *from_v;
  problem.x = *from_x;
  problem.w = *from_w;
  problem.bias = b ? b->const_data_ptr() : nullptr;
  problem.is_wide = x.scalar_type() != dtype;
  return std::pair(problem, *c);
}

// All gradients in one pass over the rows. Returns false, with nothing done, if that kernel cannot run or not all
// gradients are wanted. The gradients are contiguous.
bool in_one_pass(const detail::GateGradients& gradients, const GradientCall& call, std::array<bool, 4> mask) {
  if (!call || !mask[0] || !mask[1] || !mask[2] || call->second.k % 8 != 0) return false;
  auto [problem, c] = *call;
  const auto& [dv, dx, dw, db] = gradients;
  problem.dx = dx.mutable_data_ptr();
  problem.dc = dv.mutable_data_ptr();
  problem.dw = dw.mutable_data_ptr();
  problem.dbias = mask[3] ? db.mutable_data_ptr() : nullptr;
  return gemm::run_chosen<gemm::GateGradients>(problem, c, dx);
}

// dz, and dv and db if they are wanted, by a kernel that recomputes the product without storing it. Returns false, with
// nothing done, if it cannot run or cuBLAS is faster.
bool fused_cotangents(const Tensor& dz, const Tensor& dv, const Tensor& db, const GradientCall& call,
                      std::array<bool, 4> mask) {
  if (!call || (detail::is_automatic(detail::dense_path()) && gemm::prefers_cublas_for_glu(call->second))) return false;
  const auto to_dz = gemm::operand(dz);
  if (!to_dz) return false;
  auto [problem, c] = *call;
  const bool kernel_sums = db.scalar_type() == dz.scalar_type();  // it cannot write float32
  problem.dz = *to_dz;
  problem.dc = mask[0] ? dv.mutable_data_ptr() : nullptr;
  problem.dbias = kernel_sums && mask[3] ? db.mutable_data_ptr() : nullptr;
  if (!gemm::run_chosen<gemm::GateCotangents>(problem, c, dz)) return false;
  if (!kernel_sums && mask[3]) sum_columns(db, dz);
  return true;
}

// The same on every GPU from compute capability 8.0 on. Another pass sums dz, as it is rounded.
bool portable_cotangents(const Tensor& dz, const Tensor& dv, const Tensor& db, const Tensor& g, const Tensor& v,
                         const Tensor& x, const Tensor& w, const OptionalTensor& b, std::array<bool, 4> mask,
                         bool v_is_y) {
  const detail::DensePath path = detail::dense_path();
  if (path == detail::DensePath::kCublas ||
      !gemm::run_sm80<gemm::CotangentsOf<gemm::GateRule>>(
          {.d = dz, .a = x, .b = w, .bias = b, .c = &v, .g = &g, .d2 = mask[0] ? &dv : nullptr, .c_is_y = v_is_y},
          detail::is_automatic(path))) {
    return false;
  }
  if (mask[3]) sum_columns(db, dz);
  return true;
}

// The gradients by way of dz, the only scratch of the result's size: if cuBLAS computes the product, that is written
// there too. All tensors are matrices. The gradients of weights and biases may be float32.
void by_cotangents(const detail::GateGradients& gradients, const Tensor& g, const Tensor& v, const Tensor& x,
                   const Tensor& w, const OptionalTensor& b, std::array<bool, 4> mask, bool v_is_y,
                   const GradientCall& call) {
  const auto& [dv, dx, dw, db] = gradients;
  const Tensor dz = at::detail::empty_cuda(v.sizes(), w.options());
  if (!fused_cotangents(dz, dv, db, call, mask) && !portable_cotangents(dz, dv, db, g, v, x, w, b, mask, v_is_y)) {
    const int64_t rows = dz.size(0), step = rows_of_panel(rows, w, b.has_value(), rounded_row_bytes(x, w));
    PassSums sums(mask[3], w, 1, rows, step, dz.size(1));
    for_each_panel_of(rows, step, [&](int64_t begin, int64_t end) {
      const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
      const Tensor z = panel(dz);
      linear_out(z, panel(x).to(w.scalar_type()), w, b);
      gate_backward_rows(sums, mask[0] ? panel(dv) : dv, z, panel(g), panel(v), mask[0], v_is_y);
    });
    if (mask[3]) sums.finish(db);
  }
  if (mask[1]) input_gradient(dx, dz, w);
  if (mask[2]) weight_gradient_out(dw, dz, x);
}

}  // namespace

// The formulas are in src/cpu/gate_kernel.cpp.
void gate_gradients(detail::GateGradients gradients, const Tensor& grad, const Tensor& v, const Tensor& x,
                    const Tensor& w, const OptionalTensor& b, std::array<bool, 4> mask, bool v_is_y) {
  auto& [dv, dx, dw, db] = gradients;
  if (v.numel() == 0) {
    for (const Tensor& t : {dx, dw, db}) t.zero_();
    return;
  }
  const Tensor g_rows = unit_columns(detail::as_rows(grad)), v_rows = unit_columns(detail::as_rows(v));
  const Tensor x_rows = detail::as_rows(x), dv_rows = mask[0] ? detail::as_rows(dv) : dv;
  const Tensor dx_rows = mask[1] ? detail::as_rows(dx) : dx;
  const OptionalTensor bias = contiguous(b);
  const GradientCall call = gradient_call(g_rows, v_rows, x_rows, w, bias, v_is_y);
  if (in_one_pass(gradients, call, mask)) return;
  const bool rounds_x = x.scalar_type() != w.scalar_type();
  if (!rounds_x || !mask[2]) {
    by_cotangents({dv_rows, dx_rows, dw, db}, g_rows, v_rows, x_rows, w, bias, mask, v_is_y,
                  rounds_x ? std::nullopt : call);
    return;
  }
  for_each_rounded_panel(x_rows, {dw, db}, [&](int64_t begin, const Tensor& x_panel, const auto& parts) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, x_panel.size(0)); };
    const Tensor g_panel = panel(g_rows), v_panel = panel(v_rows);
    by_cotangents({mask[0] ? panel(dv_rows) : dv, mask[1] ? panel(dx_rows) : dx, parts[0], parts[1]}, g_panel, v_panel,
                  x_panel, w, bias, mask, v_is_y, gradient_call(g_panel, v_panel, x_panel, w, bias, v_is_y));
  });
}

namespace {

detail::GateGradients gate_backward_cuda(const Tensor& grad, const Tensor& v, const Tensor& x, const Tensor& w,
                                         const OptionalTensor& b, std::array<bool, 4> mask, bool v_is_y) {
  detail::check_gate_backward(grad, v, x, w, b, mask);
  const c10::cuda::CUDAGuard guard(v.device());
  detail::GateGradients gradients = detail::empty_gate_gradients(v, x, w, mask);
  gate_gradients(gradients, grad, v, x, w, b, mask, v_is_y);
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("gate", gate_cuda);
  m.impl("gate_", gate_cuda_);
  m.impl("_gate_backward", gate_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
