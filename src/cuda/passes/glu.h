#pragma once

#include <ATen/core/Tensor.h>

#include "ops/common.h"
#include "ops/glu.h"

// The passes of gated linear units after, and in backward between, their products. Several operators call them;
// compiled in each, their kernels would be as often in the library.
namespace torchops::cuda {

class PassSums;

/// Both products of glu, or both cotangents, as matrices.
struct GluPair {
  at::Tensor z, u;

  static GluPair halves(const at::Tensor& both) {
    const int64_t n = both.size(1) / 2;
    return {both.narrow(1, 0, n), both.narrow(1, n, n)};
  }
  static GluPair rows(const at::Tensor& z, const at::Tensor& u) { return {detail::as_rows(z), detail::as_rows(u)}; }
  GluPair narrow(int64_t begin, int64_t end) const {
    return {z.narrow(0, begin, end - begin), u.narrow(0, begin, end - begin)};
  }
};

/// y = glu of the products of some rows. y may be z.
void glu_rows(const at::Tensor& y, const at::Tensor& z, const at::Tensor& u, detail::GluActivation activation);

/// Makes the cotangents, and adds them to the sums.
void glu_backward_rows(PassSums& sums, const GluPair& cotangents, const at::Tensor& g, const GluPair& products,
                       detail::GluActivation activation);

}  // namespace torchops::cuda
