#pragma once

// Who does what in a CTA. Whole warpgroups give and take registers, so the roles that share a number of registers share
// warpgroups.

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "cuda/gemm/sm90/skeleton/cutlass.cuh"

namespace torchops::cuda::gemm {

/// Calls role(parameters, shared, index), or without the index if it takes none.
template <auto role, class Parameters, class Shared>
CUTLASS_DEVICE void play(const Parameters& p, Shared& shared, int index) {
  if constexpr (std::is_invocable_v<decltype(role), const Parameters&, Shared&, int>) {
    role(p, shared, index);
  } else {
    role(p, shared);
  }
}

/// Warpgroups whose threads all run `role`, with the index of their warpgroup among them.
template <int count, int registers, auto role>
struct Warpgroups {
  static constexpr int kCount = count, kRegisters = registers;

  template <class Parameters, class Shared>
  CUTLASS_DEVICE static void run(const Parameters& p, Shared& shared, int warp) {
    play<role>(p, shared, warp / 4);
  }
};

/// A role of `count` warps, which may be none, with the index among them.
template <auto role, int count = 1>
struct WholeWarp {
  static constexpr int kCount = count;

  template <class Parameters, class Shared>
  CUTLASS_DEVICE static void run(const Parameters& p, Shared& shared, int index) {
    play<role>(p, shared, index);
  }
};

/// The same for one thread of each warp.
template <auto role, int count = 1>
struct OneThread {
  static constexpr int kCount = count;

  template <class Parameters, class Shared>
  CUTLASS_DEVICE static void run(const Parameters& p, Shared& shared, int index) {
    if (cute::elect_one_sync()) play<role>(p, shared, index);
  }
};

/// A warpgroup whose warps have roles of their own, in this order; the rest have none.
template <int registers, class... OfWarps>
struct Warps {
  static constexpr int kCount = 1, kRegisters = registers;
  static_assert((OfWarps::kCount + ...) <= 4);

  template <class Parameters, class Shared>
  CUTLASS_DEVICE static void run(const Parameters& p, Shared& shared, int warp) {
    int first = 0;
    const auto run_one = [&]<class Role>(Role) {
      if constexpr (Role::kCount > 0) {
        if (Role::kCount == 1 ? warp == first : warp >= first && warp < first + Role::kCount) {
          Role::run(p, shared, warp - first);
        }
        first += Role::kCount;
      }
    };
    (run_one(OfWarps{}), ...);
  }
};

/// All warpgroups of a CTA, in this order.
template <class... Groups>
struct Roles {
  static constexpr int kThreads = 128 * (Groups::kCount + ...);

  template <class Parameters, class Shared>
  CUTLASS_DEVICE static void run(const Parameters& p, Shared& shared) {
    // The same for all of a warp; the shuffle tells the compiler.
    run_from<0, Groups...>(p, shared, __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0));
  }

 private:
  // What the launch gives to each thread.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  // A warpgroup that asks for more waits until others have given them back.
  static_assert(128 * ((Groups::kCount * Groups::kRegisters) + ...) <= kLaunchRegisters * kThreads,
                "the roles need more registers than the launch gives to the CTA");

  template <int first, class Group, class... Rest, class Parameters, class Shared>
  CUTLASS_DEVICE static void run_from(const Parameters& p, Shared& shared, int warp) {
    if (sizeof...(Rest) > 0 && warp >= 4 * (first + Group::kCount)) {
      if constexpr (sizeof...(Rest) > 0) run_from<first + Group::kCount, Rest...>(p, shared, warp);
    } else {
      if constexpr (Group::kRegisters > kLaunchRegisters) {
        cutlass::arch::warpgroup_reg_alloc<Group::kRegisters>();
      } else if constexpr (Group::kRegisters < kLaunchRegisters) {
        cutlass::arch::warpgroup_reg_dealloc<Group::kRegisters>();
      }
      Group::run(p, shared, warp - 4 * first);
    }
  }
};

}  // namespace torchops::cuda::gemm
