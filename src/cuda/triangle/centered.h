#pragma once

#include <ATen/core/Tensor.h>

// Centring lets kernels that read 16 bits, and begin with the layer norm of their rows, take a float32 x with 16-bit
// weights. A layer norm ignores the mean, so they get x minus the mean of each row, subtracted in float32. The loss in
// rounding is then small beside the spread of the row, as for a rounded z = layer_norm(x), however large the mean is.
//
// float16 has no numbers beyond 65504, so a row whose variance is far above eps is multiplied by a power of two, which
// is exact and which its layer norm ignores too: with a factor s, the norm divides by sqrt(variance + eps / s^2). A
// scaled row has a variance of at least v = min(max(2^17 eps, 1), 2^20), so eps counts for 2^-17 of it and moves z by
// 2^-18, while rounding moves z by 2^-12. The variance is below 4 v, so 128 features are below sqrt(128 * 4 * 2^20) =
// 23171. Rows with a variance below 4 v are not scaled: none of their elements is larger than that.
namespace torchops::cuda {

class Centered {
 public:
  /// Whether this is for rows of x: float32, up to 128 features, a multiple of 8, with weights of 16 bits.
  static bool takes(const at::Tensor& x, at::ScalarType dtype);

  /// Bytes of the centred copy of a row of c features.
  static int64_t row_bytes(int64_t c, at::ScalarType dtype);

  /// Centres x (..., c), for which takes() is true and whose layer norm has `eps`, to contiguous rows of `dtype`.
  Centered(const at::Tensor& x, at::ScalarType dtype, double eps);
  /// The same, written to `out`, which is contiguous and has that dtype.
  Centered(const at::Tensor& x, at::Tensor out, double eps);

  const at::Tensor& rows() const { return rows_; }
  /// The gradient of x, in float32, from that of rows(), which is contiguous and has their dtype.
  at::Tensor gradient(const at::Tensor& of_rows) const;

 private:
  at::Tensor rows_, factors_;  // one factor per row, only for float16
};

}  // namespace torchops::cuda
