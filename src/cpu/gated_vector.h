#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

// What gated.cpp calls on elements side by side. gated_vector.cpp is compiled for each instruction set that ATen has
// kernels for; nothing but pointers passes here, so that no code that others may link is compiled with its
// instructions.
namespace torchops::cpu {

/// Of `count` elements; value, grad and dvalue are of dtype `value_type`, u and du of `u_type`. Null where there is
/// none.
struct GatedSpan {
  const void *grad, *value, *u;
  void *out, *dvalue, *du;
  int64_t count;
};

using GatedRoutine = void (*)(const GatedSpan& span);

/// The routine for these dtypes, null if there is none.
using FindGatedRoutine = GatedRoutine (*)(c10::ScalarType value_type, c10::ScalarType u_type, bool silu, bool backward);

namespace DEFAULT {
GatedRoutine find_gated_routine(c10::ScalarType value_type, c10::ScalarType u_type, bool silu, bool backward);
}
namespace AVX2 {
GatedRoutine find_gated_routine(c10::ScalarType value_type, c10::ScalarType u_type, bool silu, bool backward);
}
namespace AVX512 {
GatedRoutine find_gated_routine(c10::ScalarType value_type, c10::ScalarType u_type, bool silu, bool backward);
}

}  // namespace torchops::cpu
