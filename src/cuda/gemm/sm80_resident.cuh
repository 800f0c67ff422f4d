#pragma once

// y = f(x @ w.T) for many rows of few 16-bit features, on every GPU from compute capability 8.0 on.
//
// In sm80_kernel.cuh, shared memory is busy for longer than memory is: every CTA copies w, and the sums take a detour.
// Here, a CTA keeps its columns of w and walks over the rows. Its warps form groups, each with rows, buffers and a
// barrier of its own, so one multiplies while another applies f. Shared memory has the rows of w in such an order that
// a lane gets the sums of eight neighbouring columns, which it stores at once.

#include <cstdint>
#include <type_traits>

#include "cuda/gemm/mma.cuh"
#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm80_kernel.cuh"
#include "cuda/vector.cuh"

namespace torchops::cuda::gemm {

/// Columns of the operands per step; so many of a row have 128 bytes in shared memory.
constexpr int kResidentStep = 64;
/// Rows of w, of all products, whose sums a warp has.
constexpr int kResidentWarpRows = 64;

/// A CTA keeps w_rows rows of w, of all products; a warp computes `rows` rows of the output at a time. The warps of the
/// same rows, a group, have buffers for `stages` steps. A multiprocessor should hold `ctas`.
struct ResidentSpec {
  int w_rows, rows, stages, ctas;

  constexpr int tile_n(int products) const { return w_rows / products; }
  constexpr int group_warps() const { return w_rows / kResidentWarpRows; }
  constexpr int groups() const { return kSm80Warps / group_warps(); }
  constexpr int w_step_bytes() const { return w_rows * kResidentStep * 2; }
  constexpr int buffer_bytes() const { return rows * kResidentStep * 2; }
  constexpr int shared_bytes(int steps) const { return steps * w_step_bytes() + groups() * stages * buffer_bytes(); }
};

template <ResidentTiling>
inline constexpr ResidentSpec kResidentSpec{};
template <>
inline constexpr ResidentSpec kResidentSpec<ResidentTiling::k64Rows>{128, 64, 3, 1};
template <>
inline constexpr ResidentSpec kResidentSpec<ResidentTiling::k16Rows>{64, 16, 3, 2};

/// Where the row of w for an output column is among 32: lane 4g + q has the sums of the columns 2q and 2q + 1 of each
/// of four instructions, and should have those of 8q to 8q + 7.
__device__ inline int row_for_column(int column) {
  return (column & ~31) | (column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2);
}

/// Waits for the other warps of a group; makes what the group wrote to shared memory visible to it.
template <int warps>
__device__ inline void wait_for_group(int group) {
  if constexpr (warps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(warps * 32) : "memory");
  }
}

/// What the rule reads besides the products, for a lane's outputs of 16 rows.
template <class Rule, class T, int blocks>
struct Others {
  Packed<T, 8> c[2][Rule::kReadsC ? blocks : 1], g[2][kMakesCotangents<Rule> ? blocks : 1];

  __device__ void read(const Sm80Arguments<T, Rule::kProducts>& p, int first_row, int first_column) {
    if constexpr (Rule::kReadsC || kMakesCotangents<Rule>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
          const int row = first_row + half * 8, column = first_column + block * 32;
          if (row >= p.m || column >= p.n) continue;
          if constexpr (Rule::kReadsC) c[half][block] = cuda::load<T, 8>(p.c + row * p.c_stride + column);
          if constexpr (kMakesCotangents<Rule>) g[half][block] = cuda::load<T, 8>(p.g + row * p.g_stride + column);
        }
      }
    }
  }
};

/// How many bytes of the 16 from `column` on a row of k elements has.
__device__ inline int valid_bytes(int column, int k) { return min(max(k - column, 0), 8) * 2; }

/// Starts to copy the CTA's rows of w, which begin at first_column of each product. Beyond them, and beyond k, is 0.
template <class T, int products>
__device__ inline void copy_weights(const Sm80Arguments<T, products>& p, ResidentSpec spec, uint32_t to, int steps,
                                    int first_column) {
  const int tile_n = spec.tile_n(products), pieces = steps * (kResidentStep / 8);
#pragma unroll
  for (int of = 0; of < products; ++of) {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < tile_n * pieces; i += kSm80Threads) {
      const int row = i / pieces, column = i % pieces * 8;
      const int at = column / kResidentStep * spec.w_step_bytes();
      copy_or_clear<16>(to + static_cast<uint32_t>(at) +
                            place<kResidentStep>(of * tile_n + row_for_column(row), column % kResidentStep),
                        p.b[of] + (first_column + row) * p.b_stride[of] + column,
                        first_column + row < p.n ? valid_bytes(column, p.k) : 0);
    }
  }
}

/// Copies the rows of a group to its buffers, step by step: those of first_tile, then of the tile `stride` further on,
/// up to the last of `tiles`. Tiles are counted, because rows this far beyond the last may not fit an int.
template <class T, int rows, int warps, int stages>
class RowCopies {
 public:
  __device__ RowCopies(const T* a, int64_t a_stride, int m, int k, int first_tile, int tiles, int stride,
                       uint32_t buffers)
      : a_(a),
        a_stride_(a_stride),
        m_(m),
        k_(k),
        tile_(first_tile),
        tiles_(tiles),
        stride_(stride),
        buffers_(buffers) {}

  /// Starts the next step. Without one, the number of copies that end_copies() has counted grows all the same.
  __device__ void start() {
    if (tile_ < tiles_) {
      const int row = tile_ * rows + row_, column = step_ * kResidentStep + column_, valid = valid_bytes(column, k_);
      const T* const from = a_ + row * a_stride_ + column;
      const uint32_t to = buffers_ + static_cast<uint32_t>(slot_ * rows * kResidentStep * 2);
#pragma unroll
      for (int i = 0; i < rows; i += kRowsAtOnce) {
        copy_or_clear<16>(to + place<kResidentStep>(row_ + i, column_), from + i * a_stride_, row + i < m_ ? valid : 0);
      }
      if (++step_ * kResidentStep >= k_) {
        step_ = 0;
        tile_ += stride_;
      }
      slot_ = slot_ + 1 == stages ? 0 : slot_ + 1;
    }
    end_copies();
  }

 private:
  static constexpr int kPieces = kResidentStep / 8, kThreads = warps * 32, kRowsAtOnce = kThreads / kPieces;
  const int row_ = static_cast<int>(threadIdx.x) % kThreads / kPieces;
  const int column_ = static_cast<int>(threadIdx.x) % kPieces * 8;
  const T* a_;
  int64_t a_stride_;
  int m_, k_, tile_, tiles_, stride_, step_ = 0, slot_ = 0;
  uint32_t buffers_;
};

/// The biases of a lane's sums, scaled like them.
template <class Rule, class T, int in_n>
__device__ inline void read_biases(const Sm80Arguments<T, Rule::kProducts>& p, int first_column,
                                   float (&bias)[Rule::kProducts][in_n][2]) {
#pragma unroll
  for (int of = 0; of < Rule::kProducts; ++of) {
#pragma unroll
    for (int j = 0; j < in_n; ++j) {
      const int column = first_column + j / 4 * 32 + j % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool has_bias = p.bias[of] != nullptr && column < p.n;
        bias[of][j][i] = has_bias ? Rule::scale(of) * static_cast<float>(p.bias[of][column + i]) : 0.f;
      }
    }
  }
}

/// Writes a lane's outputs of 16 rows: of first_row and the one eight further on, eight columns of every 32.
template <class Rule, class T, int in_n>
__device__ inline void write_rows(const Sm80Arguments<T, Rule::kProducts>& p,
                                  const float (&sums)[Rule::kProducts][in_n][4],
                                  const float (&bias)[Rule::kProducts][in_n][2],
                                  const Others<Rule, T, in_n / 4>& others, int first_row, int first_column) {
  constexpr Exactness exactness = std::is_same_v<T, c10::BFloat16> ? Exactness::kCoarse : Exactness::kFast;
  constexpr int last = Rule::kProducts - 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < in_n; j += 4) {
      const int row = first_row + half * 8, column = first_column + j * 8;
      if (row >= p.m || column >= p.n) continue;
      float c[8] = {}, result[8];
      [[maybe_unused]] float g[8] = {}, second[8];
      if constexpr (Rule::kReadsC) unpack(others.c[half][j / 4], c);
      if constexpr (kMakesCotangents<Rule>) unpack(others.g[half][j / 4], g);
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const int of = j + v / 2, at = half * 2 + v % 2;
        const float t = fmaf(sums[0][of][at], Rule::scale(0), bias[0][of][v % 2]);
        const float t2 = fmaf(sums[last][of][at], Rule::scale(last), bias[last][of][v % 2]);
        if constexpr (kMakesCotangents<Rule>) {
          Rule::template backward<exactness>(g[v], t, t2, c[v], p.c_is_y, result[v], second[v]);
        } else {
          result[v] = Rule::template value<exactness>(t, t2, c[v]);
        }
      }
      store<T, 8>(p.d + row * p.d_stride + column, pack<T, 8>(result));
      if constexpr (kMakesCotangents<Rule>) {
        if (p.d2 != nullptr) store<T, 8>(p.d2 + row * p.d2_stride + column, pack<T, 8>(second));
      }
    }
  }
}

/// The rows of all tensors are aligned to 16 bytes, and n is a multiple of eight.
template <class Rule, class T, ResidentTiling tiling>
__global__ void __launch_bounds__(kSm80Threads, kResidentSpec<tiling>.ctas)
    sm80_resident_kernel(const Sm80Arguments<T, Rule::kProducts> p) {
  static_assert(sizeof(T) == 2 && kResidentSpec<tiling>.tile_n(Rule::kProducts) >= kSm80LeastColumns);
  constexpr ResidentSpec spec = kResidentSpec<tiling>;
  constexpr int products = Rule::kProducts, tile_n = spec.tile_n(products), warp_n = kResidentWarpRows / products;
  constexpr int warps = spec.group_warps(), groups = spec.groups(), stages = spec.stages;
  constexpr int in_m = spec.rows / 16, in_n = warp_n / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const auto w = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp / warps, of_n = warp % warps, steps = (p.k + kResidentStep - 1) / kResidentStep;
  const int first_column = static_cast<int>(blockIdx.x) % p.tiles_n * tile_n;
  // Groups take turns, and so do CTAs with the same columns.
  const int stride = static_cast<int>(gridDim.x) / p.tiles_n * groups;
  const int first_tile = static_cast<int>(blockIdx.x) / p.tiles_n * groups + group;
  const int tiles = (p.m + spec.rows - 1) / spec.rows;
  const uint32_t buffers =
      w + static_cast<uint32_t>(steps * spec.w_step_bytes() + group * stages * spec.buffer_bytes());

  RowCopies<T, spec.rows, warps, stages> copies(p.a, p.a_stride, p.m, p.k, first_tile, tiles, stride, buffers);
  copy_weights(p, spec, w, steps, first_column);
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) copies.start();
  const int first_of_lane = first_column + of_n * warp_n + lane % 4 * 8;
  float bias[products][in_n][2];
  read_biases<Rule>(p, first_of_lane, bias);
  wait_for_copies_before<stages - 2>();
  __syncthreads();  // w is there

  const int a_row = lane % 16, a_piece = lane / 16;
  const int b_row = of_n * warp_n + lane % 8 + lane / 16 * 8, b_piece = lane / 8 % 2;
  int slot = 0;
  for (int tile = first_tile; tile < tiles; tile += stride) {
    const int row = tile * spec.rows + lane / 4;
    Others<Rule, T, in_n / 4> next;
    next.read(p, row, first_of_lane);  // it arrives during the products
    float sums[in_m][products][in_n][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies_before<stages - 2>();
      wait_for_group<warps>(group);  // this step's rows are there, and those of the step before were read
      copies.start();
      const uint32_t a_step = buffers + static_cast<uint32_t>(slot * spec.buffer_bytes());
      const uint32_t w_step = w + static_cast<uint32_t>(step * spec.w_step_bytes());
#pragma unroll
      for (int k16 = 0; k16 < kResidentStep / 16; ++k16) {
        uint32_t a[in_m][4];
#pragma unroll
        for (int i = 0; i < in_m; ++i) {
          load_matrices(a[i], a_step + place<kResidentStep>(a_row + i * 16, (k16 * 2 + a_piece) * 8));
        }
#pragma unroll
        for (int of = 0; of < products; ++of) {
#pragma unroll
          for (int j = 0; j < in_n; j += 2) {
            uint32_t b[4];
            load_matrices(b, w_step + place<kResidentStep>(of * tile_n + b_row + j * 8, (k16 * 2 + b_piece) * 8));
#pragma unroll
            for (int i = 0; i < in_m; ++i) {
              multiply_16x8<T>(sums[i][of][j], a[i], {b[0], b[1]});
              multiply_16x8<T>(sums[i][of][j + 1], a[i], {b[2], b[3]});
            }
          }
        }
      }
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
#pragma unroll
    for (int i = 0; i < in_m; ++i) {
      const Others<Rule, T, in_n / 4> others = next;
      if (i + 1 < in_m) next.read(p, row + (i + 1) * 16, first_of_lane);
      write_rows<Rule, T, in_n>(p, sums[i], bias, others, row + i * 16, first_of_lane);
    }
  }
}

}  // namespace torchops::cuda::gemm
