#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/addmm_cuda_dispatch.h>
#include <ATen/ops/as_strided_cuda_dispatch.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>
#include <optional>

#include "cuda/gemm/dense.h"
#include "cuda/gemm/dense_backward.h"
#include "cuda/gemm/dense_pointwise.cuh"
#include "cuda/gemm/few_rows.cuh"
#include "ops/common.h"
#include "ops/dense.h"

namespace torchops::cuda {
namespace {

using at::Tensor;

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

using gemm::DenseProblem;

// Whether the rows of a matrix are there for 16-byte loads and for the copy engine.
bool rows_fit(const Tensor& t) {
  constexpr int64_t most = std::numeric_limits<int>::max();
  const int64_t stride = t.stride(0);
  return t.size(0) <= most && t.size(1) <= most && (t.stride(1) == 1 || t.size(1) == 1) && stride >= t.size(1) &&
         stride * t.element_size() % 16 == 0 && stride * t.element_size() < int64_t{1} << 40 &&
         aligned(t.const_data_ptr());
}

template <class T, int row_groups>
void launch_few_rows(const DenseProblem& p) {
  const auto blocks = static_cast<unsigned>(ceil_div(p.n, kFewRowsColumns));
  few_rows_kernel<T, row_groups><<<blocks, 32 * kFewRowsWarps, 0, at::cuda::getCurrentCUDAStream()>>>(
      static_cast<const T*>(p.x), static_cast<const T*>(p.w), static_cast<const T*>(p.bias), static_cast<T*>(p.y), p.m,
      p.n, p.k, p.x_stride, p.w_stride);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Up to 16 rows, the kernel for few rows takes hardly longer than w takes to be read, on an H100 less than cuBLAS takes
// for the product alone. At 32 rows, reading x has made it slower than that. False, with nothing done, where it cannot
// run.
bool run_few_rows(const DenseProblem& p, at::ScalarType dtype) {
  if (p.m > 16 || p.k % 8 != 0) return false;
  if (dtype == at::kBFloat16) {
    p.m > 8 ? launch_few_rows<c10::BFloat16, 2>(p) : launch_few_rows<c10::BFloat16, 1>(p);
  } else if (dtype == at::kHalf) {
    p.m > 8 ? launch_few_rows<c10::Half, 2>(p) : launch_few_rows<c10::Half, 1>(p);
  } else {
    return false;
  }
  return true;
}

#ifdef TORCHOPS_WITH_SM90A
using gemm::DenseTiling;
using gemm::DenseType;

std::optional<DenseType> fused_type(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return DenseType::kBFloat16;
  if (dtype == at::kHalf) return DenseType::kFloat16;
  if (dtype != at::kFloat) return std::nullopt;
  // Set by both of torch's interfaces. allowTF32CuBLAS() is the old one, and throws where the new one has been used.
  const auto precision = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::TF32 ? std::optional(DenseType::kTF32) : std::nullopt;
}

int64_t tiles(const DenseProblem& p, int tile_m, int tile_n) { return ceil_div(p.m, tile_m) * ceil_div(p.n, tile_n); }

// cuBLAS divides a long sum among multiprocessors that would have no tile.
bool prefers_cublas(const DenseProblem& p, int sm_count) {
  return p.m < 16 || (p.k >= 512 && tiles(p, 64, 128) * 2 <= sm_count);
}

// The fastest tiling on an H100, of those measured (bfloat16; 45 shapes, 16 to 1048576 rows, k and n from 64 to
// 8192).
DenseTiling choose_tiling(const DenseProblem& p, DenseType type, int sm_count) {
  // Few outputs: smaller tiles, so that more multiprocessors have one.
  if (p.n <= 64 || tiles(p, 128, 128) * 2 <= sm_count) return DenseTiling::k128x64;
  // A result that is long and narrow is bound by memory: many small tiles keep more loads and stores in flight.
  if (p.n <= 128 && p.k <= 512) return DenseTiling::k64x128;
  // One step along k leaves nothing to overlap the epilogue with: better a large one.
  if (p.k <= 64 && p.n > 256) return DenseTiling::k128x256;
  // Where x is the larger operand, share what is loaded of it, unless that leaves one tile in a row alone.
  if (type != DenseType::kTF32 && p.n <= 2048 && p.m >= int64_t{2} * p.n && ceil_div(p.n, 128) % 2 == 0) {
    return p.k <= 256 ? DenseTiling::k128x128ResidentW : DenseTiling::k128x128SharedX;
  }
  // Two steps along k are little too, and a long sum is bound by the traffic of the tiles.
  if ((p.k <= 128 && p.n > 512) || (p.k > 4096 && tiles(p, 128, 256) * 4 >= sm_count * 3)) return DenseTiling::k128x256;
  // One wave of large tiles instead of two of small ones.
  const bool one_wave = p.m >= 2048 && tiles(p, 128, 128) > sm_count && tiles(p, 128, 256) <= sm_count;
  return one_wave && p.n > 128 ? DenseTiling::k128x256 : DenseTiling::k128x128;
}

template <DenseType type>
cudaError_t run_tiles(const DenseProblem& problem, DenseTiling tiling, cudaStream_t stream) {
  if (tiling == DenseTiling::k128x256) return gemm::run_dense<type, DenseTiling::k128x256>(problem, stream);
  if (tiling == DenseTiling::k64x128) return gemm::run_dense<type, DenseTiling::k64x128>(problem, stream);
  if (tiling == DenseTiling::k128x64) return gemm::run_dense<type, DenseTiling::k128x64>(problem, stream);
  if constexpr (type != DenseType::kTF32) {
    if (tiling == DenseTiling::k128x128SharedX) {
      return gemm::run_dense<type, DenseTiling::k128x128SharedX>(problem, stream);
    }
    if (tiling == DenseTiling::k128x128ResidentW) {
      return gemm::run_dense<type, DenseTiling::k128x128ResidentW>(problem, stream);
    }
  }
  return gemm::run_dense<type, DenseTiling::k128x128>(problem, stream);
}

// False, with nothing done, where the tiled kernel cannot run or, on the path "auto", is not the faster one.
bool run_tiles(const DenseProblem& problem, at::ScalarType dtype, detail::DensePath path) {
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  if (device.major != 9 || device.minor != 0) return false;
  const std::optional<DenseType> type = fused_type(dtype);
  if (!type) return false;
  const int sm_count = device.multiProcessorCount;
  if (path == detail::DensePath::kAuto && prefers_cublas(problem, sm_count)) return false;
  const auto run = *type == DenseType::kBFloat16  ? run_tiles<DenseType::kBFloat16>
                   : *type == DenseType::kFloat16 ? run_tiles<DenseType::kFloat16>
                                                  : run_tiles<DenseType::kTF32>;
  const cudaError_t error = run(problem, choose_tiling(problem, *type, sm_count), at::cuda::getCurrentCUDAStream());
  if (error == cudaErrorNotSupported) return false;
  C10_CUDA_CHECK(error);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}
#else
bool run_tiles(const DenseProblem&, at::ScalarType, detail::DensePath) { return false; }
#endif

// False, with nothing done, where no fused kernel can run or is wanted. All tensors are matrices.
bool fused(const Tensor& y, const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  const detail::DensePath path = detail::dense_path();
  if (path == detail::DensePath::kCublas || x.size(1) == 0 || !rows_fit(x) || !rows_fit(w)) return false;
  const DenseProblem problem{x.const_data_ptr(),
                             w.const_data_ptr(),
                             b ? b->const_data_ptr() : nullptr,
                             y.mutable_data_ptr(),
                             x.stride(0),
                             w.stride(0),
                             static_cast<int>(y.size(0)),
                             static_cast<int>(y.size(1)),
                             static_cast<int>(x.size(1))};
  return run_few_rows(problem, x.scalar_type()) || (rows_fit(y) && run_tiles(problem, x.scalar_type(), path));
}

template <class T, int batch>
void launch_bias_sigmoid(const Tensor& y, const T* bias) {
  const int64_t elements = y.numel(), columns = y.size(1);
  const auto kernel = columns % kVectorSize<T> == 0 && aligned(bias) ? bias_sigmoid_kernel<T, true, batch>
                                                                     : bias_sigmoid_kernel<T, false, batch>;
  constexpr int64_t step = kPassThreads * kVectorSize<T>;
  kernel<<<static_cast<unsigned>(ceil_div(elements, batch * step)), kPassThreads, 0,
           at::cuda::getCurrentCUDAStream()>>>(y.mutable_data_ptr<T>(), bias, elements, columns, step % columns);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// y = sigmoid(y + b) for a contiguous matrix y. Several vectors for each thread, unless that would idle
// multiprocessors.
void bias_sigmoid_(const Tensor& y, const std::optional<Tensor>& b) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "dense", [&] {
    const scalar_t* const bias = b ? b->const_data_ptr<scalar_t>() : nullptr;
    constexpr int64_t few_bytes = int64_t{2} << 20;
    if (static_cast<int64_t>(y.nbytes()) <= few_bytes) {
      launch_bias_sigmoid<scalar_t, 1>(y, bias);
    } else {
      launch_bias_sigmoid<scalar_t, 4>(y, bias);
    }
  });
}

Tensor dense_cuda(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  check_dense(x, w, b);
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t in_features = w.size(1), out_features = w.size(0);
  at::DimVector sizes(x.sizes());
  sizes.back() = out_features;
  Tensor y = at::detail::empty_cuda(sizes, x.options());
  if (y.numel() == 0) return y;
  const Tensor x_rows = x.dim() == 2 ? x : detail::as_rows(x);
  Tensor y_rows = y.dim() == 2 ? y : y.view({y.numel() / out_features, out_features});
  const std::optional<Tensor> bias = b ? std::optional<Tensor>(b->contiguous()) : std::nullopt;
  if (fused(y_rows, x_rows, w, bias)) return y;
  // w.t(), without its two trips through the dispatcher.
  const Tensor w_t =
      at::cuda::as_strided(w, {in_features, out_features}, {w.stride(1), w.stride(0)}, w.storage_offset());
  if (bias && y.element_size() >= 4) {
    // The product rounds once with its bias inside, and in float32 a second rounding is as large as the first.
    at::cuda::addmm_out(y_rows, *bias, x_rows, w_t);
    bias_sigmoid_(y_rows, std::nullopt);
  } else {
    at::cuda::mm_out(y_rows, x_rows, w_t);
    bias_sigmoid_(y_rows, bias);
  }
  return y;
}

// How gate_backward_kernel divides a matrix. It depends on the shape alone, and with it the order of the additions.
struct BackwardGrid {
  int width;
  int64_t column_blocks, row_blocks, rows_per_block;

  BackwardGrid(int64_t rows, int64_t columns, int vector) {
    const int64_t vectors = ceil_div(columns, vector);
    column_blocks = ceil_div(vectors, kBackwardThreads);
    width = static_cast<int>(ceil_div(vectors, column_blocks));
    // About eight blocks for each multiprocessor of a large chip, unless that leaves a thread fewer than 16 rows.
    constexpr int64_t most_blocks = 1056;
    const int64_t height = kBackwardThreads / width;
    rows_per_block = std::max(ceil_div(rows, ceil_div(most_blocks, column_blocks)), 16 * height);
    row_blocks = ceil_div(rows, rows_per_block);
  }
};

std::tuple<Tensor, Tensor> dense_backward_cuda(const Tensor& grad, const Tensor& y) {
  TORCH_CHECK(grad.sizes() == y.sizes(), "_dense_backward: expected grad of shape ", detail::to_string(y.sym_sizes()),
              " to match y, got ", detail::to_string(grad.sym_sizes()));
  detail::check_matches("_dense_backward", "grad", grad, "y", y);
  const c10::cuda::CUDAGuard guard(y.device());
  const int64_t columns = y.size(-1);
  const Tensor dz = at::detail::empty_cuda(y.sizes(), y.options());
  if (dz.numel() == 0) return {dz, at::zeros({columns}, y.options())};
  const Tensor db = at::detail::empty_cuda({columns}, y.options());
  const int64_t rows = dz.numel() / columns;
  const Tensor g = grad.contiguous(), s = y.contiguous();
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "_dense_backward", [&] {
    const bool in_vectors =
        columns % kVectorSize<scalar_t> == 0 && aligned(g.const_data_ptr()) && aligned(s.const_data_ptr());
    const BackwardGrid grid(rows, columns, in_vectors ? kVectorSize<scalar_t> : 1);
    const Tensor partial = at::detail::empty_cuda(
        {grid.row_blocks, columns}, y.options().dtype(c10::CppTypeToScalarType<Accumulate<scalar_t>>::value));
    Accumulate<scalar_t>* const sums = partial.mutable_data_ptr<Accumulate<scalar_t>>();
    const auto kernel =
        in_vectors ? gate_backward_kernel<scalar_t, kVectorSize<scalar_t>> : gate_backward_kernel<scalar_t, 1>;
    const dim3 blocks(static_cast<unsigned>(grid.column_blocks), static_cast<unsigned>(grid.row_blocks));
    kernel<<<blocks, kBackwardThreads, 0, stream>>>(g.const_data_ptr<scalar_t>(), s.const_data_ptr<scalar_t>(),
                                                    dz.mutable_data_ptr<scalar_t>(), sums, rows, columns,
                                                    grid.rows_per_block, grid.width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    sum_rows_kernel<scalar_t>
        <<<static_cast<unsigned>(ceil_div(columns, kSumColumns)), dim3(kSumColumns, kSumRows), 0, stream>>>(
            sums, db.mutable_data_ptr<scalar_t>(), grid.row_blocks, columns);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {dz, db};
}

#ifdef TORCHOPS_WITH_SM90A
template <DenseType type>
cudaError_t run_backward(const gemm::DenseBackwardProblem& problem, cudaStream_t stream) {
  if (problem.n > 128) return gemm::run_dense_backward<type, 256, 128>(problem, stream);
  if (problem.k > 128) return gemm::run_dense_backward<type, 128, 256>(problem, stream);
  return gemm::run_dense_backward<type, 128, 128>(problem, stream);
}

// Where it can run it is the faster way: measured on an H100 from 64 rows to 1048576.
std::optional<std::tuple<Tensor, Tensor, Tensor>> dense_gradients_cuda(const Tensor& grad, const Tensor& y,
                                                                       const Tensor& x, const Tensor& w) {
  const int64_t n = w.size(0), k = w.size(1);
  const at::ScalarType dtype = y.scalar_type();
  if (detail::dense_path() == detail::DensePath::kCublas || (dtype != at::kBFloat16 && dtype != at::kHalf) ||
      n % 8 != 0 || k % 8 != 0 || std::max(n, k) > 256 || std::min(n, k) > 128 || y.numel() == 0 || k == 0) {
    return std::nullopt;
  }
  const c10::cuda::CUDAGuard guard(y.device());
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  if (device.major != 9 || device.minor != 0) return std::nullopt;
  Tensor g = detail::as_rows(grad), x_rows = detail::as_rows(x);
  const Tensor y_rows = detail::as_rows(y);
  if (!rows_fit(g)) g = g.contiguous();  // a cotangent of a sum has strides of 0
  const int64_t m = y_rows.size(0);
  const auto fits = [&](const Tensor& t, int64_t rows, int64_t columns) {
    return t.scalar_type() == dtype && t.device() == y.device() && t.size(0) == rows && t.size(1) == columns &&
           rows_fit(t);
  };
  if (!fits(g, m, n) || !fits(y_rows, m, n) || !fits(x_rows, m, k) || !fits(w, n, k)) return std::nullopt;

  const int blocks = gemm::dense_backward_blocks(static_cast<int>(m), device.multiProcessorCount);
  const Tensor dx = at::detail::empty_cuda(x.sizes(), x.options());
  const Tensor dw = at::detail::empty_cuda({n, k}, w.options()), db = at::detail::empty_cuda({n}, w.options());
  const Tensor partial = at::detail::empty_cuda({blocks, n * k + n}, w.options().dtype(at::kFloat));
  const gemm::DenseBackwardProblem problem{
      g.const_data_ptr(),    y_rows.const_data_ptr(), x_rows.const_data_ptr(), w.const_data_ptr(),
      dx.mutable_data_ptr(), dw.mutable_data_ptr(),   db.mutable_data_ptr(),   partial.mutable_data_ptr<float>(),
      g.stride(0),           y_rows.stride(0),        x_rows.stride(0),        w.stride(0),
      static_cast<int>(m),   static_cast<int>(n),     static_cast<int>(k),     blocks};
  const auto run = dtype == at::kBFloat16 ? run_backward<DenseType::kBFloat16> : run_backward<DenseType::kFloat16>;
  const cudaError_t error = run(problem, at::cuda::getCurrentCUDAStream());
  if (error == cudaErrorNotSupported) return std::nullopt;
  C10_CUDA_CHECK(error);
  return std::tuple(dx, dw, db);
}

[[maybe_unused]] const bool has_gradients = (detail::set_dense_gradients(dense_gradients_cuda), true);
#endif

TORCH_LIBRARY_IMPL(myops, CUDA, m) {
  m.impl("dense", dense_cuda);
  m.impl("_dense_backward", dense_backward_cuda);
}

}  // namespace
}  // namespace torchops::cuda
