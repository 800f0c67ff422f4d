#include <ATen/Dispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/cat_cuda_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/gemm/launch.h"
#include "cuda/gemm/operand.h"
#include "cuda/gemm/sm80.cuh"
#include "cuda/glu_pass.cuh"
#include "cuda/layer_gradients.h"
#include "cuda/linear.h"
#include "ops/common.h"
#include "ops/dense_path.h"
#include "ops/glu.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using detail::GluActivation;

// Calls f with the activation, the type of w and the width of vectors: 16 bytes if `in_vectors` allows it. in_vectors
// is called with the type and that width.
template <class InVectors, class Call>
void dispatch(const Tensor& w, GluActivation activation, const InVectors& in_vectors, const Call& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, w.scalar_type(), "glu", [&] {
    constexpr int n = kVectorSize<scalar_t>;
    const auto of_width = [&](auto act) {
      in_vectors(scalar_t{}, n) ? f(act, scalar_t{}, std::integral_constant<int, n>{})
                                : f(act, scalar_t{}, std::integral_constant<int, 1>{});
    };
    activation == GluActivation::kSilu ? of_width(Silu{}) : of_width(Sigmoid{});
  });
}

void glu_rows(const Tensor& y, const Tensor& z, const Tensor& u, const OptionalTensor& b, const OptionalTensor& bg,
              GluActivation activation) {
  const int64_t rows = z.size(0), columns = z.size(1);
  const auto in_vectors = [&](auto type, int n) {
    using T = decltype(type);
    return columns % n == 0 && read_rows<T>(z).fits(n) && read_rows<T>(u).fits(n) && write_rows<T>(y).fits(n);
  };
  dispatch(z, activation, in_vectors, [&](auto act, auto type, auto width) {
    using F = decltype(act);
    using T = decltype(type);
    const GluPass<F, T, width()> pass{{read_rows<T>(z), read_rows<T>(u), remaining_bias<T>(b), remaining_bias<T>(bg)},
                                      write_rows<T>(y)};
    launch_pass<width()>(pass, rows, columns);
  });
}

// Both products of glu, or both cotangents, as matrices.
struct Pair {
  Tensor z, u;

  static Pair halves(const Tensor& both) {
    const int64_t n = both.size(1) / 2;
    return {both.narrow(1, 0, n), both.narrow(1, n, n)};
  }
  static Pair rows(const Tensor& z, const Tensor& u) { return {detail::as_rows(z), detail::as_rows(u)}; }
  Pair narrow(int64_t begin, int64_t end) const {
    return {z.narrow(0, begin, end - begin), u.narrow(0, begin, end - begin)};
  }
};
using Products = std::optional<Pair>;

// Calls the kernel for few features, which reads each row once and doesn't store the products, or that for longer sums.
template <class Narrow, class Wide>
bool run_aligned(const gemm::Problem& problem, const gemm::Case& c, const Tensor& y, bool automatic) {
  if (problem.z.data == nullptr && gemm::run_chosen<Narrow>(problem, c, y)) return true;
  return !(automatic && gemm::prefers_cublas_for_glu(c)) && gemm::run_chosen<Wide>(problem, c, y);
}

// glu of the rows of x by a kernel of gemm/sm90 that writes only the result and, if they are wanted, the products.
// Returns false, with nothing done, if none can run or if cuBLAS is faster and `automatic`. All tensors are matrices.
bool fused_aligned(const Tensor& y, const Products& products, const Tensor& x, const Tensor& w, const Tensor& wg,
                   const OptionalTensor& b, const OptionalTensor& bg, GluActivation activation, bool automatic) {
  if (w.size(0) % 8 != 0) return false;  // TMA writes whole pieces of 16 bytes
  const auto from_x = gemm::operand(x), from_w = gemm::operand(w), from_wg = gemm::operand(wg), to_y = gemm::operand(y);
  const auto c = gemm::sm90_case(x.size(0), w.size(0), w.size(1), w.scalar_type());
  if (!from_x || !from_w || !from_wg || !to_y || !c) return false;
  gemm::Problem problem;
  problem.m = static_cast<int>(c->m);
  problem.n = static_cast<int>(c->n);
  problem.k = static_cast<int>(c->k);
  problem.a = *from_x;
  problem.b = *from_w;
  problem.b2 = *from_wg;
  problem.d = *to_y;
  problem.bias = b ? b->const_data_ptr() : nullptr;
  problem.bias2 = bg ? bg->const_data_ptr() : nullptr;
  if (products) {
    const auto to_z = gemm::operand(products->z), to_u = gemm::operand(products->u);
    if (!to_z || !to_u) return false;
    problem.z = *to_z;
    problem.z2 = *to_u;
  }
  return activation == GluActivation::kSilu
             ? run_aligned<gemm::GluSilu, gemm::WideGluSilu>(problem, *c, y, automatic)
             : run_aligned<gemm::GluSigmoid, gemm::WideGluSigmoid>(problem, *c, y, automatic);
}

// The same by any fused kernel, if that is wanted.
bool fused(const Tensor& y, const Products& products, const Tensor& x, const Tensor& w, const Tensor& wg,
           const OptionalTensor& b, const OptionalTensor& bg, GluActivation activation) {
  const detail::DensePath path = detail::dense_path();
  const bool automatic = detail::is_automatic(path);
  if (path == detail::DensePath::kCublas || x.size(1) == 0) return false;
  if (x.scalar_type() == w.scalar_type() && fused_aligned(y, products, x, w, wg, b, bg, activation, automatic))
    return true;
  if (products) return false;
  const gemm::Sm80Tensors tensors{.d = y, .a = x, .b = w, .bias = b, .b2 = &wg, .bias2 = &bg};
  return activation == GluActivation::kSilu ? gemm::run_sm80<gemm::GluRule<Silu>>(tensors, automatic)
                                            : gemm::run_sm80<gemm::GluRule<Sigmoid>>(tensors, automatic);
}

// y for all rows of x, as matrices; and the products if they are wanted.
void glu_out(const Tensor& y, const Products& products, const Tensor& x, const Tensor& w, const Tensor& wg,
             const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation) {
  const GluActivation act = detail::glu_activation(activation);
  const OptionalTensor bias = contiguous(b), gate_bias = contiguous(bg);
  if (fused(y, products, x, w, wg, bias, gate_bias, act)) return;
  const bool rounded = x.scalar_type() != w.scalar_type();
  const int64_t product_bytes = products ? 0 : product_row_bytes(w);
  const int64_t step = rows_of_panel(y.size(0), product_row_bytes(w), product_bytes + rounded_row_bytes(x, w));
  for_each_panel_of(y.size(0), step, [&](int64_t begin, int64_t end) {
    const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    const Tensor out = panel(y), x_panel = panel(x).to(w.scalar_type());
    const Products products_panel = products ? Products(products->narrow(begin, end)) : std::nullopt;
    if (rounded && fused(out, products_panel, x_panel, w, wg, bias, gate_bias, act)) return;
    if (products) {
      const auto& [z, u] = *products_panel;
      linear_with_bias_out(z, x_panel, w, bias);
      linear_with_bias_out(u, x_panel, wg, gate_bias);
      glu_rows(out, z, u, std::nullopt, std::nullopt, act);
    } else {
      const Tensor u = at::detail::empty_cuda(out.sizes(), w.options());
      linear_out(out, x_panel, w, bias);
      linear_out(u, x_panel, wg, gate_bias);
      glu_rows(out, out, u, bias, gate_bias, act);
    }
  });
}

Tensor glu_cuda(const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg,
                std::string_view activation) {
  check_glu(x, w, wg, b, bg, activation);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor y = at::detail::empty_cuda(detail::with_last(x.sizes(), w.size(0)), w.options());
  if (y.numel() > 0) glu_out(detail::as_rows(y), std::nullopt, detail::as_rows(x), w, wg, b, bg, activation);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> glu_with_products_cuda(const Tensor& x, const Tensor& w, const Tensor& wg,
                                                          const OptionalTensor& b, const OptionalTensor& bg,
                                                          std::string_view activation) {
  detail::check_glu_with_products(x, w, wg, b, bg, activation);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto empty = [&] { return at::detail::empty_cuda(detail::with_last(x.sizes(), w.size(0)), w.options()); };
  Tensor y = empty(), z = empty(), u = empty();
  if (y.numel() > 0) glu_out(detail::as_rows(y), Pair::rows(z, u), detail::as_rows(x), w, wg, b, bg, activation);
  return {y, z, u};
}

// Makes the cotangents, and adds them to the sums.
void glu_backward_rows(PassSums& sums, const Pair& cotangents, const Tensor& g, const Pair& products,
                       const OptionalTensor& b, const OptionalTensor& bg, GluActivation activation) {
  const auto& [dz, du] = cotangents;
  const auto& [z, u] = products;
  const int64_t rows = z.size(0), columns = z.size(1);
  const auto in_vectors = [&](auto type, int n) {
    using T = decltype(type);
    return columns % n == 0 && read_rows<T>(g).fits(n) && read_rows<T>(z).fits(n) && read_rows<T>(u).fits(n) &&
           write_rows<T>(dz).fits(n) && write_rows<T>(du).fits(n);
  };
  dispatch(z, activation, in_vectors, [&](auto act, auto type, auto width) {
    using F = decltype(act);
    using T = decltype(type);
    const GluBackwardPass<F, T, width()> pass{read_rows<T>(g),      read_rows<T>(z),   read_rows<T>(u),
                                              write_rows<T>(dz),    write_rows<T>(du), remaining_bias<T>(b),
                                              remaining_bias<T>(bg)};
    sums.launch<width()>(pass, rows);
  });
}

// The arguments of the gradient kernels; nullopt if none can run. All tensors are matrices. With a float32 x, only
// in_one_pass() can use them.
std::optional<std::pair<gemm::GradientProblem, gemm::Case>> gradient_problem(const Tensor& g, const Tensor& x,
                                                                             const Tensor& w, const Tensor& wg,
                                                                             const OptionalTensor& b,
                                                                             const OptionalTensor& bg) {
  if (detail::dense_path() == detail::DensePath::kCublas || w.size(0) % 8 != 0 || w.size(1) == 0) return std::nullopt;
  const auto from_g = gemm::operand(g), from_x = gemm::operand(x), from_w = gemm::operand(w),
             from_wg = gemm::operand(wg);
  const auto c = gemm::sm90_case(x.size(0), w.size(0), w.size(1), w.scalar_type());
  if (!from_g || !from_x || !from_w || !from_wg || !c) return std::nullopt;
  gemm::GradientProblem problem;
  problem.m = static_cast<int>(c->m);
  problem.n = static_cast<int>(c->n);
  problem.k = static_cast<int>(c->k);
  problem.grad = *from_g;
  problem.x = *from_x;
  problem.w = *from_w;
  problem.w2 = *from_wg;
  problem.bias = b ? b->const_data_ptr() : nullptr;
  problem.bias2 = bg ? bg->const_data_ptr() : nullptr;
  problem.is_wide = x.scalar_type() != w.scalar_type();
  return std::pair(problem, *c);
}

// All gradients in one pass over the rows. Returns false, with nothing done, if that kernel cannot run or not all
// gradients are wanted. The gradients are contiguous.
bool in_one_pass(const detail::GluGradients& gradients, gemm::GradientProblem problem, const gemm::Case& c,
                 GluActivation activation, std::array<bool, 5> mask) {
  if (!mask[0] || !mask[1] || !mask[2] || c.k % 8 != 0) return false;
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  problem.dx = dx.mutable_data_ptr();
  problem.dw = dw.mutable_data_ptr();
  problem.dw2 = dwg.mutable_data_ptr();
  problem.dbias = mask[3] ? db.mutable_data_ptr() : nullptr;
  problem.dbias2 = mask[4] ? dbg.mutable_data_ptr() : nullptr;
  return activation == GluActivation::kSilu ? gemm::run_chosen<gemm::GluSiluGradients>(problem, c, dx)
                                            : gemm::run_chosen<gemm::GluSigmoidGradients>(problem, c, dx);
}

// All gradients but dx by a kernel that recomputes both products; if dx is wanted, also dz and du in alternating groups
// of columns. False, with nothing done, if it cannot run or not all are wanted. The gradients are contiguous.
bool weights_in_one_pass(const detail::GluGradients& gradients, const Tensor& cotangents, gemm::GradientProblem problem,
                         const gemm::Case& c, GluActivation activation, std::array<bool, 5> mask) {
  if (!mask[1] || !mask[2] || c.k % 8 != 0) return false;
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  if (mask[0]) problem.dz = *gemm::operand(cotangents);
  problem.dw = dw.mutable_data_ptr();
  problem.dw2 = dwg.mutable_data_ptr();
  problem.dbias = mask[3] ? db.mutable_data_ptr() : nullptr;
  problem.dbias2 = mask[4] ? dbg.mutable_data_ptr() : nullptr;
  return activation == GluActivation::kSilu ? gemm::run_chosen<gemm::GluSiluWeightGradients>(problem, c, dw)
                                            : gemm::run_chosen<gemm::GluSigmoidWeightGradients>(problem, c, dw);
}

// The rows of w and wg in the alternating order in which weights_in_one_pass() writes their cotangents.
Tensor by_turns(const Tensor& w, const Tensor& wg) {
  const auto turns = [](const Tensor& t) { return t.reshape({-1, gemm::GradientProblem::kTurn, t.size(1)}); };
  return at::cuda::cat(at::TensorList({turns(w), turns(wg)}), 1).view({-1, w.size(1)});
}

// dz, du and the gradients of biases by a kernel that recomputes both products without storing them. Returns false,
// with nothing done, if it cannot run or cuBLAS is faster.
bool fused_cotangents(const Pair& cotangents, const Tensor& db, const Tensor& dbg, gemm::GradientProblem problem,
                      const gemm::Case& c, GluActivation activation, std::array<bool, 5> mask) {
  const auto& [dz, du] = cotangents;
  if (detail::is_automatic(detail::dense_path()) && gemm::prefers_cublas_for_glu(c)) return false;
  const auto to_dz = gemm::operand(dz), to_du = gemm::operand(du);
  if (!to_dz || !to_du) return false;
  problem.dz = *to_dz;
  problem.dz2 = *to_du;
  problem.dbias = mask[3] ? db.mutable_data_ptr() : nullptr;
  problem.dbias2 = mask[4] ? dbg.mutable_data_ptr() : nullptr;
  return activation == GluActivation::kSilu ? gemm::run_chosen<gemm::GluSiluCotangents>(problem, c, dz)
                                            : gemm::run_chosen<gemm::GluSigmoidCotangents>(problem, c, dz);
}

// Stacking both weights makes one product of two; for few rows, it costs more.
bool stacks_weights(int64_t rows, int64_t out_features) { return rows > 4 * out_features; }

// The gradients of biases, if they are wanted.
void sum_cotangents(const detail::GluGradients& gradients, const Pair& cotangents, std::array<bool, 5> mask) {
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  if (mask[3]) sum_columns(db, cotangents.z);
  if (mask[4]) sum_columns(dbg, cotangents.u);
}

// The same on every GPU from compute capability 8.0 on. Other passes sum dz and du, as they are rounded; `both` has
// them side by side.
bool portable_cotangents(const detail::GluGradients& gradients, const Tensor& both, const Tensor& g, const Tensor& x,
                         const Tensor& w, const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg,
                         GluActivation activation, std::array<bool, 5> mask) {
  const detail::DensePath path = detail::dense_path();
  if (path == detail::DensePath::kCublas) return false;
  const auto [dz, du] = Pair::halves(both);
  const gemm::Sm80Tensors tensors{.d = dz, .a = x, .b = w, .bias = b, .b2 = &wg, .bias2 = &bg, .g = &g, .d2 = &du};
  const bool automatic = detail::is_automatic(path);
  const bool done = activation == GluActivation::kSilu
                        ? gemm::run_sm80<gemm::CotangentsOf<gemm::GluRule<Silu>>>(tensors, automatic)
                        : gemm::run_sm80<gemm::CotangentsOf<gemm::GluRule<Sigmoid>>>(tensors, automatic);
  if (done) sum_cotangents(gradients, {dz, du}, mask);
  return done;
}

// The gradients of x and of the weights, if they are wanted, from both cotangents side by side. `stack` has both
// weights, or is undefined.
void from_cotangents(const detail::GluGradients& gradients, const Tensor& both, const Tensor& x, const Tensor& w,
                     const Tensor& wg, const Tensor& stack, std::array<bool, 5> mask, bool adds) {
  const auto& [dx, dw, dwg, db, dbg] = gradients;
  const auto [dz, du] = Pair::halves(both);
  const int64_t n = w.size(0);
  const bool stacks = stacks_weights(both.size(0), n);
  if (mask[0] && stacks) {
    input_gradient(detail::as_rows(dx), both, stack.defined() ? stack : stacked(w, wg), adds);
  } else if (mask[0]) {
    const Tensor dx_rows = detail::as_rows(dx);
    input_gradient(dx_rows, dz, w, adds);
    input_gradient(dx_rows, du, wg, /*accumulate=*/true);
  }
  if (mask[1] && mask[2] && stacks) {
    const Tensor both_weights = weight_gradient(both, x);
    dw.copy_(both_weights.narrow(0, 0, n));
    dwg.copy_(both_weights.narrow(0, n, n));
  } else {
    if (mask[1]) weight_gradient_out(dw, dz, x);
    if (mask[2]) weight_gradient_out(dwg, du, x);
  }
}

}  // namespace

// The formulas are in src/cpu/glu_kernel.cpp. dz and du are side by side, so that the products that make or read them
// are one call of cuBLAS each, if x needs no rounding.
void glu_gradients(detail::GluGradients gradients, const Tensor& grad, const Tensor& x, const Tensor& w,
                   const Tensor& wg, const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation,
                   std::array<bool, 5> mask, const OptionalTensor& z, const OptionalTensor& u, bool adds) {
  auto& [dx, dw, dwg, db, dbg] = gradients;
  if (grad.numel() == 0) {
    for (const Tensor& t : {dw, dwg, db, dbg}) t.zero_();
    if (!adds) dx.zero_();
    return;
  }
  const GluActivation act = detail::glu_activation(activation);
  const Tensor g_rows = unit_columns(detail::as_rows(grad)), x_rows = detail::as_rows(x);
  const OptionalTensor bias = contiguous(b), gate_bias = contiguous(bg);
  auto problem = z ? std::nullopt : gradient_problem(g_rows, x_rows, w, wg, bias, gate_bias);
  if (problem) {
    const Tensor own = adds && mask[0] ? at::empty_like(x_rows, at::MemoryFormat::Contiguous) : dx;
    if (in_one_pass({own, dw, dwg, db, dbg}, problem->first, problem->second, act, mask)) {
      if (adds) dx.add_(own);
      return;
    }
    if (problem->first.is_wide) problem = std::nullopt;
  }
  const int64_t rows = g_rows.size(0), n = w.size(0);
  const Tensor both = at::detail::empty_cuda({rows, 2 * n}, w.options());
  if (problem && weights_in_one_pass(gradients, both, problem->first, problem->second, act, mask)) {
    if (mask[0]) input_gradient(detail::as_rows(dx), both, by_turns(w, wg), adds);
    return;
  }
  const Pair cotangents = Pair::halves(both);
  const bool stacks = stacks_weights(rows, n);
  const bool are_made =
      (problem && fused_cotangents(cotangents, db, dbg, problem->first, problem->second, act, mask)) ||
      (!z && portable_cotangents(gradients, both, g_rows, x_rows, w, wg, bias, gate_bias, act, mask));
  const Products kept = z ? Products(Pair::rows(*z, *u)) : std::nullopt;
  const bool recomputes = !are_made && !kept;
  const Tensor stack = stacks && (mask[0] || recomputes) ? stacked(w, wg) : Tensor();
  if (!are_made) {
    const OptionalTensor stacked_bias = stacks && recomputes ? stacked(bias, gate_bias) : std::nullopt;
    const int64_t step = rows_of_panel(rows, product_row_bytes(w), rounded_row_bytes(x, w));
    PassSums sums(mask[3] || mask[4], w, 2, rows, step, n);
    for_each_panel_of(rows, step, [&](int64_t begin, int64_t end) {
      const auto panel = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
      const Pair to = cotangents.narrow(begin, end);
      if (kept) {
        glu_backward_rows(sums, to, panel(g_rows), kept->narrow(begin, end), std::nullopt, std::nullopt, act);
        return;
      }
      const Tensor x_panel = panel(x_rows).to(w.scalar_type());
      if (stacks) {
        linear_out(panel(both), x_panel, stack, stacked_bias);
      } else {
        linear_out(to.z, x_panel, w, bias);
        linear_out(to.u, x_panel, wg, gate_bias);
      }
      glu_backward_rows(sums, to, panel(g_rows), to, bias, gate_bias, act);
    });
    sums.finish(mask[3] ? db : Tensor(), mask[4] ? dbg : Tensor());
  }
  from_cotangents(gradients, both, x_rows, w, wg, stack, mask, adds);
}

bool glu_gradients_from_channels(const detail::GluGradients& gradients, const ChannelPanel<float>& grad,
                                 const Tensor& x, const Tensor& w, const Tensor& wg, const OptionalTensor& b,
                                 const OptionalTensor& bg, std::array<bool, 5> mask, bool adds) {
  const OptionalTensor bias = contiguous(b), gate_bias = contiguous(bg);
  const Tensor both = at::detail::empty_cuda({x.size(0), 2 * w.size(0)}, w.options());
  const auto [dz, du] = Pair::halves(both);
  const gemm::Sm80Tensors tensors{.d = dz, .a = x, .b = w, .bias = bias, .b2 = &wg, .bias2 = &gate_bias, .d2 = &du};
  if (!gemm::run_float32_from_channels<gemm::CotangentsOf<gemm::GluRule<Sigmoid>>>(tensors, grad)) return false;
  sum_cotangents(gradients, {dz, du}, mask);
  from_cotangents(gradients, both, x, w, wg, {}, mask, adds);
  return true;
}

namespace {

detail::GluGradients glu_backward_cuda(const Tensor& grad, const Tensor& x, const Tensor& w, const Tensor& wg,
                                       const OptionalTensor& b, const OptionalTensor& bg, std::string_view activation,
                                       std::array<bool, 5> mask, const OptionalTensor& z, const OptionalTensor& u) {
  detail::check_glu_backward(grad, x, w, wg, b, bg, activation, mask, z, u);
  const c10::cuda::CUDAGuard guard(x.device());
  detail::GluGradients gradients = detail::empty_glu_gradients(x, w, mask);
  glu_gradients(gradients, grad, x, w, wg, b, bg, activation, mask, z, u);
  return gradients;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("glu", glu_cuda);
  m.impl("_glu", glu_with_products_cuda);
  m.impl("_glu_backward", glu_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
