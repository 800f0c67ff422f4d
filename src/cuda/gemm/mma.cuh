#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/gemm/split_tf32.cuh"

// The matrix instructions from compute capability 8.0 on, and how their operands get into registers.
namespace torchops::cuda::gemm {

/// sums += a (16 x 16) @ b.T (8 x 16). In registers (PTX, mma.m16n8k16), lane 4g + q has of a the rows g and g + 8, and
/// of b the row g, each at columns 2q, 2q + 1 (a[0], a[1], b[0]) and 2q + 8, 2q + 9 (a[2], a[3], b[1]). Of the sums, it
/// has (g, 2q), (g, 2q + 1), (g + 8, 2q) and (g + 8, 2q + 1). Permuting the columns of both a and b changes nothing.
///
/// For float, the numbers are TF32, a has 16 x 8 and b 8 x 8 (mma.m16n8k8), and where a lane has the columns 2q and
/// 2q + 1, or the same 8 further on, it has the column q, or that 4 further on. The sums are the same.
template <class T>
__device__ inline void multiply_16x8(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (std::is_same_v<T, float>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

/// The nearest number of TF32, in the bits of a float.
__device__ inline uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

/// product = a (16 x 16) @ b.T (8 x 16), in products of TF32; that of both low parts, at most 2^-22 of the result's
/// terms, is left out. a[h] and b[h] have 8 columns each. The instruction cuts its sums off instead of rounding them,
/// the small ones included, so small products come first, and sums of more columns are for the caller to add, with
/// float additions.
///
/// After H. Ootomo and R. Yokota, Recovering single precision accuracy from Tensor Cores while surpassing the FP32
/// theoretical peak performance, 2022 (https://arxiv.org/abs/2203.03341). A number that is not finite, or rounds to
/// infinity, makes results that are not finite; they may be NaN instead of infinity.
__device__ inline void multiply_split(float (&product)[4], const SplitTF32<4> (&a)[2], const SplitTF32<2> (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
      : "r"(a[0].low[0]), "r"(a[0].low[1]), "r"(a[0].low[2]), "r"(a[0].low[3]), "r"(b[0].high[0]), "r"(b[0].high[1]),
        "f"(0.f));
  multiply_16x8<float>(product, a[0].high, b[0].low);
  multiply_16x8<float>(product, a[1].low, b[1].high);
  multiply_16x8<float>(product, a[1].high, b[1].low);
  multiply_16x8<float>(product, a[0].high, b[0].high);
  multiply_16x8<float>(product, a[1].high, b[1].high);
}

/// Four 8 x 8 matrices from shared memory: lane 8i + r passes the address of row r of matrix i, and lane 4g + q gets in
/// matrices[i] the columns 2q and 2q + 1 of its row g. A row has 16 bytes; of four floats, the lane gets column q.
__device__ inline void load_matrices(uint32_t (&matrices)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

/// The same, transposed: of its matrices, lane 4g + q gets the rows 2q and 2q + 1 of column g.
__device__ inline void load_transposed_matrices(uint32_t (&matrices)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

}  // namespace torchops::cuda::gemm
