#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "ops/memory.h"

// What the argument checks of all operators share. Every error reads
//   <op>: expected <argument> <what was expected>, got <what came>
// and every check works on symbolic sizes, so that eager, Meta, FakeTensor and export raise the same text.
namespace torchops::detail {

/// "(2, 3)", "(5,)", "()": a shape as Python prints it.
std::string to_string(c10::SymIntArrayRef shape);

/// "float32": a dtype as Python prints it, without the "torch." prefix.
std::string to_string(at::ScalarType dtype);

/// "sparse_coo": a layout as Python prints it, without the "torch." prefix.
std::string to_string(at::Layout layout);

/// Raises unless `tensor` is strided, neither sparse nor nested. Comes before all other checks: shapes, strides and
/// storage are not there to be asked for in every layout.
void check_layout(const char* op, const char* name, const at::Tensor& tensor);

/// Raises unless `tensor` is strided and has one of the four floating-point dtypes of the library.
void check_dtype(const char* op, const char* name, const at::Tensor& tensor);

/// Raises unless `tensor` is strided and has the dtype and the device of `reference`.
void check_matches(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                   const at::Tensor& reference);

/// Raises unless `tensor` is on the device of `reference`.
void check_device(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                  const at::Tensor& reference);

/// Raises unless `tensor` has the shape `expected`, which follows from the arguments `reference_names`.
void check_shape(const char* op, const char* name, const at::Tensor& tensor, const char* reference_names,
                 c10::SymIntArrayRef expected);

/// Raises unless x (..., in), w (out, in) and b (out,) or none have the sizes of x @ w.T + b.
void check_linear_sizes(const char* op, const at::Tensor& x, const char* w_name, const at::Tensor& w,
                        const char* b_name, const std::optional<at::Tensor>& b);

/// Raises unless x, w and b may be the operands of x @ w.T + b: of one dtype and device, but float32 x with 16-bit w
/// and b is legal too. Such an x is rounded to w's dtype where it is read.
void check_linear(const char* op, const at::Tensor& x, const char* w_name, const at::Tensor& w, const char* b_name,
                  const std::optional<at::Tensor>& b);

/// Raises if two indices of `tensor` share one memory location (an expanded or unfolded tensor): it cannot be written.
void check_writable(const char* op, const char* name, const at::Tensor& tensor);

/// An uninitialised tensor of the dtype and on the device of `like`, or one of no elements in the place of a gradient
/// that is not wanted.
at::Tensor empty_if(bool wanted, c10::SymIntArrayRef shape, const at::Tensor& like);

/// `read`, or a copy of it if writing `written` could change it.
at::Tensor read_first(const at::Tensor& written, const at::Tensor& read);

/// Whether both are the same elements in the same places: a row of `written` that is overwritten after that row of
/// `read` has been read changes no other row of it.
bool coincide(const at::Tensor& written, const at::Tensor& read);

/// `tensor` as a matrix of its last dimension: (..., n) -> (rows, n); a vector is one row. A view where strides allow.
at::Tensor as_rows(const at::Tensor& tensor);

}  // namespace torchops::detail
