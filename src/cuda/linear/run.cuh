#pragma once

// The one door for a rule of products: gemm/plan.h orders the candidates, and here the first one that can runs. Only
// cuBLAS and the pass after it are left to the operators, which know the panels and the scratch for it.

#include <algorithm>
#include <optional>
#include <utility>

#include "cuda/gemm/ways.h"
#include "cuda/linear/few_rows.cuh"
#include "cuda/linear/launch.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/rule_tensors.h"
#include "cuda/linear/sm80.cuh"
#include "ops/kernel_path.h"
#include "ops/matrices.h"

namespace torchops::cuda::gemm {

/// The operations of sm90/ that compute a rule; void if there is none.
template <class Rule>
struct OperationsOf {
  using Resident = void;
  using Streamed = void;
  using Split = void;
};
template <>
struct OperationsOf<LinearRule<Sigmoid>> {
  using Activation = Sigmoid;
  using Resident = NarrowDense;
  using Streamed = Dense;
  using Split = Float32Dense;
};
template <>
struct OperationsOf<GateRule> {
  using Resident = Gate;
  using Streamed = StreamedGate;
  using Split = Float32Gate;
};
template <>
struct OperationsOf<GluRule<Sigmoid>> {
  using Resident = GluSigmoid;
  using Streamed = StreamedGluSigmoid;
  using Split = Float32GluSigmoid;
};
template <>
struct OperationsOf<GluRule<Silu>> {
  using Resident = GluSilu;
  using Streamed = StreamedGluSilu;
  using Split = Float32GluSilu;
};

/// The problem that kernels read whose operands are aligned to 16 bytes; nullopt if these aren't. d has no alignment.
inline std::optional<Problem> aligned_problem(const RuleTensors& t) {
  Problem p;
  p.m = static_cast<int>(t.d.size(0));
  p.n = static_cast<int>(t.d.size(1));
  p.k = static_cast<int>(t.a.size(1));
  p.bias = t.bias ? t.bias->const_data_ptr() : nullptr;
  p.bias2 = t.bias2 != nullptr && *t.bias2 ? (*t.bias2)->const_data_ptr() : nullptr;
  p.d.data = t.d.mutable_data_ptr();
  const auto read = [](const at::Tensor* from, Operand& to) {
    const auto of = from != nullptr ? operand(*from) : std::optional(Operand{});
    if (of) to = *of;
    return of.has_value();
  };
  const bool readable =
      read(&t.a, p.a) && read(&t.b, p.b) && read(t.b2, p.b2) && read(t.c, p.c) && read(t.z, p.z) && read(t.u, p.z2);
  return readable ? std::optional(p) : std::nullopt;
}

/// Whether a is overwritten. Several tiles of a row of the result would read the whole row of a.
inline bool overwrites_a(const RuleTensors& t) { return t.a.const_data_ptr() == t.d.const_data_ptr(); }

/// The case of a problem for the kernels of sm90/, and its d; nullopt if they cannot compute it.
template <class Rule>
std::optional<Case> sm90_case_of(Problem& p, const RuleTensors& t) {
  if (kIsGated<Rule> && p.n % 8 != 0) return std::nullopt;  // TMA writes whole pieces of 16 bytes
  const auto d = operand(t.d);
  if (!d || (overwrites_a(t) && p.n > 128)) return std::nullopt;
  p.d = *d;
  return sm90_case(p.m, p.n, p.k, t.b.scalar_type());
}

/// The same for its kernel of split float32 numbers; n is the columns of all products.
template <class Rule>
std::optional<Case> split_case_of(Problem& p, const RuleTensors& t) {
  const auto d = operand(t.d);
  if (!d) return std::nullopt;
  p.d = *d;
  return split_case(p.m, int64_t{Rule::kProducts} * p.n, p.k, t.b.scalar_type());
}

/// How many bytes of rows may be read of a and the weights, and of what has the result's columns, at once.
inline std::pair<int, int> bytes_at_once(const RuleTensors& t) {
  uintptr_t load = 16, store = 16;
  const auto see = [](uintptr_t& bits, const at::Tensor* tensor) {
    if (tensor == nullptr) return;
    bits |= reinterpret_cast<uintptr_t>(tensor->const_data_ptr());
    if (tensor->size(0) > 1) bits |= static_cast<uintptr_t>(tensor->stride(0) * tensor->element_size());
  };
  for (const at::Tensor* tensor : {&t.a, &t.b, t.b2}) see(load, tensor);
  for (const at::Tensor* tensor : {&t.d, t.c, t.g, t.d2}) see(store, tensor);
  store |= static_cast<uintptr_t>(t.d.size(1) * t.d.element_size());
  const auto lowest = [](uintptr_t bits) { return static_cast<int>(std::max(bits & -bits, uintptr_t{2})); };
  return {lowest(load), lowest(store)};
}

/// d = rule(a @ b.T + bias, a @ b2.T + bias2, c), and the products if they are wanted; or, for CotangentsOf<rule>, d
/// and d2 are what its backward() makes of g. For operands in one dtype, or with a, or c and d, in float32. Returns
/// false, with nothing done, if no kernel can compute it, or if cuBLAS and a pass are faster and the path is automatic.
template <class Rule>
bool run(const RuleTensors& t) {
  const detail::KernelPath path = detail::kernel_path();
  measured().taken.reset();
  if (path == detail::KernelPath::kCublas || t.a.size(1) == 0) return false;
  using Operations = OperationsOf<Rule>;
  constexpr bool has_operations = !std::is_void_v<typename Operations::Streamed>;
  const at::ScalarType dtype = t.b.scalar_type();
  const bool mixed = t.a.scalar_type() != dtype || (t.c != nullptr && t.c->scalar_type() != dtype);
  [[maybe_unused]] std::optional<Problem> problem;
  std::optional<Case> sm90, split;
  if constexpr (has_operations) {
    if (!mixed) problem = aligned_problem(t);
    if (problem) sm90 = sm90_case_of<Rule>(*problem, t);
    if (problem && !sm90) split = split_case_of<Rule>(*problem, t);
  }
  const Case sizes = case_of(t.d.size(0), t.d.size(1), t.a.size(1), dtype);
  const auto [load_bytes, store_bytes] = bytes_at_once(t);
  const Conditions conditions{
      .is_gated = kIsGated<Rule>,
      .products = Rule::kProducts,
      .makes_cotangents = kMakesCotangents<Rule>,
      .writes_products = t.z != nullptr,
      .has_sm90 = sm90.has_value(),
      .has_split_sm90 = split.has_value(),
      .is_float32 = is_exact_float32(dtype),
      .splits_float32 = splits_float32(),
      .is_mixed = mixed,
      .has_one_product = t.b2 != nullptr && stacks_products(sizes, detail::are_halves(t.b, *t.b2)),
      .automatic = detail::is_automatic(path),
      .load_bytes = load_bytes,
      .store_bytes = store_bytes};
  const auto run_one = [&](const Candidate& candidate) {
    const Way way = candidate.way;
    if (way == Way::kSm80 || way == Way::kSm80Resident || way == Way::kSm80Float32) {
      return !(overwrites_a(t) && t.d.size(1) > kSm80LeastColumns) &&
             attempt(Family::kSm80, [&] { return run_sm80<Rule>(t, candidate); });
    }
    if constexpr (has_operations) {
      if (way == Way::kResidentWeights && sm90)
        return run_candidate<typename Operations::Resident>(candidate, *problem, *sm90, t.d);
      if (way == Way::kStreamedWeights && sm90)
        return run_candidate<typename Operations::Streamed>(candidate, *problem, *sm90, t.d);
      if (way == Way::kSplitFloat32 && split) return run_chosen<typename Operations::Split>(*problem, *split, t.d);
      if constexpr (!kIsGated<Rule>) {
        if (way == Way::kFewRows && problem) return run_few_rows<typename Operations::Activation>(*problem, dtype);
      }
    }
    return false;
  };
  const Plan candidates = plan(sizes, conditions);
  const Candidate* const done = std::find_if(candidates.begin(), candidates.end(), run_one);
  measured().taken = done == candidates.end() ? std::nullopt : std::optional(*done);
  return done != candidates.end();
}

/// The cotangents of a rule's products by an operation of sm90/. Returns false, with nothing done, as run() does.
template <class Operation>
bool run_cotangents(const GradientProblem& problem, const Case& c, const at::Tensor& like) {
  const Conditions conditions{.is_gated = true,
                              .products = problem.w2.data != nullptr ? 2 : 1,
                              .makes_cotangents = true,
                              .has_sm90 = true,
                              .automatic = detail::is_automatic(detail::kernel_path())};
  return plan(c, conditions).has(Way::kStreamedWeights) && run_chosen<Operation>(problem, c, like);
}

}  // namespace torchops::cuda::gemm
