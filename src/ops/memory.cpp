#include "ops/memory.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace torchops::detail {
namespace {

struct Dim {
  int64_t stride, last;  // last: the largest index, at least 1
};
using Dims = c10::SmallVector<Dim, 6>;

// Two indices i and j are the same location if their difference d = i - j solves
//   sum over k of d_k * stride_k = 0,  |d_k| <= last_k,  d != 0.
// Searches from the largest stride down. A branch is cut if the remaining dimensions cannot bring the sum back to 0:
// their reach is too short, or their strides have a common divisor that does not divide the sum.
class Search {
 public:
  explicit Search(const Dims& ascending) : dims_(ascending) {
    int64_t reach = 0, divisor = 0;
    for (const auto& [stride, last] : dims_) {
      reaches_.push_back(reach += stride * last);
      divisors_.push_back(divisor = std::gcd(divisor, stride));
    }
  }

  Overlap run() {
    const bool found = solve(dims_.size(), 0, /*all_zero=*/true);
    return found ? Overlap::kYes : steps_ > kMostSteps ? Overlap::kUnknown : Overlap::kNo;
  }

 private:
  // Whether the first `count` dimensions can bring `sum` to 0. If d is a solution, so is -d, so the first nonzero
  // coefficient may be assumed positive.
  bool solve(size_t count, int64_t sum, bool all_zero) {
    if (count == 0) return sum == 0 && !all_zero;
    if (++steps_ > kMostSteps || sum % divisors_[count - 1] != 0) return false;
    const auto [stride, last] = dims_[count - 1];
    const int64_t reach = count == 1 ? 0 : reaches_[count - 2];
    // |sum + d * stride| <= reach
    const int64_t lowest = all_zero ? 0 : std::max(-last, ceil_divide(-reach - sum, stride));
    const int64_t highest = std::min(last, -ceil_divide(sum - reach, stride));
    for (int64_t d = lowest; d <= highest; ++d) {
      if (solve(count - 1, sum + d * stride, all_zero && d == 0)) return true;
    }
    return false;
  }

  static int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b > 0); }

  static constexpr int64_t kMostSteps = 1 << 16;  // well under a millisecond
  const Dims& dims_;
  int64_t steps_ = 0;
  c10::SmallVector<int64_t, 6> reaches_, divisors_;
};

}  // namespace

Overlap internal_overlap(at::IntArrayRef sizes, at::IntArrayRef strides) {
  Dims dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return Overlap::kNo;
    if (sizes[i] > 1) dims.push_back({strides[i], sizes[i] - 1});
  }
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  if (!dims.empty() && dims[0].stride == 0) return Overlap::kYes;
  // If a stride is larger than the reach of all smaller ones, they cannot make up for it. This holds for every stride
  // of a slice or transpose of a contiguous tensor.
  int64_t reach = 0;
  for (const auto& [stride, last] : dims) reach += stride * last;
  while (!dims.empty() && dims.back().stride > reach - dims.back().stride * dims.back().last) {
    reach -= dims.back().stride * dims.back().last;
    dims.pop_back();
  }
  if (dims.empty()) return Overlap::kNo;
  if (dims.size() == 2) {
    const int64_t divisor = std::gcd(dims[0].stride, dims[1].stride);
    const bool meets = dims[1].stride / divisor <= dims[0].last && dims[0].stride / divisor <= dims[1].last;
    return meets ? Overlap::kYes : Overlap::kNo;
  }
  return Search(dims).run();
}

at::Tensor unwrapped(at::Tensor tensor) {
  while (true) {
    if (const auto* const batched = at::functorch::maybeGetBatchedImpl(tensor)) {
      tensor = batched->value();
    } else if (const auto* const wrapper = at::functorch::maybeGetTensorWrapper(tensor)) {
      tensor = wrapper->value();
    } else {
      return tensor;
    }
  }
}

Overlap internal_overlap(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return at::has_internal_overlap(tensor) == at::MemOverlap::Yes ? Overlap::kYes : Overlap::kNo;
  }
  if (tensor.is_non_overlapping_and_dense()) return Overlap::kNo;
  return internal_overlap(tensor.sizes(), tensor.strides());
}

namespace {

// The addresses [first, last) of the elements of a tensor. Empty if it has no elements, or no memory yet.
std::optional<std::pair<uintptr_t, uintptr_t>> addresses(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet wrappers({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  if (!tensor.has_storage() || tensor.is_meta() || tensor.key_set().has_any(wrappers) ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.numel() == 0) {
    return std::nullopt;
  }
  const void* const memory = tensor.storage().data();
  if (memory == nullptr) return std::nullopt;
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
  const auto first =
      reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(tensor.storage_offset()) * tensor.element_size();
  return std::pair(first, first + static_cast<uintptr_t>(elements) * tensor.element_size());
}

}  // namespace

bool may_overlap(const at::Tensor& written, const at::Tensor& read) {
  if (written.device() != read.device()) return false;
  const auto to = addresses(written), from = addresses(read);
  return to && from && to->first < from->second && from->first < to->second;
}

bool may_alias(const at::Tensor& written, const at::Tensor& read) {
  if (!read.defined()) return false;
  if (written.is_same(read)) return true;
  // Views of one storage share a version counter. So autograd would take `read` for overwritten, wherever in the
  // storage the views are.
  if (written.has_storage() && read.has_storage() && written.is_alias_of(read)) return true;
  return may_overlap(written, read);
}

}  // namespace torchops::detail
