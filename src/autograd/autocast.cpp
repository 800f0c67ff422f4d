#include "autograd/autocast.h"

#include <ATen/autocast_mode.h>

namespace torchops::autograd {
namespace {

// Must be called before Casting turns autocast off. An empty result means: no cast.
std::optional<at::ScalarType> target(CastTo to, const Tensor& first) {
  if (!first.defined()) return std::nullopt;
  const c10::DeviceType device = first.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return std::nullopt;
  if (to == CastTo::kLowerPrecision) return at::autocast::get_autocast_dtype(device);
  if (to == CastTo::kFloat32 && device != c10::kCPU) return at::kFloat;
  return first.is_floating_point() ? std::optional(first.scalar_type()) : std::nullopt;
}

}  // namespace

Casting::Casting(CastTo to, const Tensor& first)
    : device_(first.defined() ? first.device().type() : c10::kCPU),
      dtype_(target(to, first)),
      no_autocast_(c10::autocast_dispatch_keyset) {}

Tensor Casting::operator()(const Tensor& argument) const {
  return dtype_ ? at::autocast::cached_cast(*dtype_, argument, device_) : argument;
}

}  // namespace torchops::autograd
