#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/_scaled_mm_cuda_dispatch.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <optional>

#include "cuda/gemm/launch.h"
#include "cuda/gemm/operand.h"
#include "cuda/linear.h"
#include "cuda/pass.cuh"
#include "ops/common.h"
#include "ops/dense_path.h"
#include "ops/scaled.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

void check_capability(const char* op) {
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK(device.major > 8 || (device.major == 8 && device.minor >= 9), op,
              ": expected a GPU of compute capability 8.9 or higher for float8_e4m3fn, got ", device.major, ".",
              device.minor);
}

// Scales and biases as the kernels read them. A scale of one row is a scale of all.
struct Factors {
  Tensor scale_x, scale_w, bias;  // contiguous float32; the bias may be undefined

  Factors(const Tensor& scale_x, const Tensor& scale_w, const std::optional<Tensor>& b)
      : scale_x(scale_x.contiguous()),
        scale_w(scale_w.contiguous()),
        bias(b ? b->to(at::kFloat).contiguous() : Tensor()) {}

  static gemm::Scale scale(const Tensor& t) { return {t.const_data_ptr<float>(), t.numel() > 1}; }
  const float* bias_data() const { return bias.defined() ? bias.const_data_ptr<float>() : nullptr; }
};

// y = F(z * scale_x * scale_w + bias) for a matrix z of float32.
template <class F, class T>
struct ScaledPass {
  const float* z;
  T* y;
  gemm::Scale scale_x, scale_w;
  const float* bias;
  int64_t columns_of_y;

  struct Columns {
    float scale, bias;
  };
  using Loaded = float;

  __device__ Columns columns(int64_t column) const {
    return {scale_w.data[scale_w.each ? column : 0], bias != nullptr ? bias[column] : 0.f};
  }
  __device__ Loaded load(int64_t row, int64_t column) const { return z[row * columns_of_y + column]; }
  __device__ void finish(int64_t row, int64_t column, const Loaded& sum, const Columns& of_column) const {
    const float scaled = sum * scale_x.data[scale_x.each ? row : 0] * of_column.scale;
    y[row * columns_of_y + column] = static_cast<T>(activate<F, T>(scaled + of_column.bias));
  }
};

// z = x @ w.T in float32, without scales: by cuBLAS in eight bits, or, where it does not take these sizes, of copies in
// bfloat16, which has all values of float8_e4m3fn.
class Product {
 public:
  Product(const Tensor& x, const Tensor& w)
      : in_eight_bits_(x.size(1) % 16 == 0 && w.size(0) % 16 == 0 && gemm::operand(x) && gemm::operand(w)),
        x_(x),
        w_(w) {
    if (x.size(1) == 0) return;
    in_eight_bits_ ? one_ = at::ones({1}, x.options().dtype(at::kFloat)) : w_ = w.to(at::kBFloat16);
  }

  void out(Tensor z, int64_t begin, int64_t end) const {
    const Tensor rows = x_.narrow(0, begin, end - begin);
    if (x_.size(1) == 0) {
      z.zero_();
    } else if (in_eight_bits_) {
      at::cuda::_scaled_mm_out(z, rows, w_.t(), one_, one_, std::nullopt, std::nullopt, at::kFloat,
                               /*use_fast_accum=*/false);
    } else {
      at::cuda::mm_out(z, rows.to(at::kBFloat16), w_.t(), at::kFloat);
    }
  }

 private:
  bool in_eight_bits_;
  Tensor x_, w_, one_;
};

// By a kernel with all of it in the epilogue. False, with nothing done, where none can run or is wanted.
template <class Operation>
bool fused(const Tensor& y, const Tensor& x, const Tensor& w, const Factors& factors) {
  const auto a = gemm::operand(x), b = gemm::operand(w), d = gemm::operand(y);
  const auto sm_count = gemm::sm90_multiprocessors();
  if (detail::dense_path() == detail::DensePath::kCublas || x.size(1) == 0 || !a || !b || !d || !sm_count) return false;
  gemm::Problem problem;
  problem.m = static_cast<int>(y.size(0));
  problem.n = static_cast<int>(y.size(1));
  problem.k = static_cast<int>(x.size(1));
  problem.a = *a;
  problem.b = *b;
  problem.d = *d;
  problem.bias = factors.bias_data();
  problem.scale_a = Factors::scale(factors.scale_x);
  problem.scale_b = Factors::scale(factors.scale_w);
  const gemm::Case c{problem.m, problem.n, problem.k, 1, gemm::Element::kFloat8, *sm_count};
  return gemm::run_chosen<Operation>(problem, c, y);
}

bool fused(const Tensor& y, const Tensor& x, const Tensor& w, const Factors& factors) {
  if (y.scalar_type() == at::kBFloat16) return fused<gemm::ScaledDense>(y, x, w, factors);
  if (y.scalar_type() == at::kHalf) return fused<gemm::ScaledDenseHalf>(y, x, w, factors);
  return fused<gemm::ScaledDenseFloat>(y, x, w, factors);
}

Tensor dense_scaled_cuda(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                         const std::optional<Tensor>& b, std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType dtype = check_dense_scaled(x, w, scale_x, scale_w, b, out_dtype);
  const c10::cuda::CUDAGuard guard(x.device());
  check_capability("dense.scaled");
  at::DimVector sizes(x.sizes());
  sizes.back() = w.size(0);
  const Tensor y = at::detail::empty_cuda(sizes, x.options().dtype(dtype));
  if (y.numel() == 0) return y;
  const Tensor x_rows = unit_columns(detail::as_rows(x)), w_rows = unit_columns(w), y_rows = detail::as_rows(y);
  const Factors factors(scale_x, scale_w, b);
  if (fused(y_rows, x_rows, w_rows, factors)) return y;
  const Product product(x_rows, w_rows);
  const int64_t columns = y_rows.size(1),
                row_bytes = columns * static_cast<int64_t>(sizeof(float)) + 2 * x_rows.size(1);
  for_each_panel(y_rows.size(0), row_bytes, [&](int64_t begin, int64_t end) {
    const Tensor z = at::detail::empty_cuda({end - begin, columns}, x.options().dtype(at::kFloat));
    product.out(z, begin, end);
    gemm::Scale of_rows = Factors::scale(factors.scale_x);
    if (of_rows.each) of_rows.data += begin;
    const auto pass = [&]<class T>(T* to) {
      launch_pass<1>(ScaledPass<Sigmoid, T>{z.const_data_ptr<float>(), to + begin * columns, of_rows,
                                            Factors::scale(factors.scale_w), factors.bias_data(), columns},
                     end - begin, columns);
    };
    if (dtype == at::kBFloat16) {
      pass(y_rows.mutable_data_ptr<c10::BFloat16>());
    } else if (dtype == at::kHalf) {
      pass(y_rows.mutable_data_ptr<c10::Half>());
    } else {
      pass(y_rows.mutable_data_ptr<float>());
    }
  });
  return y;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) { m.impl("dense.scaled", dense_scaled_cuda); }

}  // namespace
}  // namespace torchops::cuda
