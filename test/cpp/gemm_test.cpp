#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/gemm/spec.h"
#include "expect.h"

// The GEMM kernels without torch: how they handle problems that operand.h would never give them. Exits with 77, which
// ctest shows as skipped, if the kernels cannot run.
namespace gemm = torchops::cuda::gemm;

namespace {

struct Buffer {
  explicit Buffer(size_t bytes) { EXPECT(cudaMalloc(&data, bytes) == cudaSuccess && cudaMemset(data, 0, bytes) == 0); }
  ~Buffer() { cudaFree(data); }
  void* data = nullptr;
};

// 256 x 64 zeros times 64 x 64 zeros.
gemm::Problem problem(const Buffer& a, const Buffer& b, const Buffer& d) {
  gemm::Problem p;
  p.m = 256;
  p.n = p.k = 64;
  p.a = {a.data, 64, 0};
  p.b = {b.data, 64, 0};
  p.d = {d.data, 64, 0};
  return p;
}

// A stride that TMA cannot encode must be an error before the launch, and must leave no error behind.
void failed_descriptor_is_an_error() {
  const Buffer a(1 << 16), b(1 << 16), d(1 << 16);
  const auto* const kernel = gemm::find<gemm::Dense>(gemm::Element::kBFloat16, gemm::Tiling::k128x128ResidentB);
  EXPECT(kernel != nullptr);
  if (kernel == nullptr) return;
  EXPECT(cudaMemset(d.data, 0xff, 1 << 16) == cudaSuccess);
  gemm::Problem wrong = problem(a, b, d);
  wrong.a.row_stride = 65;
  const gemm::Status status = kernel->run(wrong, nullptr);
  EXPECT(status.kind == gemm::Status::kFailed && status.error == cudaErrorInvalidValue);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  std::vector<uint16_t> out(256 * 64);
  EXPECT(cudaMemcpy(out.data(), d.data, out.size() * 2, cudaMemcpyDeviceToHost) == cudaSuccess);
  EXPECT(out.front() == 0xffff && out.back() == 0xffff);

  EXPECT(kernel->run(problem(a, b, d), nullptr).done());
  EXPECT(cudaMemcpy(out.data(), d.data, out.size() * 2, cudaMemcpyDeviceToHost) == cudaSuccess);
  EXPECT(out.front() == 0x3f00 && out.back() == 0x3f00);  // sigmoid(0) in bfloat16
}

void too_long_a_sum_is_not_for_a_resident_kernel() {
  const Buffer a(1 << 18), b(1 << 18), d(1 << 18);
  gemm::Problem p = problem(a, b, d);
  p.k = p.a.row_stride = p.b.row_stride = 512;
  int64_t bytes = 0;
  const auto* const kernel = gemm::find<gemm::Dense>(gemm::Element::kBFloat16, gemm::Tiling::k128x128ResidentB);
  EXPECT(kernel != nullptr && kernel->prepare(p, bytes).kind == gemm::Status::kNotForMe);
}

void combinations_outside_the_table_are_null() {
  EXPECT(gemm::find<gemm::Dense>(gemm::Element::kTF32, gemm::Tiling::k128x128ResidentB) == nullptr);
  EXPECT(gemm::find<gemm::SquareMatmul>(gemm::Element::kTF32, gemm::Tiling::k128x128) == nullptr);
}

}  // namespace

int main() {
  combinations_outside_the_table_are_null();
  cudaDeviceProp device{};
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9 || device.minor != 0 ||
      !gemm::has_sm90_kernels()) {
    std::printf("skipped: needs a GPU of compute capability 9.0 and the kernels for it\n");
    return expect::failures == 0 ? 77 : 1;
  }
  failed_descriptor_is_an_error();
  too_long_a_sum_is_not_for_a_resident_kernel();
  return expect::result();
}
