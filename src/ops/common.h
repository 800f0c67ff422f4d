#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <optional>
#include <string>
#include <type_traits>

#include "ops/memory.h"

// Shared by the argument checks of all operators. Every error reads
//   <op>: expected <argument> <expectation>, got <actual>
// and every check works on symbolic sizes, so that eager, Meta, FakeTensor and export raise the same text.
namespace torchops::detail {

/// "(2, 3)", "(5,)", "()": a shape as Python prints it.
std::string to_string(c10::SymIntArrayRef shape);

/// "float32": a dtype as Python prints it, without the "torch." prefix.
std::string to_string(at::ScalarType dtype);

/// "sparse_coo": a layout as Python prints it, without the "torch." prefix.
std::string to_string(at::Layout layout);

/// Raises unless `tensor` is strided, i.e. neither sparse nor nested. Comes before all other checks, because not every
/// layout has shapes, strides and storage to ask for.
void check_layout(const char* op, const char* name, const at::Tensor& tensor);

/// Raises unless `tensor` is strided and has one of the four floating-point dtypes of the library.
void check_dtype(const char* op, const char* name, const at::Tensor& tensor);

/// Raises unless `tensor` is strided and has the dtype and the device of `reference`.
void check_matches(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                   const at::Tensor& reference);

/// The same for the weight or bias of a layer norm, which may also be float32 if `reference` has 16 bits.
void check_norm_parameter(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                          const at::Tensor& reference);

/// Raises unless `tensor` is on the device of `reference`.
void check_device(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                  const at::Tensor& reference);

/// Raises unless `tensor` has the shape `expected`, which follows from the arguments `reference_names`.
void check_shape(const char* op, const char* name, const at::Tensor& tensor, const char* reference_names,
                 c10::SymIntArrayRef expected);

/// Raises unless x (..., in), w (out, in) and b (out,), if there is one, have the sizes of x @ w.T + b.
void check_linear_sizes(const char* op, const at::Tensor& x, const char* w_name, const at::Tensor& w,
                        const char* b_name, const std::optional<at::Tensor>& b);

/// Raises unless x, w and b can be the operands of x @ w.T + b: same dtype and device, except that x may be float32 if
/// w and b have 16 bits. Such an x is rounded to w's dtype as it is read.
void check_linear(const char* op, const at::Tensor& x, const char* w_name, const at::Tensor& w, const char* b_name,
                  const std::optional<at::Tensor>& b);

/// Raises unless x (..., in), w (out, in) and b (out,), if there is one, are of one dtype and device, and have the
/// sizes of x @ w.T + b.
void check_layer(const char* op, const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

/// Raises if two indices of `tensor` share one memory location (an expanded or unfolded tensor): it cannot be written.
void check_writable(const char* op, const char* name, const at::Tensor& tensor);

/// An uninitialised tensor of the dtype and on the device of `like`; an empty one if the gradient that it is for is not
/// wanted.
at::Tensor empty_if(bool wanted, c10::SymIntArrayRef shape, const at::Tensor& like);

/// `sizes` with another last one: those of x @ w.T from x's.
template <class Size>
c10::SmallVector<Size, c10::kDimVectorStaticSize> with_last(c10::ArrayRef<Size> sizes,
                                                            const std::type_identity_t<Size>& last) {
  c10::SmallVector<Size, c10::kDimVectorStaticSize> result(sizes);
  result.back() = last;
  return result;
}

/// `read`, or a copy of it if writing `written` could change it.
at::Tensor read_first(const at::Tensor& written, const at::Tensor& read);
std::optional<at::Tensor> read_first(const at::Tensor& written, const std::optional<at::Tensor>& read);

/// The weight or bias of a layer norm, if there is one, as layer_norm() takes it beside an x of this dtype: float32
/// beside 16 bits stays as it is.
std::optional<at::Tensor> norm_parameter(const std::optional<at::Tensor>& parameter, at::ScalarType x_dtype);

/// Whether both are the same elements in the same places: overwriting a row of `written` after that row of `read` has
/// been read then changes no other row of `read`.
bool coincide(const at::Tensor& written, const at::Tensor& read);

/// `tensor` as a matrix of its last dimension: (..., n) -> (rows, n); a vector is one row. A view if strides allow it.
at::Tensor as_rows(const at::Tensor& tensor);

}  // namespace torchops::detail
