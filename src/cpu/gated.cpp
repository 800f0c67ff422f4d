#include "cpu/gated.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <initializer_list>

#include "cpu/capability.h"
#include "cpu/gated_vector.h"

namespace torchops::cpu {
namespace {

using at::Tensor;
using detail::GluActivation;

// The elements of each row must be contiguous; the rows may be anywhere.
Tensor readable(const Tensor& t) { return !t.defined() || t.stride(1) == 1 ? t : t.contiguous(); }

// A matrix to write, and the memory that the routine writes.
struct Written {
  explicit Written(const Tensor& t) : target(t) {
    if (t.defined()) rows = t.stride(1) == 1 ? t : at::empty(t.sizes(), t.options());
  }
  void finish() const {
    if (rows.defined() && !rows.is_same(target)) target.copy_(rows);
  }

  Tensor target, rows;
};

struct Operands {
  Tensor grad{}, value{}, u{};
  Tensor out{}, dvalue{}, du{};
  bool value_is_y = false;
};

// The grain size of ATen's pointwise kernels.
constexpr int64_t kGrain = 32768;

// All defined operands are matrices of one shape with contiguous rows.
void run(const Operands& o, GatedRoutine routine) {
  const Tensor& shape = o.u;
  const int64_t rows = shape.size(0), columns = shape.size(1);
  const auto together = {&o.grad, &o.value, &o.u, &o.out, &o.dvalue, &o.du};
  const bool contiguous = std::all_of(together.begin(), together.end(),
                                      [](const Tensor* t) { return !t->defined() || t->is_contiguous(); });
  const auto span = [&](int64_t row, int64_t column, int64_t count) {
    const auto bytes = [&](const Tensor& t) {
      return (row * t.stride(0) + column) * static_cast<int64_t>(t.element_size());
    };
    const auto from = [&](const Tensor& t) {
      return t.defined() ? static_cast<const char*>(t.const_data_ptr()) + bytes(t) : nullptr;
    };
    const auto to = [&](const Tensor& t) {
      return t.defined() ? static_cast<char*>(t.mutable_data_ptr()) + bytes(t) : nullptr;
    };
    routine({from(o.grad), from(o.value), from(o.u), to(o.out), to(o.dvalue), to(o.du), count, o.value_is_y});
  };
  if (contiguous) {
    at::parallel_for(0, rows * columns, kGrain, [&](int64_t begin, int64_t end) { span(0, begin, end - begin); });
  } else {
    at::parallel_for(0, rows, std::max(kGrain / std::max(columns, int64_t{1}), int64_t{1}),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t row = begin; row < end; ++row) span(row, 0, columns);
                     });
  }
}

}  // namespace

void gated_out(const Tensor& out, const Tensor& value, const Tensor& u, GluActivation activation) {
  const GatedRoutine routine = TORCHOPS_FOR_THIS_PROCESSOR(find_gated_routine)(
      out.scalar_type(), u.scalar_type(), activation == GluActivation::kSilu, /*backward=*/false);
  TORCH_INTERNAL_ASSERT(routine && value.scalar_type() == out.scalar_type());
  const Written to(out);
  run({.value = readable(value), .u = readable(u), .out = to.rows}, routine);
  to.finish();
}

void gated_backward_out(const Tensor& dvalue, const Tensor& du, const Tensor& grad, const Tensor& value,
                        const Tensor& u, GluActivation activation, bool value_is_y) {
  const GatedRoutine routine = TORCHOPS_FOR_THIS_PROCESSOR(find_gated_routine)(
      grad.scalar_type(), u.scalar_type(), activation == GluActivation::kSilu, /*backward=*/true);
  TORCH_INTERNAL_ASSERT(
      routine && (!value_is_y || activation == GluActivation::kSigmoid) &&
      (!dvalue.defined() || dvalue.scalar_type() == grad.scalar_type()) &&
      (!du.defined() || (du.scalar_type() == u.scalar_type() && value.scalar_type() == grad.scalar_type())));
  const Written dvalue_to(dvalue), du_to(du);
  run({.grad = readable(grad),
       .value = readable(du.defined() ? value : Tensor()),
       .u = readable(u),
       .dvalue = dvalue_to.rows,
       .du = du_to.rows,
       .value_is_y = value_is_y},
      routine);
  dvalue_to.finish();
  du_to.finish();
}

}  // namespace torchops::cpu
