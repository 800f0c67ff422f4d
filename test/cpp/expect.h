#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>

#include <cstdio>
#include <string>

// The whole test framework: expectations print where they fail, and main() ends with `return expect::result();`.
namespace expect {

inline int checks = 0, failures = 0;

inline void that(bool ok, const std::string& what, const char* file, int line) {
  ++checks;
  if (ok) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: expected %s\n", file, line, what.c_str());
}

/// The largest allowed difference between a result of this dtype, accumulated in at least float32, and float64.
inline double tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-12;
    case at::kFloat:
      return 1e-5;
    case at::kHalf:
      return 4e-3;
    default:
      return 3e-2;
  }
}

/// Whether it has the same shape as, and is close to, a reference that is usually computed in float64.
inline bool close(const at::Tensor& actual, const at::Tensor& reference) {
  const double tol = tolerance(actual.scalar_type());
  return actual.sizes() == reference.sizes() &&
         at::allclose(actual.to(at::kDouble), reference.to(at::kDouble), tol, tol);
}

/// Returns "" if `call` throws exactly an `Error` whose text contains `text`, else what happened instead.
template <class Error, class Call>
std::string mismatch(const std::string& text, Call call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string what = error.what_without_backtrace();
    return what.find(text) == std::string::npos ? ", got \"" + what + "\"" : "";
  }
  return ", got no error";
}

inline int result() {
  std::printf("%d checks, %d failures\n", checks, failures);
  return checks > 0 && failures == 0 ? 0 : 1;
}

}  // namespace expect

#define EXPECT(condition) ::expect::that((condition), #condition, __FILE__, __LINE__)
#define EXPECT_CLOSE(actual, reference) \
  ::expect::that(::expect::close(actual, reference), #actual " close to " #reference, __FILE__, __LINE__)
#define EXPECT_THROWS(Error, text, ...)                                                                         \
  do {                                                                                                          \
    const std::string mismatch = ::expect::mismatch<Error>(text, [&] { __VA_ARGS__; });                         \
    ::expect::that(mismatch.empty(), std::string(#Error " \"") + (text) + "\"" + mismatch, __FILE__, __LINE__); \
  } while (false)
