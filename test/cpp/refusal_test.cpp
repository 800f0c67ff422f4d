#include "cuda/base/refusal.h"

#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "expect.h"

// What follows a launch that is refused. Needs no GPU.
namespace {

using torchops::cuda::Family;

class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

bool throws_an_error(cudaError_t error) {
  try {
    torchops::cuda::check_launch(Family::kSm90, error);
  } catch (const c10::Error&) {
    return true;
  }
  return false;
}

void other_errors_are_errors() {
  EXPECT(!throws_an_error(cudaSuccess));
  for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorIllegalAddress, cudaErrorLaunchFailure}) {
    EXPECT(throws_an_error(error));
  }
  EXPECT(!is_refused(Family::kSm90) && !is_refused(Family::kSm80));
}

void no_more_are_tried() {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  int tried = 0;
  const auto launch = [&](cudaError_t error) {
    return attempt(Family::kSm90, [&] {
      ++tried;
      torchops::cuda::check_launch(Family::kSm90, error);
      return true;
    });
  };
  EXPECT(launch(cudaSuccess) && tried == 1);
  EXPECT(!launch(cudaErrorNoKernelImageForDevice) && tried == 2 && is_refused(Family::kSm90));
  EXPECT(!launch(cudaSuccess) && tried == 2);
  EXPECT(!is_refused(Family::kSm80));
  EXPECT(warnings.texts.size() == 1 && warnings.texts[0].find("capability 9.0 (no kernel image") != std::string::npos);
}

void a_call_that_cannot_go_on_starts_again() {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  const auto call = [&] {
    if (is_refused(Family::kSm80)) return 2;
    torchops::cuda::check_launch(Family::kSm80, cudaErrorInvalidConfiguration);
    return 1;
  };
  EXPECT(torchops::cuda::again_if_refused(call, [] { return true; }) == 2);
  EXPECT(warnings.texts.size() == 1);
}

}  // namespace

int main() {
  other_errors_are_errors();
  no_more_are_tried();
  a_call_that_cannot_go_on_starts_again();
  return expect::result();
}
