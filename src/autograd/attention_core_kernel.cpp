#include <ATen/core/dispatch/Dispatcher.h>

#include "autograd/lazy.h"
#include "ops/attention_core.h"

namespace torchops::autograd {
namespace {

using OptionalTensor = std::optional<Tensor>;

bool attention_core(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const OptionalTensor& mask,
                    double scale, bool scaled, Tensor& out, Tensor& logsumexp) {
  const at::AutoDispatchBelowADInplaceOrView below_version_counter;
  const at::DisableRecordFunctionGuard not_recorded;
  if (is_lazy(out) || is_lazy(logsumexp)) return false;
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("myops::_triangle_attention_core", "")
                             .typed<decltype(attention_core)>();
  return op.call(materialize(q), materialize(k), materialize(v), materialize(bias), materialize(mask), scale, scaled,
                 out, logsumexp);
}

void register_lazy(torch::Library& m) { m.impl("_triangle_attention_core", attention_core); }

TORCH_LIBRARY_IMPL(myops, Negative, m) { register_lazy(m); }
TORCH_LIBRARY_IMPL(myops, Conjugate, m) { register_lazy(m); }
TORCH_LIBRARY_IMPL(myops, ZeroTensor, m) { register_lazy(m); }

}  // namespace
}  // namespace torchops::autograd
