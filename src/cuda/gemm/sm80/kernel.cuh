#pragma once

// y = f(x @ w.T) for 16-bit elements on every GPU from compute capability 8.0 on, and for rows of any alignment.
// cp.async copies tiles to shared memory while mma.sync multiplies earlier ones; the epilogue is a rule, as in sm90/.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/base/vector.cuh"
#include "cuda/gemm/mma.cuh"
#include "cuda/gemm/plan.h"
#include "cuda/gemm/rules.cuh"

namespace torchops::cuda::gemm {

constexpr int kSm80Warps = 8, kSm80Threads = 32 * kSm80Warps;

/// A CTA computes tile_m x tile_n of the output, in steps of tile_k, and has buffers for what `stages` steps read. Its
/// warps divide the tile by warps_m x warps_n, and what they sum by warps_k. A multiprocessor should hold `ctas`. Rules
/// with two products have buffers for half as many steps, but for two at least, and fit twice at most.
struct Sm80Spec {
  int tile_m, tile_n, tile_k, warps_m, warps_n, warps_k, stages, ctas;

  constexpr int buffers(int products) const { return products == 1 ? stages : std::max(stages / 2, 2); }
  constexpr int resident(int products) const { return products == 1 ? ctas : std::min(ctas, 2); }
  constexpr int stage_bytes(int products) const { return (tile_m + products * tile_n) * tile_k * 2; }
  /// A row of sums in shared memory. The padding lets the lanes that write eight rows at once use all banks.
  constexpr int sums_stride() const { return tile_n + 8; }
  /// The sums take the place of the operands.
  constexpr int shared_bytes(int products) const {
    return std::max(buffers(products) * stage_bytes(products), warps_k * products * tile_m * sums_stride() * 4);
  }
};

template <Sm80Tiling>
inline constexpr Sm80Spec kSm80Spec{};
template <>
inline constexpr Sm80Spec kSm80Spec<Sm80Tiling::k128x128>{128, 128, 64, 2, 4, 1, 2, 2};
// The loads in flight of a third CTA are worth the few registers that it makes threads spill.
template <>
inline constexpr Sm80Spec kSm80Spec<Sm80Tiling::k128x64>{128, 64, 64, 4, 2, 1, 2, 3};
template <>
inline constexpr Sm80Spec kSm80Spec<Sm80Tiling::k64x64>{64, 64, 64, 2, 2, 2, 6, 2};
template <>
inline constexpr Sm80Spec kSm80Spec<Sm80Tiling::k64x32>{64, 32, 128, 2, 1, 4, 4, 2};
template <>
inline constexpr Sm80Spec kSm80Spec<Sm80Tiling::k32x32>{32, 32, 128, 1, 1, 8, 6, 2};
/// Every tiling has tiles of so many columns, or more.
constexpr int kSm80LeastColumns = kSm80Spec<Sm80Tiling::k32x32>.tile_n;

/// The tensors of a kernel, of m x k, n x k (b) and m x n elements; strides are those of rows. Up to store_vector
/// neighbouring elements of the last kind may be accessed at once. Cotangents are computed from that of the value, g,
/// and written to d and, unless it is null, d2; c may be the value itself (c_is_y). With elements T of b and the
/// biases, those of a (X), and of what the rule reads and writes (V), may be float; D are those of d.
template <class T, int products, class X = T, class V = T, class D = V>
struct Sm80Arguments {
  const X* a;
  const T *b[products], *bias[products];
  const V *c, *g;
  D* d;
  V* d2;
  int64_t a_stride, b_stride[products], c_stride, g_stride, d_stride, d2_stride;
  int m, n, k, tiles_n, store_vector;
  bool c_is_y;
};

/// How exact results of a type must be, unless they come from products of TF32.
template <class T>
constexpr Exactness kExactnessOf = std::is_same_v<T, float>           ? Exactness::kExact
                                   : std::is_same_v<T, c10::BFloat16> ? Exactness::kCoarse
                                                                      : Exactness::kFast;

/// Where an element of a tile lies in shared memory, in bytes: the 16-byte pieces of a row are permuted, so that the
/// same piece of eight successive rows is in eight different places modulo 128 bytes.
template <int tile_k>
__device__ inline uint32_t place(int row, int column) {
  static_assert(tile_k % 64 == 0);
  const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(column);
  return (r * tile_k + ((c / 8) ^ (r % 8)) * 8 + c % 8) * 2;
}

/// Starts to copy `bytes` from global to shared memory, of which only the first `valid` are read; the others become 0.
template <int bytes>
__device__ inline void copy_or_clear(uint32_t to, const void* from, int valid) {
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(bytes), "r"(valid)
                 : "memory");
  }
}

/// What a thread copies of the tiles of `rows` rows of an operand, `vector` elements at a time. There are rows_left
/// rows and k columns; everything beyond is 0 in shared memory.
template <class T, int rows, int tile_k, int vector>
class TileCopy {
 public:
  __device__ TileCopy(const T* data, int64_t stride, int rows_left, int k)
      : row_(static_cast<int>(threadIdx.x) / kVectors),
        column_(static_cast<int>(threadIdx.x) % kVectors * vector),
        rows_left_(rows_left),
        k_(k),
        from_(data + row_ * stride + column_),
        step_(stride * kStep) {}

  /// Starts to copy the columns from `begin` on.
  __device__ void start(uint32_t to, int begin) const {
    const int columns = min(max(k_ - begin - column_, 0), vector);
    if constexpr (vector > 1) {
      constexpr int at_once = kCopies < 4 ? kCopies : 4;  // more take more registers
#pragma unroll at_once
      for (int i = 0; i < kCopies; ++i) {
        const int row = row_ + i * kStep;
        copy_or_clear<vector * 2>(to + place<tile_k>(row, column_), from_ + (begin + i * step_),
                                  row < rows_left_ ? columns * 2 : 0);
      }
    } else {
      // cp.async has at least 4 bytes. A batch of loads is in flight at once.
      constexpr int batch = kCopies < 8 ? kCopies : 8;
#pragma unroll 1
      for (int first = 0; first < kCopies; first += batch) {
        uint16_t values[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const bool valid = row_ + (first + i) * kStep < rows_left_ && columns > 0;
          values[i] = valid ? *reinterpret_cast<const uint16_t*>(from_ + (begin + (first + i) * step_)) : uint16_t{0};
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + place<tile_k>(row_ + (first + i) * kStep, column_)),
                       "h"(values[i])
                       : "memory");
        }
      }
    }
  }

 private:
  static constexpr int kVectors = tile_k / vector, kStep = kSm80Threads / kVectors, kCopies = rows / kStep;
  static_assert(kSm80Threads % kVectors == 0 && rows % kStep == 0);
  int row_, column_, rows_left_, k_;
  const T* from_;
  int64_t step_;
};

/// Where the sum of a column lies in its row. A lane that reads eight neighbouring sums takes four at a time; the lanes
/// beyond the 32nd column find their first four in the other half, so that eight lanes use all banks.
__device__ inline int sum_place(int column) { return column ^ ((column / 32 % 2) * 4); }

/// Writes `vector` columns at a time. A thread stays in its columns, so it reads their biases once. The sums of the
/// warps that share an output are added in order, so the bits don't depend on timing.
template <class Rule, class T, Sm80Tiling tiling, int vector>
__device__ void write_tile(const Sm80Arguments<T, Rule::kProducts>& p, const float* sums, int first_row,
                           int first_column) {
  constexpr Sm80Spec spec = kSm80Spec<tiling>;
  constexpr Exactness exactness = kExactnessOf<T>;
  constexpr int products = Rule::kProducts, width = spec.tile_n / vector, height = kSm80Threads / width;
  constexpr int part = vector < 4 ? vector : 4;
  const int in_tile = static_cast<int>(threadIdx.x) % width * vector, column = first_column + in_tile;
  if (column >= p.n) return;
  float bias[products][vector];
#pragma unroll
  for (int of = 0; of < products; ++of) {
#pragma unroll
    for (int i = 0; i < vector; ++i) {
      bias[of][i] = p.bias[of] != nullptr ? Rule::scale(of) * static_cast<float>(p.bias[of][column + i]) : 0.f;
    }
  }
  const int end = min(spec.tile_m, p.m - first_row);
  constexpr int at_once = spec.warps_k * products > 2 ? 1 : 2;
#pragma unroll at_once
  for (int row = static_cast<int>(threadIdx.x) / width; row < end; row += height) {
    float z[products][vector] = {}, c[vector] = {};
    if constexpr (Rule::kReadsC) unpack(load<T, vector>(p.c + (first_row + row) * p.c_stride + column), c);
#pragma unroll
    for (int of = 0; of < products; ++of) {
#pragma unroll
      for (int slice = 0; slice < spec.warps_k; ++slice) {
        const float* const from = sums + ((slice * products + of) * spec.tile_m + row) * spec.sums_stride();
#pragma unroll
        for (int i = 0; i < vector; i += part) {
          const auto some = *reinterpret_cast<const Packed<float, part>*>(from + sum_place(in_tile + i));
#pragma unroll
          for (int j = 0; j < part; ++j) z[of][i + j] += some.at[j];
        }
      }
    }
    float result[vector];
    [[maybe_unused]] float g[vector] = {}, second[vector];
    if constexpr (kMakesCotangents<Rule>) unpack(load<T, vector>(p.g + (first_row + row) * p.g_stride + column), g);
#pragma unroll
    for (int i = 0; i < vector; ++i) {
      const float t = fmaf(z[0][i], Rule::scale(0), bias[0][i]);
      const float t2 = fmaf(z[products - 1][i], Rule::scale(products - 1), bias[products - 1][i]);
      if constexpr (kMakesCotangents<Rule>) {
        Rule::template backward<exactness>(g[i], t, t2, c[i], p.c_is_y, result[i], second[i]);
      } else {
        result[i] = Rule::template value<exactness>(t, t2, c[i]);
      }
    }
    store<T, vector>(p.d + (first_row + row) * p.d_stride + column, pack<T, vector>(result));
    if constexpr (kMakesCotangents<Rule>) {
      if (p.d2 != nullptr) store<T, vector>(p.d2 + (first_row + row) * p.d2_stride + column, pack<T, vector>(second));
    }
  }
}

/// The rows of the operands are aligned for loads of `vector` elements.
template <class Rule, class T, Sm80Tiling tiling, int vector>
__global__ void __launch_bounds__(kSm80Threads, kSm80Spec<tiling>.resident(Rule::kProducts))
    sm80_kernel(const Sm80Arguments<T, Rule::kProducts> p) {
  static_assert(sizeof(T) == 2);
  constexpr Sm80Spec spec = kSm80Spec<tiling>;
  static_assert(spec.warps_m * spec.warps_n * spec.warps_k == kSm80Warps);
  constexpr int products = Rule::kProducts, tile_k = spec.tile_k, stages = spec.buffers(products);
  constexpr int warp_m = spec.tile_m / spec.warps_m, warp_n = spec.tile_n / spec.warps_n;
  constexpr int in_m = warp_m / 16, in_n = warp_n / 8;
  constexpr uint32_t a_bytes = spec.tile_m * tile_k * 2, b_bytes = spec.tile_n * tile_k * 2;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t buffers = shared_address(shared);
  const int first_row = static_cast<int>(blockIdx.x) / p.tiles_n * spec.tile_m;
  const int first_column = static_cast<int>(blockIdx.x) % p.tiles_n * spec.tile_n;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int of_n = warp % spec.warps_n, of_m = warp / spec.warps_n % spec.warps_m;
  const int of_k = warp / (spec.warps_n * spec.warps_m);

  const TileCopy<T, spec.tile_m, tile_k, vector> copy_a(p.a + first_row * p.a_stride, p.a_stride, p.m - first_row, p.k);
  const auto start = [&](int slot, int step) {
    const uint32_t to = buffers + static_cast<uint32_t>(slot * spec.stage_bytes(products));
    copy_a.start(to, step * tile_k);
#pragma unroll
    for (int of = 0; of < products; ++of) {
      const TileCopy<T, spec.tile_n, tile_k, vector> copy_b(p.b[of] + first_column * p.b_stride[of], p.b_stride[of],
                                                            p.n - first_column, p.k);
      copy_b.start(to + a_bytes + of * b_bytes, step * tile_k);
    }
  };
  const int steps = (p.k + tile_k - 1) / tile_k;
#pragma unroll 1
  for (int slot = 0; slot < stages; ++slot) {
    if (slot < steps) start(slot, slot);
    end_copies();
  }

  float sums[products][in_m][in_n][4] = {};
  // The rows and pieces that this lane passes to ldmatrix. Rows are multiples of 8 apart, so they permute alike.
  const int a_row = of_m * warp_m + lane % 16, a_piece = lane / 16;
  const int b_row = of_n * warp_n + lane % 8 + lane / 16 * 8, b_piece = lane / 8 % 2;
  for (int step = 0, slot = 0; step < steps; ++step) {
    wait_for_copies_before<stages - 1>();
    __syncthreads();
    const uint32_t a_tile = buffers + static_cast<uint32_t>(slot * spec.stage_bytes(products));
#pragma unroll
    for (int k16 = 0; k16 < tile_k / 16 / spec.warps_k; ++k16) {
      const int piece = (k16 * spec.warps_k + of_k) * 2;
      uint32_t a[in_m][4];
#pragma unroll
      for (int i = 0; i < in_m; ++i) {
        load_matrices(a[i], a_tile + place<tile_k>(a_row + i * 16, (piece + a_piece) * 8));
      }
#pragma unroll
      for (int of = 0; of < products; ++of) {
#pragma unroll
        for (int j = 0; j < in_n; j += 2) {
          uint32_t b[4];
          load_matrices(b, a_tile + a_bytes + of * b_bytes + place<tile_k>(b_row + j * 8, (piece + b_piece) * 8));
#pragma unroll
          for (int i = 0; i < in_m; ++i) {
            multiply_16x8<T>(sums[of][i][j], a[i], {b[0], b[1]});
            multiply_16x8<T>(sums[of][i][j + 1], a[i], {b[2], b[3]});
          }
        }
      }
    }
    if (step + stages < steps) {
      __syncthreads();  // everyone has read the buffer
      start(slot, step + stages);
    }
    end_copies();
    slot = slot + 1 == stages ? 0 : slot + 1;
  }

  __syncthreads();
  float* const all = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int of = 0; of < products; ++of) {
    float* const to = all + (of_k * products + of) * spec.tile_m * spec.sums_stride();
#pragma unroll
    for (int i = 0; i < in_m; ++i) {
#pragma unroll
      for (int j = 0; j < in_n; ++j) {
        const int row = of_m * warp_m + i * 16 + lane / 4;
        const int column = sum_place(of_n * warp_n + j * 8 + lane % 4 * 2);
        const auto& four = sums[of][i][j];
        *reinterpret_cast<float2*>(to + row * spec.sums_stride() + column) = {four[0], four[1]};
        *reinterpret_cast<float2*>(to + (row + 8) * spec.sums_stride() + column) = {four[2], four[3]};
      }
    }
  }
  __syncthreads();
  if constexpr (kMakesCotangents<Rule>) {
    write_tile<Rule, T, tiling, 8>(p, all, first_row, first_column);
  } else if (p.store_vector == 8) {
    write_tile<Rule, T, tiling, 8>(p, all, first_row, first_column);
  } else if (p.store_vector == 2) {
    write_tile<Rule, T, tiling, 2>(p, all, first_row, first_column);
  } else {
    write_tile<Rule, T, tiling, 1>(p, all, first_row, first_column);
  }
}

}  // namespace torchops::cuda::gemm
