#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

// The vectorised loops of gated.cpp. gated_vector.cpp is compiled once for each instruction set that ATen has kernels
// for; only pointers are passed, so that no code that others may link is compiled with its instructions.
namespace torchops::cpu {

/// `count` elements each; value, grad and dvalue have the dtype `value_type`, u and du `u_type`.
/// Null if there is no such tensor.
struct GatedSpan {
  const void *grad, *value, *u;
  void *out, *dvalue, *du;
  int64_t count;
  bool value_is_y;  // of backward with sigmoid: value is that times the gate
};

using GatedRoutine = void (*)(const GatedSpan& span);

// The routine for these dtypes, or null if there is none.
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
