#include "ops/common.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <sstream>

namespace torchops::detail {

std::string to_string(c10::SymIntArrayRef shape) {
  std::ostringstream out;
  out << '(';
  for (size_t i = 0; i < shape.size(); ++i) out << (i == 0 ? "" : ", ") << shape[i];
  out << (shape.size() == 1 ? ",)" : ")");
  return out.str();
}

std::string to_string(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

std::string to_string(at::Layout layout) {
  switch (layout) {
    case at::kStrided:
      return "strided";
    case at::kSparse:
      return "sparse_coo";
    case at::kSparseCsr:
      return "sparse_csr";
    case at::kSparseCsc:
      return "sparse_csc";
    case at::kSparseBsr:
      return "sparse_bsr";
    case at::kSparseBsc:
      return "sparse_bsc";
    case at::kMkldnn:
      return "_mkldnn";
    case at::kJagged:
      return "jagged";
    default:
      return "unknown";
  }
}

void check_layout(const char* op, const char* name, const at::Tensor& tensor) {
  // None in Python
  TORCH_CHECK_TYPE(tensor.defined(), op, ": expected ", name, " of type Tensor, got NoneType");
  const at::Layout layout = tensor.layout();
  TORCH_CHECK(layout == at::kStrided, op, ": expected ", name, " of layout strided, got ", to_string(layout));
  TORCH_CHECK(!tensor.is_nested(), op, ": expected ", name, " of layout strided, got a nested tensor");
}

void check_dtype(const char* op, const char* name, const at::Tensor& tensor) {
  check_layout(op, name, tensor);
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16, op,
              ": expected ", name, " of dtype float32, float64, float16 or bfloat16, got ", to_string(dtype));
}

void check_device(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                  const at::Tensor& reference) {
  TORCH_CHECK(tensor.device() == reference.device(), op, ": expected ", name, " on device ", reference.device().str(),
              " to match ", reference_name, ", got ", tensor.device().str());
}

void check_shape(const char* op, const char* name, const at::Tensor& tensor, const char* reference_names,
                 c10::SymIntArrayRef expected) {
  TORCH_CHECK(tensor.dim() == static_cast<int64_t>(expected.size()), op, ": expected ", name, " of shape ",
              to_string(expected), " to match ", reference_names, ", got ", to_string(tensor.sym_sizes()));
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    TORCH_SYM_CHECK(tensor.sym_size(i).sym_eq(expected[i]), op, ": expected ", name, " of shape ", to_string(expected),
                    " to match ", reference_names, ", got ", to_string(tensor.sym_sizes()));
  }
}

namespace {

void check_matches(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                   const at::Tensor& reference, bool or_float32) {
  check_layout(op, name, tensor);
  const at::ScalarType dtype = tensor.scalar_type(), expected = reference.scalar_type();
  TORCH_CHECK(dtype == expected || (or_float32 && dtype == at::kFloat), op, ": expected ", name, " of dtype ",
              to_string(expected), or_float32 ? " or float32" : "", " to match ", reference_name, ", got ",
              to_string(dtype));
  check_device(op, name, tensor, reference_name, reference);
}

}  // namespace

void check_matches(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                   const at::Tensor& reference) {
  check_matches(op, name, tensor, reference_name, reference, /*or_float32=*/false);
}

void check_norm_parameter(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                          const at::Tensor& reference) {
  check_matches(op, name, tensor, reference_name, reference, /*or_float32=*/reference.element_size() == 2);
}

void check_linear_sizes(const char* op, const at::Tensor& x, const char* w_name, const at::Tensor& w,
                        const char* b_name, const std::optional<at::Tensor>& b) {
  TORCH_CHECK(x.dim() >= 1, op, ": expected x with at least 1 dimension, got a 0-dimensional tensor");
  const c10::SymInt in_features = x.sym_size(-1);
  TORCH_CHECK(w.dim() == 2, op, ": expected ", w_name, " of shape (out, in) with in = ", in_features,
              " to match x, got ", to_string(w.sym_sizes()));
  TORCH_SYM_CHECK(w.sym_size(1).sym_eq(in_features), op, ": expected ", w_name,
                  " of shape (out, in) with in = ", in_features, " to match x, got ", to_string(w.sym_sizes()));
  if (b) check_shape(op, b_name, *b, w_name, {w.sym_size(0)});
}

void check_linear(const char* op, const at::Tensor& x, const char* w_name, const at::Tensor& w, const char* b_name,
                  const std::optional<at::Tensor>& b) {
  check_dtype(op, "x", x);
  if (x.scalar_type() == at::kFloat) {
    check_layout(op, w_name, w);
    const at::ScalarType dtype = w.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, op, ": expected ", w_name,
                " of dtype float32, float16 or bfloat16 to match x, got ", to_string(dtype));
    check_device(op, w_name, w, "x", x);
  } else {
    check_matches(op, w_name, w, "x", x);
  }
  if (b) check_matches(op, b_name, *b, w_name, w);
  check_linear_sizes(op, x, w_name, w, b_name, b);
}

at::Tensor empty_if(bool wanted, c10::SymIntArrayRef shape, const at::Tensor& like) {
  return wanted ? at::empty_symint(shape, like.options()) : at::empty({0}, like.options());
}

void check_layer(const char* op, const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b) {
  check_dtype(op, "x", x);
  TORCH_CHECK(x.dim() >= 1, op, ": expected x with at least 1 dimension, got a 0-dimensional tensor");
  check_matches(op, "w", w, "x", x);
  if (b) check_matches(op, "b", *b, "x", x);
  check_linear_sizes(op, x, "w", w, "b", b);
}

void check_writable(const char* op, const char* name, const at::Tensor& wrapped) {
  const at::Tensor tensor = unwrapped(wrapped);
  const Overlap overlap = internal_overlap(tensor);
  TORCH_CHECK(overlap == Overlap::kNo, op, ": expected ", name, " without internal overlap, got shape ",
              to_string(tensor.sym_sizes()), " with strides ", to_string(tensor.sym_strides()), ": ",
              overlap == Overlap::kYes ? "" : "it could not be ruled out that ",
              "more than one element of the written-to tensor refers to a single memory location. Please clone() the "
              "tensor before performing the operation.");
}

at::Tensor read_first(const at::Tensor& written, const at::Tensor& read) {
  return may_alias(written, read) ? read.clone() : read;
}

std::optional<at::Tensor> read_first(const at::Tensor& written, const std::optional<at::Tensor>& read) {
  return read ? std::optional(read_first(written, *read)) : read;
}

std::optional<at::Tensor> norm_parameter(const std::optional<at::Tensor>& parameter, at::ScalarType x_dtype) {
  if (!parameter || parameter->scalar_type() == at::kFloat || parameter->scalar_type() == x_dtype) return parameter;
  return parameter->to(x_dtype);
}

bool coincide(const at::Tensor& written, const at::Tensor& read) {
  return written.const_data_ptr() == read.const_data_ptr() && written.scalar_type() == read.scalar_type() &&
         written.sizes() == read.sizes() && written.strides() == read.strides();
}

at::Tensor as_rows(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  if (tensor.dim() == 1) return tensor.unsqueeze(0);
  const c10::SymIntArrayRef leading = tensor.sym_sizes().slice(0, tensor.dim() - 1);
  return tensor.reshape_symint({c10::multiply_integers(leading.begin(), leading.end()), tensor.sym_size(-1)});
}

}  // namespace torchops::detail
