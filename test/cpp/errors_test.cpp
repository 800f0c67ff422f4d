// Bad arguments from C++: a c10::Error with the text that all backends share, and nothing written.

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>

#include "expect.h"
#include "ops/dense.h"
#include "ops/layer_norm.h"
#include "ops/sigmoid.h"
#include "ops/softmax.h"
#include "ops/square_matmul.h"

using at::Tensor;

namespace {

void test_dense() {
  const Tensor x = at::randn({2, 128});
  EXPECT_THROWS(c10::Error, "dense: expected w of shape (out, in) with in = 128 to match x, got (64, 96)",
                torchops::dense(x, at::randn({64, 96})));
  EXPECT_THROWS(c10::Error, "dense: expected w of dtype float32 to match x, got float64",
                torchops::dense(x, at::randn({64, 128}, at::kDouble)));
  EXPECT_THROWS(c10::Error, "dense: expected w on device cpu to match x, got meta",
                torchops::dense(x, at::empty({64, 128}, at::device(at::kMeta).dtype(at::kFloat))));
  EXPECT_THROWS(c10::Error, "dense: expected x of dtype float32, float64, float16 or bfloat16, got int64",
                torchops::dense(x.to(at::kLong), at::randn({64, 128})));
  EXPECT_THROWS(c10::Error, "dense: expected x with at least 1 dimension, got a 0-dimensional tensor",
                torchops::dense(at::randn({}), at::randn({64, 128})));
  EXPECT_THROWS(c10::Error, "dense: expected b of shape (64,) to match w, got (63,)",
                torchops::dense(x, at::randn({64, 128}), at::randn({63})));
}

// `call` must throw `text`, name the mutating operator, and leave value and version of its argument unchanged.
template <class Error, class Call>
void expect_untouched(const char* text, Tensor x, Call call) {
  const Tensor before = x.clone();
  const auto version = x._version();
  EXPECT_THROWS(Error, text, call(x));
  EXPECT(at::equal(x, before));
  EXPECT(x._version() == version);
}

void test_in_place() {
  const Tensor a = at::randn({3, 4});
  expect_untouched<c10::Error>("square_matmul_: expected b", a,
                               [](Tensor& t) { torchops::square_matmul_(t, at::randn({5, 5})); });
  expect_untouched<c10::Error>("square_matmul_: expected b of dtype float32 to match a, got float64", a,
                               [](Tensor& t) { torchops::square_matmul_(t, at::randn({4, 4}, at::kDouble)); });
  expect_untouched<c10::IndexError>("softmax_: expected dim in [-2, 1] for x of shape (3, 4), got 5", a,
                                    [](Tensor& t) { torchops::softmax_(t, 5); });
  expect_untouched<c10::Error>("layer_norm_: expected", a,
                               [](Tensor& t) { torchops::layer_norm_(t, at::IntArrayRef({5})); });
  expect_untouched<c10::Error>("sigmoid_: expected x of dtype float32, float64, float16 or bfloat16, got int64",
                               a.to(at::kLong), [](Tensor& t) { torchops::sigmoid_(t); });
  expect_untouched<c10::Error>(
      "sigmoid_: expected x without internal overlap, got shape (3, 4) with strides (0, 1): more than one element of "
      "the written-to "
      "tensor refers to a single memory location. Please clone() the tensor before performing the operation.",
      at::randn({4}).expand({3, 4}), [](Tensor& t) { torchops::sigmoid_(t); });
}

// The functional twins name themselves, not the mutating operator, in their errors.
void test_functional() {
  const Tensor a = at::randn({3, 4});
  EXPECT_THROWS(c10::Error, "square_matmul: expected b", torchops::square_matmul(a, at::randn({5, 5})));
  EXPECT_THROWS(c10::IndexError, "softmax: expected dim in [-2, 1] for x of shape (3, 4), got 5",
                torchops::softmax(a, 5));
  EXPECT_THROWS(c10::Error, "layer_norm: expected", torchops::layer_norm(a, at::IntArrayRef({5})));
  EXPECT_THROWS(c10::Error, "sigmoid: expected x of dtype", torchops::sigmoid(a.to(at::kLong)));
}

}  // namespace

int main() {
  test_dense();
  test_in_place();
  test_functional();
  return expect::result();
}
