#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <tuple>

#include "export.h"

namespace torchops {

/// The outer product mean of AlphaFold 3 (Abramson et al. 2024, supplement, algorithm 9), without its layer norm and
/// its projections to a and b:
///   outer[i, j, c * D + d] = sum over s of a[s, i, c] * b[s, j, d]
///   out[i, j] = weight @ (outer[i, j] / norm[i, j]) + bias
/// The outer products of all pairs never exist: they are computed, divided and projected for a block of rows i at a
/// time.
///
/// a: (*batch, S, N, C); b: (*batch, S, M, D); weight: (O, C * D); bias: (O,) or none; all of one floating-point dtype
/// and device. norm: (*batch, N, M) or none, of the same dtype, or float32 beside 16 bits.
/// Returns a new contiguous tensor (*batch, N, M, O).
/// Throws c10::Error, with nothing computed, when shapes, dtypes or devices do not fit.
TORCHOPS_API at::Tensor outer_product_mean(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight,
                                           const std::optional<at::Tensor>& bias = std::nullopt,
                                           const std::optional<at::Tensor>& norm = std::nullopt);

/// The argument checks of outer_product_mean(), for kernels of other backends.
TORCHOPS_API void check_outer_product_mean(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight,
                                           const std::optional<at::Tensor>& bias,
                                           const std::optional<at::Tensor>& norm);

namespace detail {

/// Of a, b, weight and norm.
using OuterProductGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using OuterProductOutputMask = std::array<bool, 4>;

/// The gradients that `output_mask` asks for; empty tensors for the others. Computes the outer products again, of a
/// block of rows at a time.
OuterProductGradients outer_product_mean_backward(const at::Tensor& grad, const at::Tensor& a, const at::Tensor& b,
                                                  const at::Tensor& weight, const std::optional<at::Tensor>& norm,
                                                  OuterProductOutputMask output_mask);

void check_outer_product_mean_backward(const at::Tensor& grad, const at::Tensor& a, const at::Tensor& b,
                                       const at::Tensor& weight, const std::optional<at::Tensor>& norm,
                                       const OuterProductOutputMask& output_mask);

/// (*batch, *sizes), where a is (*batch, S, N, C).
inline c10::SymDimVector of_batch(const at::Tensor& a, std::initializer_list<c10::SymInt> sizes) {
  c10::SymDimVector shape(a.sym_sizes().slice(0, a.dim() - 3));
  shape.append(sizes);
  return shape;
}

/// Uninitialised results of the checked arguments.
at::Tensor empty_outer_product_mean(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight);
OuterProductGradients empty_outer_product_gradients(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight,
                                                    const std::optional<at::Tensor>& norm,
                                                    const OuterProductOutputMask& output_mask);

}  // namespace detail
}  // namespace torchops
