// The C++ API against ATen in float64, for every operator and dtype, in a process without Python.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include <fstream>
#include <vector>

#include "expect.h"
#include "ops/dense.h"
#include "ops/gate.h"
#include "ops/glu.h"
#include "ops/layer_norm.h"
#include "ops/outer_product_mean.h"
#include "ops/scaled.h"
#include "ops/sigmoid.h"
#include "ops/softmax.h"
#include "ops/square_matmul.h"
#include "ops/transition.h"
#include "ops/triangle_multiplicative_update.h"

using at::Tensor;

namespace {

Tensor random(at::IntArrayRef shape, at::ScalarType dtype) { return at::randn(shape, at::kDouble).to(dtype); }

Tensor wide(const Tensor& x) { return x.to(at::kDouble); }

// Runs the mutating `call` on a copy of `x`: it must return its own argument, and write to the same memory.
template <class Call>
void expect_in_place(const Tensor& x, const Tensor& reference, Call call) {
  Tensor target = x.clone();
  const void* before = target.const_data_ptr();
  const auto version = target._version();
  Tensor& returned = call(target);
  EXPECT(&returned == &target);
  EXPECT(target.const_data_ptr() == before);
  EXPECT(target._version() == version + 1);
  EXPECT_CLOSE(target, reference);
}

void test_dense(at::ScalarType dtype) {
  const Tensor x = random({3, 5, 7}, dtype), w = random({11, 7}, dtype), b = random({11}, dtype);
  EXPECT_CLOSE(torchops::dense(x, w), at::sigmoid(at::linear(wide(x), wide(w))));
  EXPECT_CLOSE(torchops::dense(x, w, b), at::sigmoid(at::linear(wide(x), wide(w), wide(b))));
  EXPECT(torchops::dense(x, w, b).scalar_type() == dtype);
}

void test_gate(at::ScalarType dtype) {
  const Tensor v = random({3, 5, 11}, dtype), x = random({3, 5, 7}, dtype), w = random({11, 7}, dtype);
  const Tensor b = random({11}, dtype);
  EXPECT_CLOSE(torchops::gate(v, x, w), wide(v) * at::sigmoid(at::linear(wide(x), wide(w))));
  const Tensor reference = wide(v) * at::sigmoid(at::linear(wide(x), wide(w), wide(b)));
  EXPECT_CLOSE(torchops::gate(v, x, w, b), reference);
  expect_in_place(v, reference, [&](Tensor& t) -> Tensor& { return torchops::gate_(t, x, w, b); });
}

void test_glu(at::ScalarType dtype) {
  const Tensor x = random({3, 5, 7}, dtype), w = random({11, 7}, dtype), wg = random({11, 7}, dtype);
  const Tensor b = random({11}, dtype), bg = random({11}, dtype);
  const Tensor value = at::linear(wide(x), wide(w), wide(b)), gate = at::linear(wide(x), wide(wg), wide(bg));
  EXPECT_CLOSE(torchops::glu(x, w, wg, b, bg), value * at::sigmoid(gate));
  EXPECT_CLOSE(torchops::glu(x, w, wg, b, bg, "silu"), value * at::silu(gate));
}

void test_transition(at::ScalarType dtype) {
  const Tensor x = random({3, 5, 7}, dtype), gate = random({11, 7}, dtype) * 0.3, up = random({11, 7}, dtype) * 0.3;
  const Tensor down = random({7, 11}, dtype) * 0.3, weight = random({7}, dtype) * 0.3, bias = random({11}, dtype);
  const Tensor z = at::layer_norm(wide(x), {7}, wide(weight));
  const Tensor hidden = at::silu(at::linear(z, wide(gate), wide(bias))) * at::linear(z, wide(up));
  const Tensor reference = at::linear(hidden, wide(down));
  EXPECT_CLOSE(torchops::transition(x, weight, {}, gate, bias, up, {}, down, {}), reference);
  expect_in_place(x, wide(x) + reference, [&](Tensor& t) -> Tensor& {
    return torchops::add_transition_(t, weight, {}, gate, bias, up, {}, down, {});
  });
}

void test_outer_product_mean(at::ScalarType dtype) {
  const Tensor a = random({4, 5, 2}, dtype), b = random({4, 6, 3}, dtype), weight = random({7, 6}, dtype);
  const Tensor bias = random({7}, dtype), norm = at::full({5, 6}, 4, weight.options());
  const Tensor outer = at::einsum("sic,sjd->ijcd", {wide(a), wide(b)}).reshape({5, 6, 6});
  EXPECT_CLOSE(torchops::outer_product_mean(a, b, weight, bias, norm), at::linear(outer / 4, wide(weight), wide(bias)));
}

void test_triangle_multiplicative_update(at::ScalarType dtype) {
  const Tensor x = random({5, 5, 6}, dtype), mask = at::rand({5, 5}) < 0.8, weight = random({6}, dtype);
  const Tensor p_in = random({8, 6}, dtype) * 0.3, g_in = random({8, 6}, dtype) * 0.3;
  const Tensor p_out = random({6, 4}, dtype) * 0.3, bias = random({6}, dtype), g_out = random({6, 6}, dtype) * 0.3;
  const Tensor z = at::layer_norm(wide(x), {6}, wide(weight));
  const Tensor ab = at::linear(z, wide(p_in)) * at::sigmoid(at::linear(z, wide(g_in))) * mask.unsqueeze(-1);
  for (const char* direction : {"outgoing", "incoming"}) {
    const char* sum = *direction == 'o' ? "ikd,jkd->ijd" : "kid,kjd->ijd";
    const Tensor o = at::layer_norm(at::einsum(sum, {ab.narrow(-1, 0, 4), ab.narrow(-1, 4, 4)}), {4});
    const Tensor reference = at::linear(o, wide(p_out), wide(bias)) * at::sigmoid(at::linear(z, wide(g_out)));
    EXPECT_CLOSE(torchops::triangle_multiplicative_update(x, direction, mask, weight, {}, p_in, {}, g_in, {}, {}, {},
                                                          p_out, bias, g_out, {}),
                 reference);
    expect_in_place(x, wide(x) + reference, [&](Tensor& t) -> Tensor& {
      return torchops::add_triangle_multiplicative_update_(t, direction, mask, weight, {}, p_in, {}, g_in, {}, {}, {},
                                                           p_out, bias, g_out, {});
    });
  }
}

void test_scaled() {
  const Tensor x = random({3, 5, 16}, at::kFloat8_e4m3fn), w = random({11, 16}, at::kFloat8_e4m3fn);
  const Tensor wg = random({11, 16}, at::kFloat8_e4m3fn), v = random({3, 5, 11}, at::kFloat);
  const Tensor scale_x = at::rand({3, 5, 1}), scale_w = at::rand({1, 11}), scale_wg = at::full({}, 0.5, at::kFloat);
  const Tensor b = random({11}, at::kFloat), bg = random({11}, at::kFloat);
  const Tensor value = at::linear(wide(x), wide(w)) * wide(scale_x) * wide(scale_w) + b;
  const Tensor gate = at::linear(wide(x), wide(wg)) * wide(scale_x) * wide(scale_wg) + bg;
  EXPECT_CLOSE(torchops::dense_scaled(x, w, scale_x, scale_w, b, at::kFloat), at::sigmoid(value));
  EXPECT_CLOSE(torchops::dense_scaled(x, w, scale_x, scale_w), at::sigmoid(value - b));
  EXPECT(torchops::dense_scaled(x, w, scale_x, scale_w).scalar_type() == at::kBFloat16);
  EXPECT_CLOSE(torchops::gate_scaled(v, x, w, scale_x, scale_w, b), wide(v) * at::sigmoid(value));
  EXPECT_CLOSE(torchops::glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, bg, "silu", at::kFloat),
               value * at::silu(gate));
}

void test_sigmoid(at::ScalarType dtype) {
  const Tensor x = random({5, 13}, dtype), reference = at::sigmoid(wide(x));
  EXPECT_CLOSE(torchops::sigmoid(x), reference);
  expect_in_place(x, reference, [](Tensor& t) -> Tensor& { return torchops::sigmoid_(t); });
}

void test_square_matmul(at::ScalarType dtype) {
  const Tensor a = random({3, 5, 7}, dtype), b = random({7, 7}, dtype);
  for (const bool transpose_b : {false, true}) {
    const Tensor reference = at::matmul(wide(a), transpose_b ? wide(b).t() : wide(b));
    EXPECT_CLOSE(torchops::square_matmul(a, b, transpose_b), reference);
    expect_in_place(a, reference, [&](Tensor& t) -> Tensor& { return torchops::square_matmul_(t, b, transpose_b); });
  }
  EXPECT_CLOSE(torchops::square_matmul(a, b), at::matmul(wide(a), wide(b)));
}

void test_softmax(at::ScalarType dtype) {
  const Tensor x = random({3, 5, 7}, dtype);
  for (const int64_t dim : {0, 1, 2, -1}) {
    const Tensor reference = at::softmax(wide(x), dim);
    EXPECT_CLOSE(torchops::softmax(x, dim), reference);
    expect_in_place(x, reference, [&](Tensor& t) -> Tensor& { return torchops::softmax_(t, dim); });
  }
  EXPECT_CLOSE(torchops::softmax(x), at::softmax(wide(x), -1));
}

void test_layer_norm(at::ScalarType dtype) {
  const Tensor x = random({3, 5, 7}, dtype), weight = random({5, 7}, dtype), bias = random({5, 7}, dtype);
  const std::vector<int64_t> shape = {5, 7};
  EXPECT_CLOSE(torchops::layer_norm(x, shape), at::layer_norm(wide(x), shape));
  const Tensor reference = at::layer_norm(wide(x), shape, wide(weight), wide(bias), 1e-3);
  EXPECT_CLOSE(torchops::layer_norm(x, shape, weight, bias, 1e-3), reference);
  expect_in_place(x, reference,
                  [&](Tensor& t) -> Tensor& { return torchops::layer_norm_(t, shape, weight, bias, 1e-3); });
}

// Enough rows for every operator to split them among threads.
void test_threads() {
  at::set_num_threads(2);
  const Tensor x = random({40000, 33}, at::kFloat), w = random({33, 33}, at::kFloat);
  EXPECT_CLOSE(torchops::dense(x, w), at::sigmoid(at::linear(wide(x), wide(w))));
  expect_in_place(x, at::matmul(wide(x), wide(w)),
                  [&](Tensor& t) -> Tensor& { return torchops::square_matmul_(t, w); });
  expect_in_place(x, at::softmax(wide(x), -1), [](Tensor& t) -> Tensor& { return torchops::softmax_(t); });
  expect_in_place(x, at::layer_norm(wide(x), {33}),
                  [](Tensor& t) -> Tensor& { return torchops::layer_norm_(t, at::IntArrayRef({33})); });
}

void test_no_python() {
  std::ifstream maps("/proc/self/maps");
  const std::string mapped((std::istreambuf_iterator<char>(maps)), std::istreambuf_iterator<char>());
  EXPECT(mapped.find("libtorchops.so") != std::string::npos);
  EXPECT(mapped.find("libtorch_python") == std::string::npos);
  EXPECT(mapped.find("libpython") == std::string::npos);
}

}  // namespace

int main() {
  at::manual_seed(0);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    test_dense(dtype);
    test_gate(dtype);
    test_glu(dtype);
    test_transition(dtype);
    test_outer_product_mean(dtype);
    test_triangle_multiplicative_update(dtype);
    test_sigmoid(dtype);
    test_square_matmul(dtype);
    test_softmax(dtype);
    test_layer_norm(dtype);
  }
  test_scaled();
  test_threads();
  test_no_python();
  return expect::result();
}
