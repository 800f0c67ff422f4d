#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>

#include "cuda/gemm/ways.h"

// The fast kernels of gates take rows that are whole pieces of 16 bytes. Other 16-bit rows are copied to such rows,
// with features that are zero: cuBLAS takes more than twice as long for products of odd sizes.
namespace torchops::cuda {

/// Panels of copies are at most this large. Smaller ones would take more launches, each with a last wave that leaves
/// multiprocessors idle.
constexpr int64_t kMaxCopiedBytes = int64_t{64} << 20;

/// Copies of 16-bit matrices to contiguous ones of other sizes, several by one launch: between small ones, launches
/// take longer than copies.
class Copies {
 public:
  /// Copies the first columns, and rows. What `from` lacks becomes 0 in columns, and a copy of its last row in rows. If
  /// rows of `from` have gaps between their elements, it is made contiguous first.
  Copies& add(const at::Tensor& to, const at::Tensor& from);
  /// Makes the copies that were added since the last call.
  void run();

 private:
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 8> pairs_;
};

/// The features of such copies. Functions that take `copies` return a matrix that is one of them, or their argument, as
/// a matrix, if it needs no copy.
struct WholeVectors {
  int64_t in_features, out_features;

  /// nullopt if x, w, `others` and rows of as many features as w has rows need no copies, or these don't pay, or if a
  /// dtype is not that of w, of 16 bits, or the path is not automatic, or the compute capability is below 8.0. The
  /// tensors may have any number of dimensions; for kGlu, they are matrices.
  static std::optional<WholeVectors> of(gemm::CopiedLayer layer, const at::Tensor& x, const at::Tensor& w,
                                        at::TensorList others);

  at::Tensor input(const at::Tensor& x, Copies& copies) const;
  at::Tensor output(const at::Tensor& v, Copies& copies) const;
  /// Additional rows repeat the last one. So where a row of x has infinities, and dx of gate() is 0, it has no NaN
  /// here: the product of an additional feature is as infinite as that of the last one, which makes the gate's
  /// derivative 0, and v and the cotangent are 0.
  at::Tensor weight(const at::Tensor& w, Copies& copies) const;
  std::optional<at::Tensor> bias(const std::optional<at::Tensor>& b, Copies& copies) const;

  /// Bytes of the copies of a row, 0 if no row is copied. These take tensors of any number of dimensions, too.
  int64_t input_bytes(const at::Tensor& x) const;
  int64_t output_bytes(const at::Tensor& v) const;
};

/// The first elements of a matrix or vector as a tensor of these sizes: a copy, or a view if it has no more; a tensor
/// without elements is returned as it is.
at::Tensor first_elements(const at::Tensor& from, at::IntArrayRef sizes, Copies& copies);

/// x @ w.T + b by cuBLAS for panels of the rows x, which are rounded to the dtype of w, or copied to whole vectors.
class PanelProduct {
 public:
  PanelProduct(const std::optional<WholeVectors>& whole, const at::Tensor& w, const std::optional<at::Tensor>& b)
      : PanelProduct(whole, w, b, Copies()) {}

  /// The factors, perhaps with more features.
  const at::Tensor w;
  const std::optional<at::Tensor> b;

  bool has_more_features() const { return w.size(0) != out_features_; }
  /// Whether input(x) is not x. A rounded x without features is a copy of no bytes.
  bool copies(const at::Tensor& x) const { return x.scalar_type() != w.scalar_type() || input_bytes(x) > 0; }
  /// Scratch of a row, for x and for the product.
  int64_t input_bytes(const at::Tensor& x) const;
  int64_t product_bytes() const;
  at::Tensor empty(int64_t rows) const;
  /// A factor of the product, which may be one of `copies`.
  at::Tensor input(const at::Tensor& x, Copies& copies) const {
    return whole_ ? whole_->input(x, copies) : x.to(w.scalar_type());
  }
  /// The same at once; if copies(x), in `scratch`, of as many rows and contiguous.
  at::Tensor input(const at::Tensor& x, const at::Tensor& scratch) const;
  /// Writes the product of input() to z, and returns those of its columns that w had.
  at::Tensor operator()(const at::Tensor& z, const at::Tensor& input) const;

 private:
  PanelProduct(const std::optional<WholeVectors>& whole, const at::Tensor& w, const std::optional<at::Tensor>& b,
               Copies copies)
      : w(whole ? whole->weight(w, copies) : w),
        b(whole ? whole->bias(b, copies) : b),
        whole_(whole),
        out_features_(w.size(0)) {
    copies.run();
  }

  std::optional<WholeVectors> whole_;
  int64_t out_features_;
};

}  // namespace torchops::cuda
