#include "ops/saved_copy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

Tensor detail::saved_copy(const Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("myops::_saved_copy", "").typed<decltype(saved_copy)>();
  return op.call(x);
}

namespace {

// Accepts every dtype that an argument of a mutating operator can have, including a bool mask.
void check_saved_copy(const Tensor& x) {
  detail::check_layout("_saved_copy", "x", x);
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kBool || at::isFloatingType(dtype),
              "_saved_copy: expected x of dtype bool or a floating-point dtype, got ", detail::to_string(dtype));
}

Tensor saved_copy_kernel(const Tensor& x) {
  check_saved_copy(x);
  return x.clone(at::MemoryFormat::Contiguous);
}

Tensor saved_copy_meta(const Tensor& x) {
  check_saved_copy(x);
  return at::empty_symint(x.sym_sizes(), x.options());
}

TORCH_LIBRARY_FRAGMENT(myops, m) { m.def("_saved_copy(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag}); }

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { m.impl("_saved_copy", saved_copy_kernel); }

TORCH_LIBRARY_IMPL(myops, Meta, m) { m.impl("_saved_copy", saved_copy_meta); }

}  // namespace
}  // namespace torchops
