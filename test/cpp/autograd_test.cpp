// Gradients from C++, against their formulas written in ATen, and the errors that autograd must raise.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "expect.h"
#include "ops/dense.h"
#include "ops/gate.h"
#include "ops/layer_norm.h"
#include "ops/sigmoid.h"
#include "ops/softmax.h"
#include "ops/square_matmul.h"

using at::Tensor;
using torch::autograd::grad;

namespace {

Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

Tensor leaf(at::IntArrayRef shape) { return random(shape).requires_grad_(); }

void test_dense() {
  const Tensor x = leaf({5, 3}), w = leaf({4, 3}), b = leaf({4}), g = random({5, 4});
  const auto grads = grad({torchops::dense(x, w, b)}, {x, w, b}, {g});
  const Tensor y = at::sigmoid(at::linear(x, w, b)).detach(), dz = g * y * (1 - y);
  EXPECT_CLOSE(grads[0], dz.mm(w.detach()));
  EXPECT_CLOSE(grads[1], dz.t().mm(x.detach()));
  EXPECT_CLOSE(grads[2], dz.sum(0));
}

void test_gate_in_place() {
  const Tensor start = leaf({5, 4}), x = leaf({5, 3}), w = leaf({4, 3}), b = leaf({4}), g = random({5, 4});
  Tensor v = start * 2;
  torchops::gate_(v, x, w, b);
  const auto grads = grad({v}, {start, x, w, b}, {g});
  const Tensor s = at::sigmoid(at::linear(x, w, b)).detach(), dz = g * start.detach() * 2 * s * (1 - s);
  EXPECT_CLOSE(grads[0], 2 * g * s);
  EXPECT_CLOSE(grads[1], dz.mm(w.detach()));
  EXPECT_CLOSE(grads[2], dz.t().mm(x.detach()));
  EXPECT_CLOSE(grads[3], dz.sum(0));
}

void test_square_matmul_in_place() {
  for (const bool transpose_b : {false, true}) {
    const Tensor start = leaf({5, 3}), b = leaf({3, 3}), g = random({5, 3});
    Tensor a = start * 2;
    torchops::square_matmul_(a, b, transpose_b);
    const auto grads = grad({a}, {start, b}, {g});
    const Tensor old = start.detach() * 2;
    EXPECT_CLOSE(grads[0], 2 * g.mm(transpose_b ? b.detach() : b.detach().t()));
    EXPECT_CLOSE(grads[1], transpose_b ? g.t().mm(old) : old.t().mm(g));
  }
}

void test_saved_results() {
  const Tensor start = leaf({5, 3}), g = random({5, 3});
  Tensor s = start * 2;
  torchops::sigmoid_(s);
  const Tensor y = at::sigmoid(start.detach() * 2);
  EXPECT_CLOSE(grad({s}, {start}, {g})[0], 2 * g * y * (1 - y));

  Tensor p = start * 2;
  torchops::softmax_(p, 0);
  const Tensor q = at::softmax(start.detach() * 2, 0);
  EXPECT_CLOSE(grad({p}, {start}, {g})[0], 2 * q * (g - (g * q).sum(0, /*keepdim=*/true)));
}

void test_layer_norm_in_place() {
  const Tensor start = leaf({5, 3}), weight = leaf({3}), bias = leaf({3}), g = random({5, 3});
  Tensor x = start * 2;
  torchops::layer_norm_(x, at::IntArrayRef({3}), weight, bias);
  const auto grads = grad({x}, {start, weight, bias}, {g});
  const Tensor old = start.detach() * 2, centred = old - old.mean(1, /*keepdim=*/true);
  const Tensor rstd = (centred.square().mean(1, /*keepdim=*/true) + 1e-5).rsqrt(), n = centred * rstd;
  const Tensor dn = g * weight.detach();
  EXPECT_CLOSE(grads[0], 2 * rstd * (dn - dn.mean(1, true) - n * (dn * n).mean(1, true)));
  EXPECT_CLOSE(grads[1], (g * n).sum(0));
  EXPECT_CLOSE(grads[2], g.sum(0));
}

template <class Call>
void test_mutation_rules(const char* op, Call call) {
  const int failures = expect::failures;
  Tensor x = leaf({3, 3});
  const Tensor before = x.detach().clone();
  EXPECT_THROWS(c10::Error, "leaf Variable that requires grad", call(x));
  EXPECT(at::equal(x.detach(), before));

  // exp saves its result, which the mutation invalidates.
  Tensor saved = x.exp();
  call(saved);
  EXPECT_THROWS(c10::Error, "modified by an inplace operation", grad({saved.sum()}, {x}));

  // Without grad mode, a leaf may be overwritten and gets no history.
  {
    const c10::NoGradGuard no_grad;
    call(x);
  }
  EXPECT(!at::equal(x.detach(), before));
  EXPECT(x.is_leaf());
  if (expect::failures > failures) std::fprintf(stderr, "the above is about %s\n", op);
}

// These save their result for backward: overwriting it must raise there.
template <class Call>
void test_overwritten_result(Call call) {
  const Tensor start = leaf({3, 3});
  Tensor x = start * 2;
  call(x);
  const Tensor loss = x.sum();
  x.mul_(2);
  EXPECT_THROWS(c10::Error, "modified by an inplace operation", grad({loss}, {start}));
}

}  // namespace

int main() {
  at::manual_seed(0);
  test_dense();
  test_gate_in_place();
  test_square_matmul_in_place();
  test_saved_results();
  test_layer_norm_in_place();

  const Tensor b = random({3, 3});
  const auto square_matmul_ = [&](Tensor& t) { torchops::square_matmul_(t, b); };
  const auto sigmoid_ = [](Tensor& t) { torchops::sigmoid_(t); };
  const auto softmax_ = [](Tensor& t) { torchops::softmax_(t); };
  const auto layer_norm_ = [](Tensor& t) { torchops::layer_norm_(t, at::IntArrayRef({3})); };
  test_mutation_rules("square_matmul_", square_matmul_);
  test_mutation_rules("sigmoid_", sigmoid_);
  test_mutation_rules("softmax_", softmax_);
  test_mutation_rules("layer_norm_", layer_norm_);
  test_overwritten_result(sigmoid_);
  test_overwritten_result(softmax_);
  return expect::result();
}
