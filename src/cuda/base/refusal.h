#pragma once

#include <cuda_runtime_api.h>

#include <exception>

// Launches that a driver or device refuses, although its properties say that it takes them: the kernel runs nowhere,
// and another one stands in.
namespace torchops::cuda {

/// Kernels that others stand in for. For those of sm90/, those of sm80/ do, or cuBLAS and a pass; for those of sm80/,
/// cuBLAS and a pass.
enum class Family { kSm90, kSm80 };

/// Whether a launch of the family was refused in this process. No more are tried.
bool is_refused(Family family);

/// Thrown by check_launch().
class Refused : public std::exception {
 public:
  const char* what() const noexcept override {
    return "a kernel was refused, and this call could not take another one; the next call will";
  }
};

/// What a launch of the family, or a query for it, has returned. If that means that the launch is refused, throws
/// Refused, so that from now on is_refused(); warns at the first time. Throws c10::Error for every other error.
void check_launch(Family family, cudaError_t error);

/// To be called before a launch. Throws c10::Error for an error that an earlier call has left, which check_launch()
/// would take for one of this launch. Refuses it if TORCHOPS_PRETEND_REFUSED, for tests, names the family.
void begin_launch(Family family);

/// f(), which tells whether it has done anything. False, with nothing done, if the family is refused. A launch that
/// f() has completed before another one is refused must not have overwritten what f() reads.
template <class F>
bool attempt(Family family, const F& f) {
  if (is_refused(family)) return false;
  try {
    return f();
  } catch (const Refused&) {
    return false;
  }
}

/// f(), and if a launch in it is refused f() again, which then takes other kernels; unless what it reads is gone.
template <class F, class Readable>
auto again_if_refused(const F& f, const Readable& is_readable) {
  try {
    return f();
  } catch (const Refused&) {
    if (!is_readable()) throw;
    return f();
  }
}

}  // namespace torchops::cuda
