#include "autograd/recipe.h"

#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/TensorWrapper.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mv.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace torchops::autograd {

bool functorch_active() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

void check_not_captured(const char* name, const Tensor& self) {
  using at::functorch::TransformType;
  const auto layer = at::functorch::maybeCurrentDynamicLayer();
  if (!layer || (layer->key() != TransformType::Grad && layer->key() != TransformType::Jvp)) return;
  const auto* const wrapper = at::functorch::maybeGetTensorWrapper(self);
  TORCH_CHECK(
      wrapper != nullptr && wrapper->level() == layer->layerId() && !wrapper->is_immutable(),
      "During a grad (vjp, jvp, grad, etc) transform, the function provided attempted to call in-place operation "
      "(myops::",
      name,
      ") that would mutate a captured Tensor. This is not supported; please rewrite the function being "
      "transformed to explicitly accept the mutated Tensor(s) as inputs.");
}

bool is_traced(const Tensor& input) {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         (input.defined() && (input.key_set().has(c10::DispatchKey::Python) ||
                              input.key_set().has(c10::DispatchKey::Functionalize) || input.is_meta()));
}

namespace {

template <class Question>
bool any(const OptionalTensorList& inputs, const Question& question) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (question(inputs.get(i))) return true;
  }
  return false;
}

}  // namespace

bool is_traced(const OptionalTensorList& inputs) {
  return any(inputs, [](const std::optional<Tensor>& input) { return is_traced(input); });
}
bool requires_grad(const OptionalTensorList& inputs) {
  return any(inputs, [](const std::optional<Tensor>& input) { return requires_grad(input); });
}
bool has_tangent(const OptionalTensorList& inputs) {
  return any(inputs, [](const std::optional<Tensor>& input) { return has_tangent(input); });
}

bool is_recorded() {
  using c10::impl::TorchDispatchModeTLS;
  return TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

Tensor without_alias(const Tensor& mutated, const Tensor& argument) {
  // The wrappers of torch.func have no memory of their own that could be compared. So they count as aliases.
  constexpr c10::DispatchKeySet wrappers({c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
  const bool is_wrapped = argument.defined() && argument.key_set().has_any(wrappers);
  return is_wrapped || detail::may_alias(mutated, argument) ? detail::saved_copy(argument) : argument;
}

void check_can_be_saved(at::TensorList tensors) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(
        !tensor.defined() || !tensor.is_inference(),
        "Inference tensors cannot be saved for backward. Please do not use Tensors created in inference mode in "
        "computation tracked by autograd. To work around this, you can make a clone to get a normal tensor and "
        "use it in autograd, or use `torch.no_grad()` instead of `torch.inference_mode()`.");
  }
}

Tensor matmul(const Tensor& a, const Tensor& m) { return a.dim() == 1 ? at::mv(m.t(), a) : at::matmul(a, m); }

}  // namespace torchops::autograd
