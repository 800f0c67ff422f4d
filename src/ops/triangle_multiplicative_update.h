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
/// p_in_weight, g_in_weight: (2d, c), first the d rows of a, then those of b; p_out_weight: (c, d); g_out_weight: (c,
/// c); norms: (c,) and (d,); biases: one element per weight row, or none. All have one floating-point dtype, except
/// that x and each of the norms' parameters may be float32 if the weights are float16 or bfloat16. Returns a new
/// contiguous tensor of x's shape and the weights' dtype. Throws c10::Error, with nothing computed, when arguments do
/// not fit.
TORCHOPS_API at::Tensor triangle_multiplicative_update(
    const at::Tensor& x, std::string_view direction, const std::optional<at::Tensor>& mask,
    const std::optional<at::Tensor>& norm_in_weight, const std::optional<at::Tensor>& norm_in_bias,
    const at::Tensor& p_in_weight, const std::optional<at::Tensor>& p_in_bias, const at::Tensor& g_in_weight,
    const std::optional<at::Tensor>& g_in_bias, const std::optional<at::Tensor>& norm_out_weight,
    const std::optional<at::Tensor>& norm_out_bias, const at::Tensor& p_out_weight,
    const std::optional<at::Tensor>& p_out_bias, const at::Tensor& g_out_weight,
    const std::optional<at::Tensor>& g_out_bias, double eps = 1e-5);

/// x += triangle_multiplicative_update(x, ...), in x's dtype; returns x. mask and parameters may overlap x; they are
/// then read first. A call that the checks refuse leaves x untouched; if memory runs out halfway, x may be partly
/// overwritten, and its version counter has moved.
TORCHOPS_API at::Tensor& add_triangle_multiplicative_update_(
    at::Tensor& x, std::string_view direction, const std::optional<at::Tensor>& mask,
    const std::optional<at::Tensor>& norm_in_weight, const std::optional<at::Tensor>& norm_in_bias,
    const at::Tensor& p_in_weight, const std::optional<at::Tensor>& p_in_bias, const at::Tensor& g_in_weight,
    const std::optional<at::Tensor>& g_in_bias, const std::optional<at::Tensor>& norm_out_weight,
    const std::optional<at::Tensor>& norm_out_bias, const at::Tensor& p_out_weight,
    const std::optional<at::Tensor>& p_out_bias, const at::Tensor& g_out_weight,
    const std::optional<at::Tensor>& g_out_bias, double eps = 1e-5);

namespace detail {

using OptionalTensor = std::optional<at::Tensor>;

/// The parameters of a triangle update, with separate ones for a and b. The bias of a weight follows it. A list of them
/// may instead have packed p and g, as the public operators do, with the rows of a first: these are in the places of a,
/// and those of b are none.
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

/// The layers in the order in which backward kernels leave the sums over positions from which the gradients of all
/// parameters follow: for each, a sum per element of its weight, and then one per row.
constexpr std::array kSummedLayers{kPOut, kGOut, kPA, kGA, kPB, kGB};

/// Gradients are numbered x, mask, then the parameters.
constexpr size_t kTriangleGradients = 2 + kTriangleParameters;
using TriangleOutputMask = std::array<bool, kTriangleGradients>;
using TriangleParameterOutputMask = std::array<bool, kTriangleParameters>;

/// Which intermediate gradients the wanted ones depend on: that of z, for x and its norm; those of a and b, for z, the
/// mask and their own layers.
inline bool wants_z(const TriangleOutputMask& output_mask) {
  return output_mask[0] || output_mask[2 + kNormIn] || output_mask[3 + kNormIn];
}
inline bool wants_a_and_b(const TriangleOutputMask& output_mask) {
  bool any = wants_z(output_mask) || output_mask[1];
  for (size_t i = kPA; i < kNormOut; ++i) any = any || output_mask[2 + i];
  return any;
}

/// The arguments that all forms of the operator share, with separate parameters for a and b even if passed packed.
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

/// The arguments of triangle_multiplicative_update(), in order.
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

/// Raises unless the arguments fit and, if `writes`, x can be overwritten.
void check_triangle(const char* op, const TriangleArguments& arguments, bool writes);

/// The parameters as a list, packed.
TriangleParameterList to_list(const TriangleArguments& arguments);

/// The checked arguments, with packed parameters split into views, which are differentiable if autograd is on.
TriangleUpdate taken_apart(const at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                           bool outgoing, double eps);
TriangleUpdate taken_apart(const TriangleArguments& arguments);

/// The private operators that the public ones call. They take packed weights or separate ones for a and b. Each also
/// returns the product o, which backward needs, as a contiguous tensor of triangle_product_shape(), of which only the N
/// rows and columns are read; without keep_product, an empty tensor. With `add_residual`, the first result is x plus
/// the update, in x's dtype.
std::tuple<at::Tensor, at::Tensor> triangle_update(const at::Tensor& x, const OptionalTensor& mask,
                                                   const TriangleParameterList& parameters, bool outgoing, double eps,
                                                   bool keep_product, bool add_residual);
at::Tensor triangle_update_(at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                            bool outgoing, double eps, bool keep_product);

/// A list that holds only the product. Kernels clear it as soon as the product has been read, so that its memory can be
/// reused for what comes next, unless someone else holds the product.
using TriangleProduct = c10::List<OptionalTensor>;

/// The gradients where `output_mask` asks for them, packed as the parameters are, and empty tensors elsewhere.
/// Everything but the product is recomputed. With `add_residual`, dx is the gradient of x plus the update, so it
/// includes grad itself.
std::vector<at::Tensor> triangle_update_backward(const at::Tensor& grad, const at::Tensor& x,
                                                 const TriangleProduct& product, const OptionalTensor& mask,
                                                 const TriangleParameterList& parameters, bool outgoing, double eps,
                                                 TriangleOutputMask output_mask, bool add_residual);

/// The argument checks of these operators, for every backend; they return the arguments as one struct.
TriangleUpdate checked_triangle_update(const at::Tensor& x, const OptionalTensor& mask,
                                       const TriangleParameterList& parameters, bool outgoing, double eps);
TriangleUpdate checked_triangle_update_(const at::Tensor& x, const OptionalTensor& mask,
                                        const TriangleParameterList& parameters, bool outgoing, double eps);
TriangleUpdate checked_triangle_update_backward(const at::Tensor& grad, const at::Tensor& x,
                                                const TriangleProduct& product, const OptionalTensor& mask,
                                                const TriangleParameterList& parameters, bool outgoing, double eps,
                                                const TriangleOutputMask& output_mask);

/// The same for operators on some rows (rows, N, c) of a pair tensor (triangle_rows.h).
TriangleUpdate checked_triangle_rows(const char* op, const at::Tensor& x, const OptionalTensor& mask,
                                     const TriangleParameterList& parameters, double eps);

/// The same for only the parameters, and which of their gradients are wanted; x and the mask of the result are not
/// defined.
TriangleUpdate checked_triangle_parameters(const char* op, const TriangleParameterList& parameters,
                                           const TriangleParameterOutputMask& output_mask);

/// Only the checks, for a kernel that passes the arguments on as they are.
void check_triangle_update(const at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                           bool outgoing, double eps);
void check_triangle_update_(const at::Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                            bool outgoing, double eps);
void check_triangle_update_backward(const at::Tensor& grad, const at::Tensor& x, const TriangleProduct& product,
                                    const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                                    double eps, const TriangleOutputMask& output_mask);

/// Registers the public operators for a backend that has the private ones.
void register_triangle_update(torch::Library& backend);

/// The shape of the product o: (*batch, d, N, N), N rounded up to padded_size() rows and padded_row_stride() columns.
c10::SymDimVector triangle_product_shape(const TriangleUpdate& update);

/// Allocates the gradients, uninitialised; each in the dtype of what it is for. Empty if not wanted.
std::vector<at::Tensor> empty_triangle_gradients(
    const TriangleUpdate& update, const TriangleOutputMask& output_mask,
    c10::function_ref<at::Tensor(c10::SymIntArrayRef, const at::TensorOptions&)> empty);

/// The part of that for the parameters.
std::vector<at::Tensor> empty_triangle_parameter_gradients(
    const TriangleUpdate& update, const TriangleParameterOutputMask& output_mask,
    c10::function_ref<at::Tensor(c10::SymIntArrayRef, const at::TensorOptions&)> empty);

/// Those that are wanted, for a and b separately as the parameters of the update are, if need be as views; all others
/// are undefined.
using TriangleResults = std::array<at::Tensor, kTriangleParameters>;
TriangleResults gradients_apart(const TriangleUpdate& update, at::ArrayRef<at::Tensor> parameter_gradients,
                                const TriangleParameterOutputMask& output_mask);

/// Where each of kSummedLayers begins among the sums of one batch element, and at last how many sums there are.
std::array<c10::SymInt, kSummedLayers.size() + 1> triangle_sums_begin(const TriangleUpdate& update);

/// N rounded up so that rows of a product are multiples of 32 bytes. Matrix kernels need 16 to be fast at all, and 32
/// to be as fast as they can.
template <class Int>
Int padded_size(const Int& n, at::ScalarType dtype, int64_t bytes = 32) {
  const auto step = bytes / static_cast<int64_t>(c10::elementSize(dtype));
  return (n + (step - 1)) / step * step;
}

/// The row stride in the matrices of d channels: a multiple of 128 bytes if N is large, so that the padding is a small
/// part: rows then begin at whole lines of the caches. For more than 128 channels this would take too much memory. Has
/// no branches, which a graph with symbolic sizes would have to guard, and no difference of sizes, which it would have
/// to show not to be negative.
template <class Int>
Int padded_row_stride(const Int& n, const Int& d, at::ScalarType dtype) {
  const auto at_most_one = [](const Int& value) {
    if constexpr (std::is_same_v<Int, int64_t>) {
      return std::min(value, Int{1});
    } else {
      return value.min(1);
    }
  };
  const auto in_32_bytes = 32 / static_cast<int64_t>(c10::elementSize(dtype));
  const Int large = at_most_one(n / 512) * (1 - at_most_one(d / 129)), step = in_32_bytes + 3 * in_32_bytes * large;
  return (n + (step - 1)) / step * step;
}

/// The factor of a that keeps o far from the largest number of float16, 65504: a power of 2 near 1 / sqrt(N), since
/// products of numbers with random signs grow as sqrt(N). The layer norm of o stays the same if eps is multiplied by
/// the square of the factor. 1 for all other dtypes.
double triangle_scale(int64_t n, at::ScalarType dtype);

/// The view with these sizes and strides. Skips the dispatcher, of which a training step would have dozens of calls, if
/// nothing but the backend's kernel would run.
at::Tensor strided_view(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

/// The i-th batch element, (N, N, ...), of x (*batch, N, N, c), the mask or a result.
at::Tensor batch_element(const at::Tensor& t, int64_t trailing_dims, int64_t index);
int64_t batch_size(const at::Tensor& t, int64_t trailing_dims);

}  // namespace detail
}  // namespace torchops
