#pragma once

#include <ATen/core/Tensor.h>

#include <string>

// What the argument checks of all operators share. Every error reads
//   <op>: expected <argument> <what was expected>, got <what came>
// and every check works on symbolic sizes, so that eager, Meta, FakeTensor and export raise the same text.
namespace torchops::detail {

/// "(2, 3)", "(5,)", "()": a shape as Python prints it.
std::string to_string(c10::SymIntArrayRef shape);

/// "float32": a dtype as Python prints it, without the "torch." prefix.
std::string to_string(at::ScalarType dtype);

/// Raises unless `tensor` has one of the four floating-point dtypes of the library.
void check_dtype(const char* op, const char* name, const at::Tensor& tensor);

/// Raises unless `tensor` has the dtype and the device of `reference`.
void check_matches(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                   const at::Tensor& reference);

/// Raises unless `tensor` has the shape `shape`, which that of an argument (or of several), `reference_name`, demands.
void check_shape(const char* op, const char* name, const at::Tensor& tensor, c10::SymIntArrayRef shape,
                 const char* reference_name);

/// Raises if two indices of `tensor` share one memory location (an expanded tensor): it cannot be written.
void check_writable(const char* op, const char* name, const at::Tensor& tensor);

/// Whether writing `written` could change what `read` holds.
bool may_alias(const at::Tensor& written, const at::Tensor& read);

/// `tensor` as a matrix of its last dimension: (..., n) -> (rows, n); a vector is one row. A view where strides allow.
at::Tensor as_rows(const at::Tensor& tensor);

}  // namespace torchops::detail
