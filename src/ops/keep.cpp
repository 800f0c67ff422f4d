#include "ops/keep.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common.h"

namespace torchops {

using at::Tensor;

Tensor detail::keep(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("myops::_keep", "").typed<decltype(keep)>();
  return op.call(x);
}

namespace {

// Accepts every dtype that an argument of a mutating operator can have, including a bool mask.
void check_keep(const Tensor& x) {
  detail::check_layout("_keep", "x", x);
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kBool || at::isFloatingType(dtype),
              "_keep: expected x of dtype bool or a floating-point dtype, got ", detail::to_string(dtype));
}

Tensor keep_kernel(const Tensor& x) {
  check_keep(x);
  return x.clone(at::MemoryFormat::Contiguous);
}

Tensor keep_meta(const Tensor& x) {
  check_keep(x);
  return at::empty_symint(x.sym_sizes(), x.options());
}

TORCH_LIBRARY_FRAGMENT(myops, m) { m.def("_keep(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag}); }

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) { m.impl("_keep", keep_kernel); }

TORCH_LIBRARY_IMPL(myops, Meta, m) { m.impl("_keep", keep_meta); }

}  // namespace
}  // namespace torchops
