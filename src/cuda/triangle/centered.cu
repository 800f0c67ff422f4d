#include <ATen/TensorUtils.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <optional>

#include "cuda/rows/rows.cuh"
#include "cuda/triangle/centered.h"

// Both passes are bound by memory. 16 threads share a row: each has 4 neighbouring features of every 64, so that the
// accesses of both widths are whole and contiguous, and each has two rows in flight. Blocks begin with the last rows:
// the previous kernel has left those in the second-level cache, and the first rows, which are written last, are what
// the next kernel begins with.
namespace torchops::cuda {
namespace {

using at::Tensor;

constexpr int kThreads = 256, kLanes = 16, kWide = 4, kVectors = 2, kRowsOfThread = 2;
constexpr int kMostFeatures = kLanes * kWide * kVectors, kRowsOfBlock = kThreads / kLanes * kRowsOfThread;

/// Rows (outer, inner) of `features` each, with a stride for each of both dimensions.
template <class T>
struct StridedRows {
  T* data;
  int64_t outer, inner, outer_stride, inner_stride;
  int features;
};

/// x (..., c) as such rows, which begin at multiples of 16 bytes; nullopt if its strides don't allow it.
std::optional<StridedRows<float>> strided_rows(const Tensor& x) {
  const int64_t c = x.size(-1), leading = x.dim() - 1;
  for (int64_t split = 0; split <= std::max(leading - 1, int64_t{0}); ++split) {
    const at::DimVector shape{c10::multiply_integers(x.sizes().slice(0, split)),
                              c10::multiply_integers(x.sizes().slice(split, leading - split)), c};
    const auto strides = at::detail::computeStride(x.sizes(), x.strides(), shape);
    if (!strides) continue;
    auto* const data = static_cast<float*>(const_cast<void*>(x.const_data_ptr()));
    const StridedRows<float> rows{data, shape[0], shape[1], (*strides)[0], (*strides)[1], static_cast<int>(c)};
    const bool aligned = (*strides)[2] == 1 && rows.outer_stride % kWide == 0 && rows.inner_stride % kWide == 0 &&
                         reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
    return aligned ? std::optional(rows) : std::nullopt;
  }
  return std::nullopt;
}

/// The part of the rows that a thread has.
template <class T>
class Place {
 public:
  __device__ Place(const StridedRows<T>& rows, int64_t outer)
      : rows_(rows),
        outer_(outer),
        first_(int64_t{gridDim.x - 1 - blockIdx.x} * kRowsOfBlock + threadIdx.x / kLanes),
        lane_(threadIdx.x % kLanes) {}

  /// f(index among the thread's rows, index among all rows, pointer to the row)
  template <class F>
  __device__ void for_each_row(F f) const {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int64_t inner = first_ + i * (kThreads / kLanes);
      if (inner < rows_.inner) {
        f(i, outer_ * rows_.inner + inner, rows_.data + outer_ * rows_.outer_stride + inner * rows_.inner_stride);
      }
    }
  }
  /// f(index among the thread's vectors, its first feature)
  template <class F>
  __device__ void for_each_vector(F f) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int feature = (lane_ + k * kLanes) * kWide;
      if (feature < rows_.features) f(k, feature);
    }
  }
  __device__ bool is_first() const { return lane_ == 0; }

 private:
  const StridedRows<T>& rows_;
  int64_t outer_, first_;
  int lane_;
};

/// The power of two that scales a row of this variance; 0 if its squares overflow, since its layer norm is then 0.
__device__ inline float factor_of(float variance, float least) {
  const float times = variance / least;
  if (!(times >= 4.f)) return 1.f;  // and NaN
  if (isinf(times)) return 0.f;
  const int exponent = (__float_as_int(times) >> 23) - 127;
  return __int_as_float((127 - exponent / 2) << 23);
}

// One access each: the compiler would split some assignments of structs into single elements.
__device__ inline void store_vector(float* to, const float (&values)[kWide]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]),
               "f"(values[3])
               : "memory");
}
template <class T>
__device__ inline void store_vector(T* to, const float (&values)[kWide]) {
  const Packed<T, kWide> packed = pack<T, kWide>(values);
  const auto* const words = reinterpret_cast<const uint32_t*>(&packed);
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
}

/// The sums of all rows of a warp are computed side by side; those of rows after the last are 0.
template <class T>
__global__ void __launch_bounds__(kThreads)
    center_kernel(const StridedRows<float> x, T* __restrict__ out, float* __restrict__ factors, float least_variance) {
  constexpr bool scales = std::is_same_v<T, at::Half>;
  const float by = 1.f / static_cast<float>(x.features);
  for (int64_t outer = blockIdx.y; outer < x.outer; outer += gridDim.y) {
    const Place place(x, outer);
    float values[kRowsOfThread][kVectors][kWide] = {};
    place.for_each_row([&](int i, int64_t, const float* row) {
      place.for_each_vector([&](int k, int feature) { unpack(load<float, kWide>(row + feature), values[i][k]); });
    });
    float means[kRowsOfThread], rests[kRowsOfThread] = {}, squares[kRowsOfThread] = {};
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      float sum = 0;
      for (const auto& vector : values[i]) {
        for (const float value : vector) sum += value;
      }
      means[i] = reduce_lanes<kLanes>(sum, Sum()) * by;
    }
    // If the spread of a row is that small, the rounding error of the mean counts.
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      place.for_each_vector([&](int k, int) {
        for (float& value : values[i][k]) {
          value -= means[i];
          rests[i] += value;
          squares[i] = fmaf(value, value, squares[i]);
        }
      });
      rests[i] = reduce_lanes<kLanes>(rests[i], Sum()) * by;
      if (scales) squares[i] = reduce_lanes<kLanes>(squares[i], Sum()) * by;
    }
    place.for_each_row([&](int i, int64_t number, const float*) {
      const float factor = scales ? factor_of(squares[i] - rests[i] * rests[i], least_variance) : 1.f;
      if (scales && place.is_first()) factors[number] = factor;
      place.for_each_vector([&](int k, int feature) {
        for (float& value : values[i][k]) value = (value - rests[i]) * factor;
        store_vector(out + number * x.features + feature, values[i][k]);
      });
    });
  }
}

/// to = from * the factor of its row, if there are factors.
template <class T>
__global__ void __launch_bounds__(kThreads)
    widen_kernel(const StridedRows<float> to, const T* __restrict__ from, const float* __restrict__ factors) {
  for (int64_t outer = blockIdx.y; outer < to.outer; outer += gridDim.y) {
    const Place place(to, outer);
    Packed<T, kWide> loaded[kRowsOfThread][kVectors];
    float factor[kRowsOfThread];
    place.for_each_row([&](int i, int64_t number, const float*) {
      factor[i] = factors == nullptr ? 1.f : factors[number];
      place.for_each_vector(
          [&](int k, int feature) { loaded[i][k] = load<T, kWide>(from + number * to.features + feature); });
    });
    place.for_each_row([&](int i, int64_t, float* row) {
      place.for_each_vector([&](int k, int feature) {
        float values[kWide];
        unpack(loaded[i][k], values);
#pragma unroll
        for (int j = 0; j < kWide; ++j) values[j] *= factor[i];
        store_vector(row + feature, values);
      });
    });
  }
}

dim3 grid_of(const StridedRows<float>& rows) {
  constexpr int64_t most_along_y = 65535;
  return {static_cast<unsigned>(ceil_div(rows.inner, kRowsOfBlock)),
          static_cast<unsigned>(std::min(rows.outer, most_along_y))};
}

/// Calls f(T()) with the 16-bit type of a tensor.
template <class F>
void of_16_bits(const Tensor& t, const F& f) {
  TORCH_INTERNAL_ASSERT(t.is_contiguous() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16));
  t.scalar_type() == at::kHalf ? f(at::Half()) : f(at::BFloat16());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

bool Centered::takes(const Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == at::kFloat && (dtype == at::kHalf || dtype == at::kBFloat16) && x.numel() > 0 &&
         x.size(-1) % 8 == 0 && x.size(-1) <= kMostFeatures;
}

int64_t Centered::row_bytes(int64_t c, at::ScalarType dtype) {
  return c * static_cast<int64_t>(c10::elementSize(dtype)) + (dtype == at::kHalf ? int64_t{sizeof(float)} : 0);
}

Centered::Centered(const Tensor& x, at::ScalarType dtype, double eps)
    : Centered(x, at::detail::empty_cuda(x.sizes(), x.options().dtype(dtype)), eps) {}

Centered::Centered(const Tensor& x, Tensor out, double eps) : rows_(std::move(out)) {
  auto rows = strided_rows(x);
  Tensor copy;
  if (!rows) {
    copy = x.clone(at::MemoryFormat::Contiguous);
    rows = strided_rows(copy);
  }
  TORCH_INTERNAL_ASSERT(rows && rows_.sizes() == x.sizes());
  if (rows_.scalar_type() == at::kHalf) {
    factors_ = at::detail::empty_cuda({rows->outer * rows->inner}, x.options());
  }
  const double least_variance = std::clamp(eps * 0x1p17, 1., 0x1p20);
  of_16_bits(rows_, [&](auto type) {
    using T = decltype(type);
    center_kernel<T><<<grid_of(*rows), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        *rows, rows_.mutable_data_ptr<T>(), factors_.defined() ? factors_.mutable_data_ptr<float>() : nullptr,
        static_cast<float>(least_variance));
  });
}

Tensor Centered::gradient(const Tensor& of_rows) const {
  const Tensor dx = at::detail::empty_cuda(of_rows.sizes(), of_rows.options().dtype(at::kFloat));
  const StridedRows<float> to = *strided_rows(dx);
  of_16_bits(of_rows, [&](auto type) {
    using T = decltype(type);
    widen_kernel<T><<<grid_of(to), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        to, of_rows.const_data_ptr<T>(), factors_.defined() ? factors_.const_data_ptr<float>() : nullptr);
  });
  return dx;
}

}  // namespace torchops::cuda
