// Memory runs out: an allocator refuses the n-th of the larger blocks, for each n that a call gets to.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <functional>
#include <limits>

#include "expect.h"
#include "ops/gate.h"
#include "ops/layer_norm.h"
#include "ops/sigmoid.h"
#include "ops/softmax.h"
#include "ops/square_matmul.h"

using at::Tensor;

namespace {

struct Scarce final : c10::Allocator {
  static constexpr size_t kSmall = 4096;
  static constexpr int kPlenty = std::numeric_limits<int>::max();

  c10::Allocator* rest = c10::GetCPUAllocator();
  std::atomic<int> left{kPlenty};

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(bytes < kSmall || left.fetch_sub(1) > 0, "no memory");
    return rest->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return rest->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Scarce scarce;

// `may_write`: allocates after a part is already overwritten; then the version counter must have moved.
void expect_all_or_nothing(const Tensor& x, bool may_write, const std::function<void(Tensor&)>& overwrite) {
  Tensor expected = x.clone();
  overwrite(expected);
  for (int allowed = 0;; ++allowed) {
    Tensor target = at::empty_strided(x.sizes(), x.strides(), x.options()).copy_(x);
    const auto version = target._version();
    scarce.left = allowed;
    bool failed = false;
    try {
      overwrite(target);
    } catch (const c10::Error&) {
      failed = true;
    }
    scarce.left = Scarce::kPlenty;
    if (!failed) {
      EXPECT_CLOSE(target, expected);
      EXPECT(target._version() == version + 1);
      return;
    }
    const bool written = !at::equal(target, x);
    EXPECT(may_write || !written);
    EXPECT(may_write ? !written || target._version() > version : target._version() == version);
  }
}

Tensor rows(int64_t count, int64_t columns) { return at::randn({count, columns}); }

}  // namespace

int main() {
  c10::SetCPUAllocator(&scarce, /*priority=*/100);
  at::set_num_threads(2);
  const Tensor b = rows(512, 512) / 32;
  for (const bool transpose_b : {false, true}) {
    expect_all_or_nothing(rows(1500, 512), false, [&](Tensor& x) { torchops::square_matmul_(x, b, transpose_b); });
    expect_all_or_nothing(rows(512, 1500).t(), false, [&](Tensor& x) { torchops::square_matmul_(x, b, transpose_b); });
    // Rows and columns of the factor and of the result have gaps.
    const Tensor gaps = b.repeat_interleave(2, 1).slice(1, 0, std::nullopt, 2);
    expect_all_or_nothing(rows(1000, 512), false, [&](Tensor& x) { torchops::square_matmul_(x, gaps, transpose_b); });
    const Tensor columns = rows(1000, 1024);
    expect_all_or_nothing(columns.slice(1, 0, std::nullopt, 2), false,
                          [&](Tensor& x) { torchops::square_matmul_(x, b, transpose_b); });
  }
  const Tensor wide = rows(2048, 2048) / 64;
  expect_all_or_nothing(rows(64, 2048), false, [&](Tensor& x) { torchops::square_matmul_(x, wide); });
  // b is copied first.
  expect_all_or_nothing(rows(1500, 512), false, [&](Tensor& x) { torchops::square_matmul_(x, x.narrow(0, 100, 512)); });
  expect_all_or_nothing(rows(1500, 512), false, [](Tensor& x) { torchops::softmax_(x); });
  expect_all_or_nothing(rows(1500, 512), false, [](Tensor& x) { torchops::softmax_(x, 0); });
  expect_all_or_nothing(rows(2, 1'100'003), false, [](Tensor& x) { torchops::softmax_(x); });
  expect_all_or_nothing(rows(1500, 512), false, [](Tensor& x) { torchops::sigmoid_(x); });
  expect_all_or_nothing(rows(1500, 512), true, [](Tensor& x) { torchops::layer_norm_(x, at::IntArrayRef{512}); });
  const Tensor gates = rows(1500, 512);
  expect_all_or_nothing(rows(1500, 512), false, [&](Tensor& x) { torchops::gate_(x, gates, b); });
  const Tensor half = b.to(at::kBFloat16);
  expect_all_or_nothing(rows(1500, 512), true, [&](Tensor& x) { torchops::gate_(x, gates, half); });
  expect_all_or_nothing(rows(2, 1'100'003), true,
                        [](Tensor& x) { torchops::layer_norm_(x, at::IntArrayRef{1'100'003}); });
  return expect::result();
}
