// Memory runs out: of the larger blocks that a call asks for, only the first few are granted. The call raises. Either
// it has written nothing, or autograd knows that it has, and later calls work.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>

#include "expect.h"
#include "ops/gate.h"
#include "ops/layer_norm.h"
#include "ops/sigmoid.h"
#include "ops/softmax.h"
#include "ops/square_matmul.h"
#include "ops/transition.h"
#include "ops/triangle_multiplicative_update.h"

using at::Tensor;
using torch::autograd::grad;

namespace {

constexpr int kPlenty = std::numeric_limits<int>::max();
constexpr size_t kLarge = 4096;

size_t refused = kLarge;  // and larger blocks
std::atomic<int> blocks_left{kPlenty};

bool grants(size_t bytes) { return bytes < refused || blocks_left.fetch_sub(1) > 0; }

struct Scarce final : c10::Allocator {
  c10::Allocator* rest = c10::GetCPUAllocator();

  c10::DataPtr allocate(size_t bytes) override {
    if (!grants(bytes)) throw std::bad_alloc();
    return rest->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return rest->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

using Overwrite = std::function<void(Tensor&)>;

// x has the values and the history of `start`, and the strides of `values`.
struct Target {
  Tensor start, x;

  Target(const Tensor& values, bool trains)
      : start(values.detach().clone().requires_grad_(trains)),
        x(at::empty_strided(values.sizes(), values.strides(), values.options()).copy_(start)) {}

  Tensor gradient() const {
    return grad({x}, {start}, {at::linspace(-1, 1, x.numel(), at::kDouble).to(x.scalar_type()).view_as(x)})[0];
  }
};

int blocks_asked_for(Tensor& x, const Overwrite& overwrite) {
  blocks_left = kPlenty;
  overwrite(x);
  return kPlenty - blocks_left;
}

bool runs_out_of_memory(Tensor& x, int blocks, const Overwrite& overwrite) {
  blocks_left = blocks;
  bool failed = false;
  try {
    overwrite(x);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  blocks_left = kPlenty;
  return failed;
}

// A call does to `target` what it does to a tensor that has seen no failure.
void expect_works(Target& target, const Overwrite& overwrite) {
  const bool trains = target.start.requires_grad();
  Target fresh(target.x, trains);
  overwrite(fresh.x);
  const auto version = target.x._version();
  overwrite(target.x);
  EXPECT(target.x._version() == version + 1);
  EXPECT_CLOSE(target.x, fresh.x);
  if (trains) EXPECT_CLOSE(target.gradient(), fresh.gradient());
}

// What running out of memory does: nothing, since there is enough in any case; nothing to the argument; or part of it
// is overwritten.
enum class Fails { kNever, kUntouched, kHalfway };

void expect_failures(const Tensor& values, Fails fails, bool trains, const Overwrite& overwrite) {
  Target first(values, trains);
  expect_works(first, overwrite);
  Target second(values, trains);
  const int blocks = blocks_asked_for(second.x, overwrite), step = std::max(blocks / 16, 1);
  EXPECT((blocks == 0) == (fails == Fails::kNever));
  int halfway = 0;
  for (int granted = blocks - 1; granted >= 0; granted -= step) {
    Target target(values, trains);
    const Tensor factor = at::ones_like(values).requires_grad_(), saves_x = factor * target.x;
    const auto version = target.x._version();
    EXPECT(runs_out_of_memory(target.x, granted, overwrite));
    const bool written = !at::equal(target.x, values), moved = target.x._version() != version;
    halfway += written;
    EXPECT(fails == Fails::kHalfway ? moved || !written : !moved && !written);
    const auto saved = [&] { return grad({saves_x}, {factor}, {at::ones_like(values)})[0]; };
    if (moved) {
      EXPECT_THROWS(c10::Error, "modified by an inplace operation", saved());
    } else {
      EXPECT(at::equal(saved(), values));
    }
    if (granted == blocks - 1) expect_works(target, overwrite);
  }
  EXPECT((halfway > 0) == (fails == Fails::kHalfway));
}

void expect_failures(const Tensor& values, Fails fails, const Overwrite& overwrite) {
  for (const bool trains : {false, true}) expect_failures(values, fails, trains, overwrite);
}

Tensor rows(int64_t count, int64_t columns) { return at::randn({count, columns}); }

void test_square_matmul() {
  const Tensor b = rows(512, 512) / 32;
  for (const bool transpose_b : {false, true}) {
    expect_failures(rows(1500, 512), Fails::kUntouched,
                    [&](Tensor& x) { torchops::square_matmul_(x, b, transpose_b); });
    expect_failures(rows(512, 1500).t(), Fails::kUntouched,
                    [&](Tensor& x) { torchops::square_matmul_(x, b, transpose_b); });
    // Rows and columns of the factor and of the result have gaps.
    const Tensor gaps = b.repeat_interleave(2, 1).slice(1, 0, std::nullopt, 2);
    expect_failures(rows(1000, 512), Fails::kUntouched,
                    [&](Tensor& x) { torchops::square_matmul_(x, gaps, transpose_b); });
    const Tensor columns = rows(1000, 1024);
    expect_failures(columns.slice(1, 0, std::nullopt, 2), Fails::kUntouched,
                    [&](Tensor& x) { torchops::square_matmul_(x, b, transpose_b); });
  }
  const Tensor wide = rows(2048, 2048) / 64;
  expect_failures(rows(64, 2048), Fails::kUntouched, [&](Tensor& x) { torchops::square_matmul_(x, wide); });
  // b is copied first.
  expect_failures(rows(1500, 512), Fails::kUntouched,
                  [](Tensor& x) { torchops::square_matmul_(x, x.narrow(0, 100, 512)); });
  const Tensor factors = at::randn({5, 256, 256}) / 16;
  expect_failures(at::randn({5, 300, 256}), Fails::kUntouched,
                  [&](Tensor& x) { torchops::square_matmul_(x, factors); });
  // Matrices that don't fit a panel take scratch one after the other.
  const Tensor large = at::randn({2, 512, 512}) / 32;
  expect_failures(at::randn({2, 1100, 512}), Fails::kHalfway, [&](Tensor& x) { torchops::square_matmul_(x, large); });
}

void test_rows() {
  expect_failures(rows(1500, 512), Fails::kNever, [](Tensor& x) { torchops::sigmoid_(x); });
  for (const int64_t dim : {0, 1}) {
    expect_failures(rows(1500, 512), Fails::kNever, [&](Tensor& x) { torchops::softmax_(x, dim); });
    // Lines that are neither adjacent nor side by side.
    expect_failures(rows(1500, 1024).slice(1, 0, std::nullopt, 2), Fails::kUntouched,
                    [&](Tensor& x) { torchops::softmax_(x, dim); });
    expect_failures(rows(1500, 1500).to(at::kHalf), Fails::kHalfway, [&](Tensor& x) { torchops::softmax_(x, dim); });
  }
  // Lines longer than a panel, first in one piece and then with gaps.
  const auto softmax = [](Tensor& x) { torchops::softmax_(x); };
  expect_failures(rows(2, 1'100'003), Fails::kNever, softmax);
  expect_failures(rows(2, 600'006).slice(1, 0, std::nullopt, 2), Fails::kUntouched, softmax);
  const auto normalize = [](Tensor& x) { torchops::layer_norm_(x, x.sizes().slice(1)); };
  expect_failures(rows(1500, 512), Fails::kUntouched, normalize);  // the moments are all that is allocated
  expect_failures(rows(1500, 1024).slice(1, 0, std::nullopt, 2), Fails::kUntouched, normalize);
  // Rows longer than a panel: all large blocks are taken before the first is written, but not all small ones.
  const Tensor long_rows = rows(2, 530'003).to(at::kDouble);
  expect_failures(long_rows, Fails::kUntouched, normalize);
  refused = 0;
  expect_failures(long_rows, Fails::kHalfway, /*trains=*/false, normalize);
  refused = kLarge;
}

void test_gated() {
  const Tensor x = rows(1500, 64), w = rows(512, 64) / 8, half = w.to(at::kBFloat16);
  expect_failures(rows(1500, 512), Fails::kUntouched, [&](Tensor& v) { torchops::gate_(v, x, w); });
  expect_failures(rows(1500, 512), Fails::kHalfway, [&](Tensor& v) { torchops::gate_(v, x, half); });

  const Tensor gate = rows(256, 32) / 8, up = rows(256, 32) / 8, down = rows(32, 256) / 16;
  expect_failures(rows(1500, 32), Fails::kHalfway, [&](Tensor& t) {
    torchops::add_transition_(t, std::nullopt, std::nullopt, gate, std::nullopt, up, std::nullopt, down, std::nullopt);
  });
}

void test_triangle() {
  constexpr auto none = std::nullopt;
  const Tensor p_in = rows(64, 32) / 8, g_in = rows(64, 32) / 8, p_out = rows(32, 32) / 8, g_out = rows(32, 32) / 8;
  expect_failures(at::randn({2, 40, 40, 32}), Fails::kHalfway, [&](Tensor& x) {
    torchops::add_triangle_multiplicative_update_(x, "outgoing", none, none, none, p_in, none, g_in, none, none, none,
                                                  p_out, none, g_out, none);
  });
}

}  // namespace

// What ATen allocates without its allocator.
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const block = grants(bytes) ? std::malloc(std::max(bytes, size_t{1})) : nullptr;
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
[[gnu::noinline]] void operator delete(void* block) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, size_t) noexcept { std::free(block); }

int main() {
  Scarce scarce;
  c10::SetCPUAllocator(&scarce, /*priority=*/100);
  at::set_num_threads(2);
  test_square_matmul();
  test_rows();
  test_gated();
  test_triangle();
  return expect::result();
}
