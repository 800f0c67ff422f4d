// Which rows a product of cuBLAS may leave out is read from sizes, strides and addresses, so a CPU can tell.

#include "ops/matrices.h"

#include <ATen/Functions.h>

#include "expect.h"

using at::Tensor;
using torchops::detail::is_product_rounded_in_parts;
using torchops::detail::rows_cublas_may_leave_out;
using torchops::detail::tma_may_read;

namespace {

Tensor empty(int64_t rows, int64_t columns, at::ScalarType dtype = at::kHalf) {
  return at::empty({rows, columns}, at::TensorOptions(dtype));
}

void what_tma_may_read() {
  EXPECT(tma_may_read(empty(33, 64)));
  EXPECT(!tma_may_read(empty(33, 63)));
  EXPECT(tma_may_read(empty(33, 72).narrow(1, 8, 63)));   // rows that are not whole, at multiples of 16 bytes
  EXPECT(!tma_may_read(empty(33, 72).narrow(1, 1, 64)));  // which begin elsewhere
  EXPECT(!tma_may_read(empty(33, 65).narrow(1, 0, 64)));
  EXPECT(tma_may_read(empty(63, 64).t()));
  EXPECT(!tma_may_read(empty(64, 63).t()));
  EXPECT(tma_may_read(empty(33, 1)));
}

void what_it_may_read_of_copies() {
  const Tensor gaps = empty(33, 129).narrow(1, 1, 128).unfold(1, 1, 2).squeeze(2);
  EXPECT(gaps.size(1) == 64 && gaps.stride(0) % 8 != 0 && gaps.stride(1) == 2);
  EXPECT(tma_may_read(gaps));
  EXPECT(!tma_may_read(gaps.narrow(1, 0, 63)));
  const Tensor overlapping = empty(1, 1000).flatten().narrow(0, 1, 999).unfold(0, 64, 1);
  EXPECT(overlapping.stride(0) == 1 && overlapping.stride(1) == 1);
  EXPECT(tma_may_read(overlapping));
  EXPECT(!tma_may_read(overlapping.narrow(1, 0, 63)));
  EXPECT(tma_may_read(empty(1, 71).narrow(1, 7, 64).expand({33, 64})));
  EXPECT(tma_may_read(empty(33, 1).expand({33, 64})));
}

void rows_that_may_be_left_out() {
  const Tensor t = empty(300, 64), odd = empty(300, 63);
  EXPECT(rows_cublas_may_leave_out(t, t) == 300 % 128);
  EXPECT(rows_cublas_may_leave_out(t, odd) == 0);
  EXPECT(rows_cublas_may_leave_out(odd, t) == 0);
  EXPECT(rows_cublas_may_leave_out(empty(256, 64), empty(256, 64)) == 0);
  EXPECT(rows_cublas_may_leave_out(empty(128, 64), empty(128, 64)) == 0);
  EXPECT(rows_cublas_may_leave_out(empty(300, 64, at::kFloat), empty(300, 64, at::kFloat)) == 0);
}

void products_that_may_be_rounded_in_parts() {
  EXPECT(is_product_rounded_in_parts(empty(129, 64), empty(129, 63)));
  EXPECT(!is_product_rounded_in_parts(empty(128, 64), empty(128, 63)));
  EXPECT(!is_product_rounded_in_parts(empty(129, 64, at::kFloat), empty(129, 64, at::kFloat)));
  EXPECT(!is_product_rounded_in_parts(empty(129, 2048), empty(129, 2048)));
}

}  // namespace

int main() {
  what_tma_may_read();
  what_it_may_read_of_copies();
  rows_that_may_be_left_out();
  products_that_may_be_rounded_in_parts();
  return expect::result();
}
