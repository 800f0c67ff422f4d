#pragma once

#include <optional>

#include "autograd/recipe.h"
#include "ops/kernel_path.h"

// Backward takes the same path as its forward pass (torchops.cuda.kernel_path), on whatever thread it runs.
namespace torchops::autograd {

using OptionalPath = std::optional<detail::KernelPath>;

/// Called in forward: saves the path of the call or, if it has none, of the thread. A recorded call saves only the path
/// of the call, since the thread that records it is not the one that runs it.
inline void save_path(AutogradContext* ctx, OptionalPath of_call = std::nullopt) {
  const OptionalPath path = of_call || is_recorded() ? of_call : detail::kernel_path_of_thread();
  if (path) ctx->saved_data["path"] = static_cast<int64_t>(*path);
}

/// The path with which backward creates its KernelPathGuard.
inline OptionalPath saved_path(AutogradContext* ctx) {
  const auto path = ctx->saved_data.find("path");
  if (path == ctx->saved_data.end()) return std::nullopt;
  return static_cast<detail::KernelPath>(path->second.toInt());
}

}  // namespace torchops::autograd
