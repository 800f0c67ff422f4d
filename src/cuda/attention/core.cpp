#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <numbers>

#include "cuda/gemm/ways.h"
#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "ops/attention_core.h"
#include "ops/kernel_path.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using namespace gemm;

// Dimensions first, second and third of a tensor whose last two are rows and their elements; nullopt if TMA cannot read
// it.
std::optional<HeadOperand> heads(const Tensor& t, std::array<int64_t, 3> dims) {
  const int64_t vector = 16 / t.element_size();
  bool fits = is_aligned(t.const_data_ptr()) && (t.stride(-1) == 1 || t.size(-1) == 1);
  // A dimension of one element is never stepped over, whatever its stride.
  const auto stride_of = [&](int64_t dim) {
    const int64_t stride = t.size(dim) == 1 ? vector : t.stride(dim);
    fits = fits && t.size(dim) <= kMostExtent && is_stride_of_tma(stride, t.element_size());
    return stride;
  };
  const HeadOperand operand{
      t.const_data_ptr(), stride_of(t.dim() - 2), {stride_of(dims[0]), stride_of(dims[1]), stride_of(dims[2])}};
  return fits ? std::optional(operand) : std::nullopt;
}

bool core_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const std::optional<Tensor>& mask,
               double scale, bool scaled, Tensor& out, Tensor& logsumexp) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  detail::check_attention_core({q, k, v, bias, mask, out, logsumexp});
  const c10::cuda::CUDAGuard guard(q.device());
  if (q.element_size() != 2 || bias.scalar_type() != q.scalar_type() || q.numel() == 0 || k.numel() == 0 ||
      bias.size(3) % 64 != 0 || bias.size(3) > kMostExtent || detail::kernel_path() == detail::KernelPath::kCublas) {
    return false;
  }
  constexpr std::array<int64_t, 3> of_heads{2, 1, 0};
  const auto from_q = heads(q, of_heads), from_k = heads(k, of_heads), from_v = heads(v, of_heads);
  // The second of the bias's dimensions has one element, and the stride of any.
  const auto to = heads(out, of_heads), from_bias = heads(bias, {1, 1, 0});
  const auto c = sm90_case(q.size(3), k.size(3), q.size(4), q.scalar_type());
  if (!from_q || !from_k || !from_v || !to || !from_bias || !c) return false;
  if (mask && !is_aligned(mask->const_data_ptr())) return false;
  if (detail::kernel_path() == detail::KernelPath::kAuto && !attention_pays(*c, q.size(0) * q.size(2), q.size(1))) {
    return false;
  }
  AttentionProblem p;
  p.batch = static_cast<int>(q.size(0));
  p.rows = static_cast<int>(q.size(1));
  p.heads = static_cast<int>(q.size(2));
  p.queries = static_cast<int>(q.size(3));
  p.keys = static_cast<int>(k.size(3));
  p.width = static_cast<int>(bias.size(3));
  p.d = static_cast<int>(q.size(4));
  p.q = *from_q;
  p.k = *from_k;
  p.v = *from_v;
  p.out = *to;
  p.bias = *from_bias;
  p.mask = mask ? mask->const_data_ptr<float>() : nullptr;
  p.logsumexp = logsumexp.mutable_data_ptr<float>();
  p.scale = scaled ? 1 : static_cast<float>(scale);
  p.unit = scaled ? 1 : std::numbers::log2e_v<float>;
  return mask ? run_chosen<MaskedAttention>(p, *c, q) : run_chosen<Attention>(p, *c, q);
}

TORCH_LIBRARY_IMPL(myops, CUDA, m) { m.impl("_triangle_attention_core", core_cuda); }

}  // namespace
}  // namespace torchops::cuda
