#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <limits>
#include <optional>

#include "cuda/gemm/problem.h"

// From tensors to operands.
namespace torchops::cuda::gemm {

/// With so many rows or columns, an int still has room for a tile.
constexpr int64_t kMostExtent = std::numeric_limits<int>::max() - 1024;

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

/// A matrix (rows, columns), or a batch of them (batch, rows, columns), that TMA and 16-byte loads can read: contiguous
/// rows that do not overlap, pointer and strides that are multiples of 16 bytes, and extents small enough that an int
/// still has room for a tile. nullopt if the tensor isn't one.
inline std::optional<Operand> operand(const at::Tensor& t) {
  const int64_t rows = t.size(-2), columns = t.size(-1), vector = 16 / t.element_size();
  // A single row has no next one, so any stride will do.
  const int64_t row_stride = rows == 1 ? (columns + vector - 1) / vector * vector : t.stride(-2);
  const int64_t batch_stride = t.dim() == 2 || t.size(0) == 1 ? 0 : t.stride(0);
  if (rows > kMostExtent || columns > kMostExtent || (t.stride(-1) != 1 && columns > 1) || row_stride < columns ||
      !is_stride_of_tma(row_stride, t.element_size()) || !is_stride_of_tma(batch_stride, t.element_size()) ||
      !is_aligned(t.const_data_ptr())) {
    return std::nullopt;
  }
  return Operand{t.const_data_ptr(), row_stride, batch_stride};
}

/// Biases, and weights of layer norms, as kernels read them: contiguous, or null. Keeps their memory alive.
class Vectors {
 public:
  const void* bias(const std::optional<at::Tensor>& t) { return t ? keep(*t).const_data_ptr() : nullptr; }
  NormVector of_norm(const std::optional<at::Tensor>& t) {
    return t ? NormVector{keep(*t).const_data_ptr(), t->scalar_type() == at::kFloat} : NormVector{};
  }

 private:
  const at::Tensor& keep(const at::Tensor& t) { return kept_.emplace_back(t.contiguous()); }

  c10::SmallVector<at::Tensor, 8> kept_;
};

/// A matrix as an operand, or else a copy that is one, if its columns allow. contiguous() returns what is contiguous as
/// it is, even if its address is not aligned.
inline at::Tensor readable(const at::Tensor& t) { return operand(t) ? t : t.clone(at::MemoryFormat::Contiguous); }

}  // namespace torchops::cuda::gemm
