#pragma once

#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <optional>

#include "ops/matrices.h"

// Layouts of rows, for the host side of the row kernels.
namespace torchops::cuda {

/// The limit of scratch for rows whose elements are not contiguous; or one row, if that is more.
constexpr int64_t kMaxScratchBytes = int64_t{32} << 20;

/// x (..., *trailing), not empty, as a view (rows, columns) with unit column stride; nullopt if its strides don't allow
/// that.
inline std::optional<at::Tensor> as_unit_rows(const at::Tensor& x, int64_t trailing_dims) {
  const int64_t columns = c10::multiply_integers(x.sizes().slice(x.dim() - trailing_dims));
  const at::DimVector shape{x.numel() / columns, columns};
  const auto strides = at::detail::computeStride(x.sizes(), x.strides(), shape);
  if (!strides || (columns > 1 && (*strides)[1] != 1)) return std::nullopt;
  return x.view(shape);
}

/// t (..., *trailing), not empty, as (rows, columns) with unit column stride: a view if its rows have the distance from
/// a 16-byte boundary that those from `address` on, `row_bytes` apart, have, otherwise a copy without gaps.
inline at::Tensor aligned_rows(const at::Tensor& t, int64_t trailing_dims, uintptr_t address, int64_t row_bytes) {
  const auto multiple = [](int64_t bytes) { return bytes % 16 == 0; };
  if (const auto rows = as_unit_rows(t, trailing_dims)) {
    const auto begin = reinterpret_cast<uintptr_t>(rows->const_data_ptr());
    const int64_t bytes = rows->stride(0) * static_cast<int64_t>(rows->element_size());
    if (multiple(static_cast<int64_t>(begin - address)) && (rows->size(0) == 1 || multiple(bytes - row_bytes))) {
      return *rows;
    }
  }
  return *as_unit_rows(t.clone(at::MemoryFormat::Contiguous), trailing_dims);
}

/// Splits the operands (..., *trailing) into views of many rows and calls f on each, with the first operand, which f
/// overwrites, as (rows, columns) with unit column stride: the tensor itself if its layout allows that, else a copy of
/// a few rows. All scratch is allocated before f first runs, so that running out of memory can't stop it halfway.
inline void overwrite_rows(const detail::Operands& operands, int64_t trailing_dims,
                           c10::function_ref<void(const detail::Operands&)> f) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor scratch;
  detail::for_each_matrix(operands, trailing_dims, [&](const detail::Operands& matrices) {
    detail::Operands part = matrices;
    if (const auto x = as_unit_rows(matrices[0], trailing_dims)) {
      part[0] = *x;
      return f(part);
    }
    const int64_t rows = matrices[0].size(0), row_bytes = static_cast<int64_t>(matrices[0].nbytes()) / rows;
    const int64_t step = std::clamp(kMaxScratchBytes / row_bytes, int64_t{1}, rows);
    // All matrices have the same shape and strides.
    if (!scratch.defined()) {
      at::DimVector shape(matrices[0].sizes());
      shape[0] = step;
      scratch = at::empty(shape, matrices[0].options());
    }
    for (int64_t begin = 0; begin < rows; begin += step) {
      for (size_t i = 0; i < part.size(); ++i) part[i] = matrices[i].narrow(0, begin, std::min(step, rows - begin));
      const at::Tensor target = part[0], copy = scratch.narrow(0, 0, target.size(0));
      copy.copy_(target);
      part[0] = copy.flatten(1);
      f(part);
      target.copy_(copy);
    }
  });
}

}  // namespace torchops::cuda
