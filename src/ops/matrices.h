#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

namespace torchops::detail {

/// Tensors of the same rank and leading sizes, in which a row is the last `trailing_dims` dimensions.
using Operands = c10::SmallVector<at::Tensor, 3>;

/// Splits the operands (..., *trailing) into views (rows, *trailing) that together cover them, and calls f on each.
/// Leading dimensions are merged, in the order of the first operand's strides, wherever all operands allow it, so a
/// transposed or sliced tensor gives few, large matrices, and nothing is copied. f must treat all rows alike.
void for_each_matrix(Operands operands, int64_t trailing_dims, c10::function_ref<void(const Operands&)> f);

/// Whether BLAS can read it: matrices with contiguous rows or contiguous columns.
inline bool has_unit_stride(const at::Tensor& t) { return t.stride(-2) == 1 || t.stride(-1) == 1; }

/// Whether a and b are the halves of one tensor.
inline bool are_halves(const at::Tensor& a, const at::Tensor& b) {
  return a.is_contiguous() && b.is_contiguous() && a.storage().is_alias_of(b.storage()) &&
         b.storage_offset() == a.storage_offset() + a.numel();
}

/// Bytes per row of the rounded copy of x, which is needed if w has another dtype; else 0.
inline int64_t rounded_row_bytes(const at::Tensor& x, const at::Tensor& w) {
  return x.scalar_type() == w.scalar_type() ? 0 : x.size(-1) * static_cast<int64_t>(w.element_size());
}

/// Products that sum over rows should do so over multiples of these.
constexpr int64_t kRowsOfCublasTile = 128;

/// Whether a kernel of cuBLAS that reads by TMA may read this matrix, of 16 bits: its rows, or else its columns, begin
/// at multiples of 16 bytes. at::mm copies a matrix if neither are without gaps, or if they overlap, to a contiguous
/// one. A single column may be read either way.
inline bool tma_may_read(const at::Tensor& t) {
  constexpr int64_t vector = 8;
  const int64_t rows = t.size(0), columns = t.size(1);
  if (columns == 1) return true;
  const bool has_rows = t.stride(1) == 1 && t.stride(0) >= columns,
             has_columns = t.stride(0) == 1 && t.stride(1) >= rows;
  if (!has_rows && !has_columns) return columns % vector == 0;
  const int64_t pitch = has_rows ? t.stride(0) : t.stride(1);
  return pitch % vector == 0 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

/// How many of its last rows a product t.T @ u of cuBLAS might leave out, or 0. It may sum over the rows in parallel
/// parts, and for some sizes of 16-bit matrices these leave out the rows beyond the last multiple of their tile
/// (https://github.com/facebookexperimental/triton/pull/2767). So these rows should be a product of their own, if TMA
/// may read both matrices: other products were never seen to leave out any (CUDA 13.0).
inline int64_t rows_cublas_may_leave_out(const at::Tensor& t, const at::Tensor& u) {
  const bool possible = t.element_size() == 2 && t.size(0) > kRowsOfCublasTile && tma_may_read(t) && tma_may_read(u);
  return possible ? t.size(0) % kRowsOfCublasTile : 0;
}

/// Whether a 16-bit product t.T @ u should be computed in float32 and rounded afterwards. Where the result has few
/// tiles, cuBLAS sums over the rows in parallel parts, which it may round before it adds them: sums of ones then differ
/// from the number of rows. For larger results, the float32 one would cost too much.
inline bool is_product_rounded_in_parts(const at::Tensor& t, const at::Tensor& u) {
  constexpr int64_t least_in_one = int64_t{1} << 22;
  return t.element_size() == 2 && t.size(0) > kRowsOfCublasTile && t.size(1) * u.size(1) < least_in_one;
}

}  // namespace torchops::detail
