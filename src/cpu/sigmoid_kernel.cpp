#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <torch/library.h>

#include "ops/sigmoid.h"

namespace torchops::cpu {
namespace {

using at::Tensor;

// ATen's kernel is already one read and one write at memory speed.
Tensor sigmoid_cpu(const Tensor& x) {
  check_sigmoid(x);
  Tensor y = at::empty(x.sizes(), x.options());
  at::cpu::sigmoid_out(y, x);
  return y;
}

void sigmoid_cpu_(Tensor& x) {
  check_sigmoid_(x);
  at::cpu::sigmoid_(x);
}

TORCH_LIBRARY_IMPL(myops, CPU, m) {
  m.impl("sigmoid", sigmoid_cpu);
  m.impl("sigmoid_", sigmoid_cpu_);
}

}  // namespace
}  // namespace torchops::cpu
