#pragma once

#include <ATen/core/Tensor.h>

// A float32 x beside 16-bit weights, for kernels that read 16 bits and begin with the layer norm of its rows. A layer
// norm forgets the mean, so these kernels are given x minus the mean of each row, taken away in float32: what rounding
// then leaves out is small beside the spread of the row, as where z = layer_norm(x) is rounded, however large the mean.
//
// float16 has no numbers beyond 65504, so there a row whose variance is far above eps is multiplied by a power of two,
// exact in itself, which its layer norm forgets too: with a factor s the norm divides by sqrt(variance + eps / s^2).
// The variance of a scaled row is at least v = max(2^17 eps, 1), unless 2^20 is less, so eps counts for 2^-17 of it and
// moves z by 2^-18, where rounding moves it by 2^-12. It is below 4 v, so 128 features are below sqrt(128 * 4 * 2^20) =
// 23171. Rows of less than 4 v are as they are: none of theirs is larger.
namespace torchops::cuda {

class Centered {
 public:
  /// Whether rows of x are for this: float32, of up to 128 features, a multiple of 8, beside weights of 16 bits.
  static bool takes(const at::Tensor& x, at::ScalarType dtype);

  /// Bytes of what is made of a row of c features.
  static int64_t row_bytes(int64_t c, at::ScalarType dtype);

  /// Of x (..., c), which takes() knows and whose layer norm has `eps`: contiguous rows of `dtype`.
  Centered(const at::Tensor& x, at::ScalarType dtype, double eps);
  /// The same written to `out`, contiguous and of that dtype.
  Centered(const at::Tensor& x, at::Tensor out, double eps);

  const at::Tensor& rows() const { return rows_; }
  /// From the gradient of rows(), contiguous and of their dtype, that of x, in float32.
  at::Tensor gradient(const at::Tensor& of_rows) const;

 private:
  at::Tensor rows_, factors_;  // a factor for each row, in float16 alone
};

}  // namespace torchops::cuda
