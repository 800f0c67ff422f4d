#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

namespace torchops::detail {

/// Tensors of one rank and the same leading sizes, of which the last `trailing_dims` dimensions belong to a row.
using Operands = c10::SmallVector<at::Tensor, 3>;

/// Splits the operands (..., *trailing) into views (rows, *trailing) that together are all of them, and calls f on
/// each. Leading dimensions are merged, in the order of the first operand's strides, wherever all operands allow it: a
/// transposed or sliced tensor gives few, large matrices, and nothing is copied. f must treat rows alike.
void for_each_matrix(Operands operands, int64_t trailing_dims, c10::function_ref<void(const Operands&)> f);

/// The bytes of the copy that a row of x is rounded to where w has another dtype, else 0.
inline int64_t rounded_row_bytes(const at::Tensor& x, const at::Tensor& w) {
  return x.scalar_type() == w.scalar_type() ? 0 : x.size(-1) * static_cast<int64_t>(w.element_size());
}

}  // namespace torchops::detail
