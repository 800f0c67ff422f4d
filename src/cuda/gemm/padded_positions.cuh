#pragma once

namespace torchops::cuda::gemm {

/// How far kernels that write rows of n positions fill them with zeros: products sum over rows padded to a multiple of
/// 32 bytes, as in detail::padded_size().
template <class T>
constexpr int padded_positions(int n) {
  constexpr int step = 32 / sizeof(T);
  return (n + step - 1) / step * step;
}

}  // namespace torchops::cuda::gemm
