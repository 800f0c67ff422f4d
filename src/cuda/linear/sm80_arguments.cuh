#pragma once

// The arguments of the kernels for float32 and float64, from tensors.

#include <ATen/core/Tensor.h>

#include <optional>

#include "cuda/base/vector.cuh"
#include "cuda/gemm/sm80/kernel.cuh"
#include "cuda/linear/operand.h"
#include "cuda/linear/rule_tensors.h"

namespace torchops::cuda::gemm {

/// The arguments but for the output, and without the cotangent unless reads_g; nullopt if a kernel cannot read them.
/// Rows must be aligned to 16 bytes, and so must columns of outputs in groups of that size be complete.
template <class T, class Rule, bool reads_g = kMakesCotangents<Rule>>
std::optional<Sm80Arguments<T, Rule::kProducts>> full_arguments(const RuleTensors& t) {
  Sm80Arguments<T, Rule::kProducts> p{};
  const auto reads = [](const at::Tensor& from, const T*& data, int64_t& stride) {
    const auto of = operand(from);
    if (!of) return false;
    data = static_cast<const T*>(of->data);
    stride = of->row_stride;
    return true;
  };
  if (!reads(t.a, p.a, p.a_stride)) return std::nullopt;
  p.m = static_cast<int>(t.a.size(0));
  p.n = static_cast<int>(t.b.size(0));
  p.k = static_cast<int>(t.a.size(1));
  if (p.n % kVectorSize<T> != 0 || p.k == 0) return std::nullopt;
  for (int of = 0; of < Rule::kProducts; ++of) {
    const std::optional<at::Tensor>& bias = of == 0 ? t.bias : *t.bias2;
    if (!reads(of == 0 ? t.b : *t.b2, p.b[of], p.b_stride[of])) return std::nullopt;
    p.bias[of] = bias ? bias->const_data_ptr<T>() : nullptr;
  }
  if (Rule::kReadsC && !reads(*t.c, p.c, p.c_stride)) return std::nullopt;
  p.c_is_y = t.c_is_y;
  if (reads_g && !reads(*t.g, p.g, p.g_stride)) return std::nullopt;
  return p;
}

/// Whether the kernels can read these weights of a rule with two products, and contiguous rows with as many features.
inline bool are_full_weights(const at::Tensor& w, const at::Tensor& w2) {
  const int64_t vector = kVectorBytes / w.element_size();
  return w.size(0) % vector == 0 && w.size(1) % vector == 0 && operand(w) && operand(w2);
}

}  // namespace torchops::cuda::gemm
