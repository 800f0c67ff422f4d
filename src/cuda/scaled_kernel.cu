#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/_scaled_mm_cuda_dispatch.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <optional>

#include "cuda/base/device.h"
#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/products.h"
#include "cuda/passes/pass.cuh"
#include "ops/common.h"
#include "ops/glu.h"
#include "ops/kernel_path.h"
#include "ops/scaled.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check_capability(const char* op) {
  const cudaDeviceProp& device = device_properties();
  TORCH_CHECK(device.major > 8 || (device.major == 8 && device.minor >= 9), op,
              ": expected a GPU of compute capability 8.9 or higher for float8_e4m3fn, got ", device.major, ".",
              device.minor);
}

// Scales and biases as the kernels read them. A single scale applies to all rows.
struct Factors {
  Tensor scale_x, scale_w, bias;  // contiguous; the bias has the result's type or float32, or is undefined

  Factors(const Tensor& scale_x, const Tensor& scale_w, const OptionalTensor& b)
      : scale_x(scale_x.contiguous()), scale_w(scale_w.contiguous()), bias(b ? b->contiguous() : Tensor()) {}

  static gemm::Scale scale(const Tensor& t) { return {t.const_data_ptr<float>(), t.numel() > 1}; }

  // Null if it is not of this type.
  template <class T>
  const T* bias_data() const {
    const bool has_type = bias.defined() && bias.scalar_type() == c10::CppTypeToScalarType<T>::value;
    return has_type ? bias.const_data_ptr<T>() : nullptr;
  }
};

// y = F(z * scale_x * scale_w + bias) for a float32 matrix z, times v if there is one; v may be y. At most one of the
// two biases is not null.
template <class F, class T>
struct ScaledPass {
  const float* z;
  const T* v;
  T* y;
  gemm::Scale scale_x, scale_w;
  const float* bias;
  const T* rounded_bias;
  int64_t columns_of_y;

  struct Loaded {
    float z, v, scale, bias;
  };

  __device__ Loaded load(int64_t row, int64_t column) const {
    const int64_t at = row * columns_of_y + column;
    const float of_column = bias != nullptr           ? bias[column]
                            : rounded_bias != nullptr ? static_cast<float>(rounded_bias[column])
                                                      : 0.f;
    return {z[at], v != nullptr ? static_cast<float>(v[at]) : 1.f, scale_w.data[scale_w.each ? column : 0], of_column};
  }
  __device__ void finish(int64_t row, int64_t column, const Loaded& loaded) const {
    const float scaled = loaded.z * scale_x.data[scale_x.each ? row : 0] * loaded.scale;
    y[row * columns_of_y + column] = static_cast<T>(loaded.v * activate<F, T>(scaled + loaded.bias));
  }
};

// z = x @ w.T in float32, without scales: by cuBLAS in eight bits or, if it doesn't support these sizes, from copies in
// bfloat16, which represents all values of float8_e4m3fn.
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

// A linear layer of eight-bit operands; all tensors are matrices.
struct ScaledLinear {
  Tensor x, w;
  Factors factors;

  ScaledLinear(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w, const OptionalTensor& b)
      : x(gemm::readable(detail::as_rows(x))), w(gemm::readable(w)), factors(scale_x, scale_w, b) {}
};

// By a kernel with everything in its epilogue. Returns false, with nothing done, if none can run or none is wanted.
template <class Operation>
bool fused(const Tensor& y, const ScaledLinear& linear, const OptionalTensor& v) {
  const Tensor &x = linear.x, &w = linear.w;
  const auto a = gemm::operand(x), b = gemm::operand(w), c = gemm::operand(v ? *v : y), d = gemm::operand(y);
  const auto sizes = gemm::sm90_case(y.size(0), y.size(1), x.size(1), x.scalar_type());
  if (y.scalar_type() != at::kBFloat16 || x.size(1) == 0 || !a || !b || !c || !d || !sizes ||
      detail::kernel_path() == detail::KernelPath::kCublas) {
    return false;
  }
  gemm::Problem problem;
  problem.m = static_cast<int>(y.size(0));
  problem.n = static_cast<int>(y.size(1));
  problem.k = static_cast<int>(x.size(1));
  problem.a = *a;
  problem.b = *b;
  problem.c = *c;
  problem.d = *d;
  problem.bias = linear.factors.bias_data<float>();
  problem.bias2 = linear.factors.bias_data<c10::BFloat16>();
  problem.scale_a = Factors::scale(linear.factors.scale_x);
  problem.scale_b = Factors::scale(linear.factors.scale_w);
  return gemm::run_chosen<Operation>(problem, *sizes, y);
}

// By a float32 product of panels of rows, and a pass.
template <class F, class T>
void in_panels(const Tensor& y, const ScaledLinear& linear, const OptionalTensor& v) {
  const Product product(linear.x, linear.w);
  const Factors& factors = linear.factors;
  const int64_t columns = y.size(1);
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(float)) + 2 * linear.x.size(1);
  const Tensor source = v ? v->contiguous() : Tensor();
  for_each_panel(y.size(0), row_bytes, [&](int64_t begin, int64_t end) {
    const Tensor z = at::detail::empty_cuda({end - begin, columns}, linear.x.options().dtype(at::kFloat));
    product.out(z, begin, end);
    gemm::Scale of_rows = Factors::scale(factors.scale_x);
    if (of_rows.each) of_rows.data += begin;
    const T* const from = source.defined() ? source.const_data_ptr<T>() + begin * columns : nullptr;
    launch_pass<1>(
        ScaledPass<F, T>{z.const_data_ptr<float>(), from, y.mutable_data_ptr<T>() + begin * columns, of_rows,
                         Factors::scale(factors.scale_w), factors.bias_data<float>(), factors.bias_data<T>(), columns},
        end - begin, columns);
  });
}

// y = F(linear), times v if there is one. y is contiguous, and may be v.
template <class Operation, class F>
void linear_out(const Tensor& y, const ScaledLinear& linear, const OptionalTensor& v = std::nullopt) {
  if (fused<Operation>(y, linear, v)) return;
  switch (y.scalar_type()) {
    case at::kBFloat16:
      return in_panels<F, c10::BFloat16>(y, linear, v);
    case at::kHalf:
      return in_panels<F, c10::Half>(y, linear, v);
    default:
      return in_panels<F, float>(y, linear, v);
  }
}

Tensor empty_result(const Tensor& x, const Tensor& w, at::ScalarType dtype) {
  return at::detail::empty_cuda(detail::with_last(x.sizes(), w.size(0)), x.options().dtype(dtype));
}

Tensor dense_scaled_cuda(const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                         const OptionalTensor& b, std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType dtype = check_dense_scaled(x, w, scale_x, scale_w, b, out_dtype);
  const c10::cuda::CUDAGuard guard(x.device());
  check_capability("dense.scaled");
  const Tensor y = empty_result(x, w, dtype);
  if (y.numel() == 0) return y;
  linear_out<gemm::ScaledDense, Sigmoid>(detail::as_rows(y), ScaledLinear(x, w, scale_x, scale_w, b));
  return y;
}

Tensor gate_scaled_cuda(const Tensor& v, const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w,
                        const OptionalTensor& b) {
  check_gate_scaled(v, x, w, scale_x, scale_w, b);
  const c10::cuda::CUDAGuard guard(x.device());
  check_capability("gate.scaled");
  const Tensor y = empty_result(x, w, v.scalar_type());
  if (y.numel() == 0) return y;
  linear_out<gemm::ScaledGateSigmoid, Sigmoid>(detail::as_rows(y), ScaledLinear(x, w, scale_x, scale_w, b),
                                               gemm::readable(detail::as_rows(v)));
  return y;
}

// The result first holds the value, which the gate then overwrites: one more trip through memory, but no other tensor.
Tensor glu_scaled_cuda(const Tensor& x, const Tensor& w, const Tensor& wg, const Tensor& scale_x, const Tensor& scale_w,
                       const Tensor& scale_wg, const OptionalTensor& b, const OptionalTensor& bg,
                       std::string_view activation, std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType dtype = check_glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, bg, activation, out_dtype);
  const c10::cuda::CUDAGuard guard(x.device());
  check_capability("glu.scaled");
  const Tensor y = empty_result(x, w, dtype);
  if (y.numel() == 0) return y;
  const Tensor y_rows = detail::as_rows(y);
  const ScaledLinear value(x, w, scale_x, scale_w, b), gate(value.x, wg, scale_x, scale_wg, bg);
  linear_out<gemm::ScaledProduct, Identity>(y_rows, value);
  if (detail::glu_activation(activation) == detail::GluActivation::kSilu) {
    linear_out<gemm::ScaledGateSilu, Silu>(y_rows, gate, y_rows);
  } else {
    linear_out<gemm::ScaledGateSigmoid, Sigmoid>(y_rows, gate, y_rows);
  }
  return y;
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("dense.scaled", dense_scaled_cuda);
  m.impl("gate.scaled", gate_scaled_cuda);
  m.impl("glu.scaled", glu_scaled_cuda);
}

}  // namespace
}  // namespace torchops::cuda
