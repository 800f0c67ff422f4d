#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sigmoid.h>
#include <torchops/ops/dense.h>
#include <torchops/ops/layer_norm.h>
#include <torchops/ops/sigmoid.h>
#include <torchops/ops/softmax.h>
#include <torchops/ops/square_matmul.h>

#include <cstdio>

int main() {
  at::Tensor x = at::rand({5, 3}), w = at::rand({3, 3});
  at::Tensor y = torchops::dense(x, w);
  if (!at::allclose(y, at::sigmoid(at::linear(x, w)))) return 1;
  torchops::square_matmul_(y, w, /*transpose_b=*/true);
  torchops::layer_norm_(y, at::IntArrayRef({3}));
  torchops::sigmoid_(torchops::softmax_(y));
  std::puts("downstream: torchops found, linked and run");
  return 0;
}
