#include "ops/common.h"

#include <ATen/MemoryOverlap.h>
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

void check_dtype(const char* op, const char* name, const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16, op,
              ": expected ", name, " of dtype float32, float64, float16 or bfloat16, got ", to_string(dtype));
}

void check_matches(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                   const at::Tensor& reference) {
  TORCH_CHECK(tensor.scalar_type() == reference.scalar_type(), op, ": expected ", name, " of dtype ",
              to_string(reference.scalar_type()), " to match ", reference_name, ", got ",
              to_string(tensor.scalar_type()));
  TORCH_CHECK(tensor.device() == reference.device(), op, ": expected ", name, " on device ", reference.device().str(),
              " to match ", reference_name, ", got ", tensor.device().str());
}

void check_shape(const char* op, const char* name, const at::Tensor& tensor, c10::SymIntArrayRef shape,
                 const char* reference_name) {
  TORCH_CHECK(tensor.dim() == static_cast<int64_t>(shape.size()), op, ": expected ", name, " of shape ",
              to_string(shape), " to match ", reference_name, ", got ", to_string(tensor.sym_sizes()));
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    TORCH_SYM_CHECK(tensor.sym_size(dim).sym_eq(shape[dim]), op, ": expected ", name, " of shape ", to_string(shape),
                    " to match ", reference_name, ", got ", to_string(tensor.sym_sizes()));
  }
}

void check_writable(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, op, ": expected ", name,
              " without internal overlap, got shape ", to_string(tensor.sym_sizes()), " with strides ",
              to_string(tensor.sym_strides()), "; clone() it first");
}

bool may_alias(const at::Tensor& written, const at::Tensor& read) {
  return read.defined() &&
         (written.is_same(read) || (written.has_storage() && read.has_storage() && written.is_alias_of(read)));
}

at::Tensor as_rows(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  if (tensor.dim() == 1) return tensor.unsqueeze(0);
  const c10::SymIntArrayRef leading = tensor.sym_sizes().slice(0, tensor.dim() - 1);
  return tensor.reshape_symint({c10::multiply_integers(leading.begin(), leading.end()), tensor.sym_size(-1)});
}

}  // namespace torchops::detail
