#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "export.h"

namespace torch {
class Library;
}

namespace torchops {

/// The triangle multiplicative update of a pair tensor (Jumper et al. 2021, supplement, algorithms 11 and 12):
///   z = layer_norm(x),  (a, b) = (z @ p_in.T + ...) * sigmoid(z @ g_in.T + ...) * mask
///   outgoing o[i, j] = sum_k a[i, k] b[j, k],  incoming o[i, j] = sum_k a[k, i] b[k, j],  for each channel
///   (layer_norm(o) @ p_out.T + ...) * sigmoid(z @ g_out.T + ...)
///
/// x: (*batch, N, N, c); direction: "outgoing" or "incoming"; mask: (*batch, N, N), bool or floating-point, or none;
/// p_in_weight, g_in_weight: (2d, c), first the d rows of a, then those of b; p_out_weight: (c, d); g_out_weight:
/// (c, c); norms (c,) and (d,); biases as the weights' rows, or none. All parameters of one floating-point dtype, and x
/// too, except that x may be float32 where they are float16 or bfloat16. Returns a new contiguous tensor of x's shape
/// and the parameters' dtype. Throws c10::Error, with nothing computed, when arguments do not fit.
TORCHOPS_API at::Tensor triangle_multiplicative_update(
    const at::Tensor& x, std::string_view direction, const std::optional<at::Tensor>& mask,
    const std::optional<at::Tensor>& norm_in_weight, const std::optional<at::Tensor>& norm_in_bias,
    const at::Tensor& p_in_weight, const std::optional<at::Tensor>& p_in_bias, const at::Tensor& g_in_weight,
    const std::optional<at::Tensor>& g_in_bias, const std::optional<at::Tensor>& norm_out_weight,
    const std::optional<at::Tensor>& norm_out_bias, const at::Tensor& p_out_weight,
    const std::optional<at::Tensor>& p_out_bias, const at::Tensor& g_out_weight,
    const std::optional<at::Tensor>& g_out_bias, double eps = 1e-5);

/// x += triangle_multiplicative_update(x, ...), in x's dtype; returns x. mask and parameters may overlap x; they are
/// then read first. A call that its checks refuse leaves x untouched; where memory runs out halfway, a part may be
/// overwritten, and x's version counter has moved.
TORCHOPS_API at::Tensor& triangle_multiplicative_update_(
    at::Tensor& x, std::string_view direction, const std::optional<at::Tensor>& mask,
    const std::optional<at::Tensor>& norm_in_weight, const std::optional<at::Tensor>& norm_in_bias,
    const at::Tensor& p_in_weight, const std::optional<at::Tensor>& p_in_bias, const at::Tensor& g_in_weight,
    const std::optional<at::Tensor>& g_in_bias, const std::optional<at::Tensor>& norm_out_weight,
    const std::optional<at::Tensor>& norm_out_bias, const at::Tensor& p_out_weight,
    const std::optional<at::Tensor>& p_out_bias, const at::Tensor& g_out_weight,
    const std::optional<at::Tensor>& g_out_bias, double eps = 1e-5);

namespace detail {

using OptionalTensor = std::optional<at::Tensor>;

/// The parameters of a triangle update, those of a and b apart. A weight and its bias are neighbours. A list of them
/// may have p and g packed instead, as the public operators do, first the rows of a: in the places of a, and none in
/// those of b.
enum TriangleParameter : size_t {
  kNormIn = 0,
  kPA = 2,
  kPB = 4,
  kGA = 6,
  kGB = 8,
  kNormOut = 10,
  kPOut = 12,
  kGOut = 14,
};
constexpr size_t kTriangleParameters = 16;
using TriangleParameters = std::array<OptionalTensor, kTriangleParameters>;
using TriangleParameterList = c10::List<OptionalTensor>;

/// Gradients are numbered x, mask, then the parameters.
constexpr size_t kTriangleGradients = 2 + kTriangleParameters;
using TriangleMask = std::array<bool, kTriangleGradients>;

/// What of the chain of gradients these need: that of z, for x and its norm; those of a and b at all, for z, the mask
/// and their layers.
inline bool wants_z(const TriangleMask& wanted) { return wanted[0] || wanted[2 + kNormIn] || wanted[3 + kNormIn]; }
inline bool wants_a_and_b(const TriangleMask& wanted) {
  bool any = wants_z(wanted) || wanted[1];
  for (size_t i = kPA; i < kNormOut; ++i) any = any || wanted[2 + i];
  return any;
}

/// The arguments that every form of the operator shares: parameters of a and b apart, whether or not they came packed.
struct TriangleUpdate {
  at::Tensor x;
  OptionalTensor mask;
  TriangleParameters parameters;
  bool outgoing;
  double eps;
  bool packed;

  const at::Tensor& weight(TriangleParameter layer) const { return *parameters[layer]; }
  const OptionalTensor& bias(TriangleParameter layer) const { return parameters[layer + 1]; }
  /// The dtype of the products and of the result.
  at::ScalarType dtype() const { return weight(kPA).scalar_type(); }
};

/// The arguments of triangle_multiplicative_update(), in its order.
struct TriangleArguments {
  at::Tensor x;
  std::string_view direction;
  OptionalTensor mask, norm_in_weight, norm_in_bias;
  at::Tensor p_in_weight;
  OptionalTensor p_in_bias;
  at::Tensor g_in_weight;
  OptionalTensor g_in_bias, norm_out_weight, norm_out_bias;
  at::Tensor p_out_weight;
  OptionalTensor p_out_bias;
  at::Tensor g_out_weight;
  OptionalTensor g_out_bias;
  double eps;
};

/// Raises unless they fit, and, where `writes`, x can be overwritten.
void check_triangle(const char* op, const TriangleArguments& arguments, bool writes);

/// The parameters, packed.
TriangleParameterList to_list(const TriangleArguments& arguments);

/// Checked arguments with packed parameters taken apart: views, differentiable where autograd is on.
TriangleUpdate taken_apart(const at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                           bool outgoing, double eps);
TriangleUpdate taken_apart(const TriangleArguments& arguments);

/// The operators beneath, which take packed weights, or those of a and b that lie anywhere. Each returns the product o
/// too, which the gradients read, as a contiguous tensor of triangle_product_shape(), of which only the N rows and
/// columns are read; or, without keep_product, a tensor of no elements. If it `adds`, the first result is x plus the
/// update, in x's dtype.
std::tuple<at::Tensor, at::Tensor> triangle_update(const at::Tensor& x, const OptionalTensor& mask,
                                                   const TriangleParameterList& parameters, bool outgoing, double eps,
                                                   bool keep_product, bool adds);
at::Tensor triangle_update_(at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                            bool outgoing, double eps, bool keep_product);

/// A list of the product alone. Kernels empty it as soon as the product has been read, so that its memory is free for
/// what is made next, unless others hold it.
using TriangleProduct = c10::List<OptionalTensor>;

/// The gradients where `wanted` asks for them, packed as the parameters are, and empty tensors elsewhere. Everything
/// but the product is computed again. That of x is that of x plus the update if it `adds`: with grad itself.
std::vector<at::Tensor> triangle_update_backward(const at::Tensor& grad, const at::Tensor& x,
                                                 const TriangleProduct& product, const OptionalTensor& mask,
                                                 const TriangleParameterList& parameters, bool outgoing, double eps,
                                                 TriangleMask wanted, bool adds);

/// Their argument checks, for every backend, which return the arguments in one piece.
TriangleUpdate checked_triangle_update(const at::Tensor& x, const OptionalTensor& mask,
                                       const TriangleParameterList& parameters, bool outgoing, double eps);
TriangleUpdate checked_triangle_update_(const at::Tensor& x, const OptionalTensor& mask,
                                        const TriangleParameterList& parameters, bool outgoing, double eps);
TriangleUpdate checked_triangle_update_backward(const at::Tensor& grad, const at::Tensor& x,
                                                const TriangleProduct& product, const OptionalTensor& mask,
                                                const TriangleParameterList& parameters, bool outgoing, double eps,
                                                const TriangleMask& wanted);

/// The checks alone, of arguments that are handed on.
void check_triangle_update(const at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                           bool outgoing, double eps);
void check_triangle_update_backward(const at::Tensor& grad, const at::Tensor& x, const TriangleProduct& product,
                                    const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                                    double eps, const TriangleMask& wanted);

/// Registers the public operators for a backend that has those beneath.
void register_triangle_update(torch::Library& backend);

/// Of the product o: (*batch, d, N, N), with N rounded up to padded_size() rows and padded_row_stride() columns.
c10::SymDimVector triangle_product_shape(const TriangleUpdate& update);

/// Uninitialised gradients, the parameters' in the dtype of the parameters, and empty ones where none is wanted.
std::vector<at::Tensor> empty_triangle_gradients(
    const TriangleUpdate& update, const TriangleMask& wanted,
    c10::function_ref<at::Tensor(c10::SymIntArrayRef, const at::TensorOptions&)> empty);

/// N rounded up so that rows of a product are multiples of 32 bytes. Matrix kernels need 16 to be fast at all; on an
/// H100 the 128 products of N = 1025 in bfloat16 take 523 us for rows of 1040 elements and 820 for 1032.
template <class Int>
Int padded_size(const Int& n, at::ScalarType dtype, int64_t bytes = 32) {
  const auto step = bytes / static_cast<int64_t>(c10::elementSize(dtype));
  return (n + (step - 1)) / step * step;
}

/// From one of these rows to the next, in the matrices of d channels: a multiple of 128 bytes where N is large, so that
/// the padding is a small part. On an H100 the 128 products of N = 769 in bfloat16, padded to 784, take 266 us for rows
/// 832 apart and 284 for rows 784 apart. More channels than 128 would take too much memory. Without branches, which a
/// graph of symbolic sizes would have to guard.
template <class Int>
Int padded_row_stride(const Int& n, const Int& d, at::ScalarType dtype) {
  const auto at_most_one = [](const Int& value) {
    if constexpr (std::is_same_v<Int, int64_t>) {
      return std::min(value, Int{1});
    } else {
      return value.min(1);
    }
  };
  const Int size = padded_size(n, dtype), aligned = padded_size(n, dtype, 128);
  return size + (aligned - size) * at_most_one(n / 512) * (1 - at_most_one(d / 129));
}

/// By what a is scaled, so that o stays far from the largest number of float16, 65504: a power of 2 near 1 / sqrt(N),
/// by which products of numbers of random signs grow. The layer norm of o is the same, with eps times its square.
/// 1 in all other types.
double triangle_scale(int64_t n, at::ScalarType dtype);

/// The view of these sizes and strides. For kernels, where no operator but the backend's is in question, without a call
/// through the dispatcher, of which a step of training has dozens.
at::Tensor strided_view(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

/// x (*batch, N, N, c), mask or result as the i-th of its batch elements, (N, N, ...).
at::Tensor batch_element(const at::Tensor& t, int64_t trailing_dims, int64_t index);
int64_t batch_size(const at::Tensor& t, int64_t trailing_dims);

}  // namespace detail
}  // namespace torchops
