#pragma once

// y = f(x @ w.T) for many rows of few 16-bit features, on every GPU from compute capability 8.0 on; the rows of x, and
// what f reads and writes, may also be float32.
//
// In sm80/kernel.cuh, shared memory is busy for longer than memory is: every CTA copies w, and the sums take a detour.
// Here, a CTA keeps its columns of w and walks over the rows. Its warps form groups, each with rows, buffers and a
// barrier of its own, so one multiplies while another applies f. Shared memory has the rows of w in such an order that
// a lane gets the sums of neighbouring columns, eight or, of float32, four, which it stores at once. Rows of float32
// lie in shared memory as they are, and are rounded when a lane reads its part of them.

#include <cstdint>
#include <type_traits>

#include "cuda/base/vector.cuh"
#include "cuda/gemm/mma.cuh"
#include "cuda/gemm/rules.cuh"
#include "cuda/gemm/sm80/kernel.cuh"

namespace torchops::cuda::gemm {

/// What a step copies of a row, and the columns of 16 bits that are as long: those of w that lie side by side.
constexpr int kResidentRowBytes = 128, kResidentStep = kResidentRowBytes / 2;
/// Rows of w, of all products, whose sums a warp has.
constexpr int kResidentWarpRows = 64;

/// A CTA keeps w_rows rows of w, of all products; a warp computes `rows` rows of the output at a time. The warps of the
/// same rows, a group, have buffers for `stages` steps. A multiprocessor should hold `ctas`.
struct ResidentSpec {
  int w_rows, rows, stages, ctas;

  constexpr int tile_n(int products) const { return w_rows / products; }
  constexpr int group_warps() const { return w_rows / kResidentWarpRows; }
  constexpr int groups() const { return kSm80Warps / group_warps(); }
  constexpr int w_step_bytes() const { return w_rows * kResidentRowBytes; }
  constexpr int w_bytes(int k) const { return (k + kResidentStep - 1) / kResidentStep * w_step_bytes(); }
  constexpr int buffer_bytes() const { return rows * kResidentRowBytes; }
  constexpr int shared_bytes(int k) const { return w_bytes(k) + groups() * stages * buffer_bytes(); }
};

template <ResidentTiling>
inline constexpr ResidentSpec kResidentSpec{};
template <>
inline constexpr ResidentSpec kResidentSpec<ResidentTiling::k64Rows>{128, 64, 3, 1};
template <>
inline constexpr ResidentSpec kResidentSpec<ResidentTiling::k16Rows>{64, 16, 3, 2};
// For a rule that reads two tensors of float32: they don't fit half of the registers.
template <>
inline constexpr ResidentSpec kResidentSpec<ResidentTiling::k16RowsAlone>{64, 16, 4, 1};

/// The tensors for a rule: of weights T, rows X, and other elements V. Cotangents of products have the type of weights.
template <class Rule, class T, class X, class V>
using ResidentArguments = Sm80Arguments<T, Rule::kProducts, X, V, std::conditional_t<kMakesCotangents<Rule>, T, V>>;

/// The scale of what a rule gets from a product.
template <class Rule, Exactness exactness>
__device__ inline constexpr float scale_of(int product) {
  return exactness == Exactness::kExact ? 1.f : Rule::scale(product);
}

/// Where the row of w for an output column is: lane 4g + q has the sums of the columns 2q and 2q + 1 of each of `width`
/// / 2 instructions, and should have those of `width` * q to `width` * (q + 1) - 1.
template <int width>
__device__ inline int row_for_column(int column) {
  constexpr int group = 4 * width;
  return column / group * group + (column % width / 2 * 8 + column % group / width * 2 + column % 2);
}

/// Where a column of w is: a lane has of 16 columns, in the order of the instruction (see mma.cuh), 2q, 2q + 1, 2q + 8
/// and 2q + 9. Of floats it reads four neighbours instead, so w must have their columns there.
template <class X>
__device__ inline int place_of_column(int column) {
  if constexpr (sizeof(X) == 2) return column;
  return column / 16 * 16 + column % 4 / 2 * 8 + column % 16 / 4 * 2 + column % 2;
}

/// Where a piece of 16 bytes of a row of x is, in bytes. Eight lanes read the same piece of eight rows or, of floats,
/// four pieces of two rows: in all banks.
template <class X>
__device__ inline uint32_t place_of_piece(int row, int piece) {
  const auto r = static_cast<uint32_t>(row), p = static_cast<uint32_t>(piece);
  return r * kResidentRowBytes + (p ^ (sizeof(X) == 2 ? r % 8 : r % 2 * 4)) * kVectorBytes;
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

/// What the rule reads besides the products, for a lane's outputs of 16 rows: of every 4 * `width` columns, `width`.
template <class Rule, class V, int blocks, int width = kVectorSize<V>>
struct RuleInputs {
  Packed<V, width> c[2][Rule::kReadsC ? blocks : 1], g[2][kMakesCotangents<Rule> ? blocks : 1];

  template <class Arguments>
  __device__ void read(const Arguments& p, int first_row, int first_column) {
    if constexpr (Rule::kReadsC || kMakesCotangents<Rule>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
          const int row = first_row + half * 8, column = first_column + block * 4 * width;
          if (row >= p.m || column >= p.n) continue;
          if constexpr (Rule::kReadsC) c[half][block] = cuda::load<V, width>(p.c + row * p.c_stride + column);
          if constexpr (kMakesCotangents<Rule>) {
            g[half][block] = cuda::load<V, width>(p.g + row * p.g_stride + column);
          }
        }
      }
    }
  }
};

/// How many bytes of `count` elements from `column` on a row of k has.
template <class T, int count>
__device__ inline int valid_bytes(int column, int k) {
  return min(max(k - column, 0), count) * static_cast<int>(sizeof(T));
}

/// Starts to copy the CTA's rows of w, which begin at first_column of each product. Beyond them, and beyond k, is 0.
template <class T, int products, class X, class V, class D>
__device__ inline void copy_weights(const Sm80Arguments<T, products, X, V, D>& p, ResidentSpec spec, uint32_t to,
                                    int first_column) {
  constexpr int at_once = sizeof(X) == 2 ? 8 : 2;  // columns that stay neighbours
  const int tile_n = spec.tile_n(products);
  const int pieces = (p.k + kResidentStep - 1) / kResidentStep * (kResidentStep / at_once);
#pragma unroll
  for (int of = 0; of < products; ++of) {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < tile_n * pieces; i += kSm80Threads) {
      const int row = i / pieces, column = i % pieces * at_once;
      const int at = column / kResidentStep * spec.w_step_bytes();
      copy_or_clear<at_once * 2>(to + static_cast<uint32_t>(at) +
                                     place<kResidentStep>(of * tile_n + row_for_column<kVectorSize<V>>(row),
                                                          place_of_column<X>(column % kResidentStep)),
                                 p.b[of] + (first_column + row) * p.b_stride[of] + column,
                                 first_column + row < p.n ? valid_bytes<T, at_once>(column, p.k) : 0);
    }
  }
}

/// Copies the rows of a group to its buffers, step by step: those of first_tile, then of the tile `stride` further on,
/// up to the last of `tiles`. Tiles are counted, because rows this far beyond the last may not fit an int.
template <class X, int rows, int warps, int stages>
class RowCopies {
 public:
  static constexpr int kStep = kResidentRowBytes / static_cast<int>(sizeof(X));  // columns

  __device__ RowCopies(const X* a, int64_t a_stride, int m, int k, int first_tile, int tiles, int stride,
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
      const int row = tile_ * rows + row_, column = step_ * kStep + piece_ * kVectorSize<X>;
      const int valid = valid_bytes<X, kVectorSize<X>>(column, k_);
      const X* const from = a_ + row * a_stride_ + column;
      const uint32_t to = buffers_ + static_cast<uint32_t>(slot_ * rows * kResidentRowBytes);
#pragma unroll
      for (int i = 0; i < rows; i += kRowsAtOnce) {
        copy_or_clear<kVectorBytes>(to + place_of_piece<X>(row_ + i, piece_), from + i * a_stride_,
                                    row + i < m_ ? valid : 0);
      }
      if (++step_ * kStep >= k_) {
        step_ = 0;
        tile_ += stride_;
      }
      slot_ = slot_ + 1 == stages ? 0 : slot_ + 1;
    }
    end_copies();
  }

 private:
  static constexpr int kPieces = kResidentRowBytes / kVectorBytes, kThreads = warps * 32;
  static constexpr int kRowsAtOnce = kThreads / kPieces;
  const int row_ = static_cast<int>(threadIdx.x) % kThreads / kPieces;
  const int piece_ = static_cast<int>(threadIdx.x) % kPieces;
  const X* a_;
  int64_t a_stride_;
  int m_, k_, tile_, tiles_, stride_, step_ = 0, slot_ = 0;
  uint32_t buffers_;
};

/// A lane's part of 16 rows and 16 columns of x, as the matrix instruction reads it; see place_of_column().
template <class T, class X>
__device__ inline void load_rows(uint32_t (&a)[4], uint32_t from, int first_row, int k16) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (sizeof(X) == 2) {
    load_matrices(a, from + place_of_piece<X>(first_row + lane % 16, k16 * 2 + lane / 16));
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float four[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                   : "r"(from + place_of_piece<X>(first_row + half * 8 + lane / 4, k16 * 4 + lane % 4))
                   : "memory");
      const Packed<T, 4> rounded = pack<T, 4>(four);
      const auto* const pairs = reinterpret_cast<const uint32_t*>(&rounded);
      a[half] = pairs[0];
      a[half + 2] = pairs[1];
    }
  }
}

/// The biases of a lane's sums, scaled like them; a lane has `width` neighbouring columns.
template <class Rule, Exactness exactness, int width, int in_n, class Arguments>
__device__ inline void read_biases(const Arguments& p, int first_column, float (&bias)[Rule::kProducts][in_n][2]) {
#pragma unroll
  for (int of = 0; of < Rule::kProducts; ++of) {
#pragma unroll
    for (int j = 0; j < in_n; ++j) {
      constexpr int instructions = width / 2;
      const int column = first_column + j / instructions * 4 * width + j % instructions * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool has_bias = p.bias[of] != nullptr && column < p.n;
        bias[of][j][i] = has_bias ? scale_of<Rule, exactness>(of) * static_cast<float>(p.bias[of][column + i]) : 0.f;
      }
    }
  }
}

/// Writes a lane's outputs of 16 rows: of first_row and the one eight further on, `width` columns of every 4 * width.
template <class Rule, class T, class X, class V, int in_n, int width = kVectorSize<V>>
__device__ inline void write_rows(const ResidentArguments<Rule, T, X, V>& p,
                                  const float (&sums)[Rule::kProducts][in_n][4],
                                  const float (&bias)[Rule::kProducts][in_n][2],
                                  const RuleInputs<Rule, V, in_n * 2 / width>& others, int first_row,
                                  int first_column) {
  using D = std::remove_pointer_t<decltype(p.d)>;
  constexpr Exactness exactness = kExactnessOf<V>;
  constexpr int last = Rule::kProducts - 1, instructions = width / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < in_n; j += instructions) {
      const int row = first_row + half * 8, column = first_column + j * 8;
      if (row >= p.m || column >= p.n) continue;
      float c[width] = {}, result[width];
      [[maybe_unused]] float g[width] = {}, second[width];
      if constexpr (Rule::kReadsC) unpack(others.c[half][j / instructions], c);
      if constexpr (kMakesCotangents<Rule>) unpack(others.g[half][j / instructions], g);
#pragma unroll
      for (int v = 0; v < width; ++v) {
        const int of = j + v / 2, at = half * 2 + v % 2;
        const float t = fmaf(sums[0][of][at], scale_of<Rule, exactness>(0), bias[0][of][v % 2]);
        const float t2 = fmaf(sums[last][of][at], scale_of<Rule, exactness>(last), bias[last][of][v % 2]);
        if constexpr (kMakesCotangents<Rule>) {
          Rule::template backward<exactness>(g[v], t, t2, c[v], p.c_is_y, result[v], second[v]);
        } else {
          result[v] = Rule::template value<exactness>(t, t2, c[v]);
        }
      }
      store<D, width>(p.d + row * p.d_stride + column, pack<D, width>(result));
      if constexpr (kMakesCotangents<Rule>) {
        if (p.d2 != nullptr) store<V, width>(p.d2 + row * p.d2_stride + column, pack<V, width>(second));
      }
    }
  }
}

/// The rows of all tensors are aligned to 16 bytes, or those of w to 4 if X is float; n is a multiple of
/// kVectorSize<V>.
template <class Rule, class T, ResidentTiling tiling, class X = T, class V = T>
__global__ void __launch_bounds__(kSm80Threads, kResidentSpec<tiling>.ctas)
    sm80_resident_kernel(const ResidentArguments<Rule, T, X, V> p) {
  static_assert(sizeof(T) == 2 && kResidentSpec<tiling>.tile_n(Rule::kProducts) >= kSm80LeastColumns);
  constexpr ResidentSpec spec = kResidentSpec<tiling>;
  constexpr int products = Rule::kProducts, tile_n = spec.tile_n(products), warp_n = kResidentWarpRows / products;
  constexpr int warps = spec.group_warps(), groups = spec.groups(), stages = spec.stages, width = kVectorSize<V>;
  constexpr int in_m = spec.rows / 16, in_n = warp_n / 8;
  using Copies = RowCopies<X, spec.rows, warps, stages>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t w = shared_address(shared);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp / warps, of_n = warp % warps, steps = (p.k + Copies::kStep - 1) / Copies::kStep;
  const int first_column = static_cast<int>(blockIdx.x) % p.tiles_n * tile_n;
  // Groups take turns, and so do CTAs with the same columns.
  const int stride = static_cast<int>(gridDim.x) / p.tiles_n * groups;
  const int first_tile = static_cast<int>(blockIdx.x) / p.tiles_n * groups + group;
  const int tiles = (p.m + spec.rows - 1) / spec.rows;
  const uint32_t buffers = w + static_cast<uint32_t>(spec.w_bytes(p.k) + group * stages * spec.buffer_bytes());

  Copies copies(p.a, p.a_stride, p.m, p.k, first_tile, tiles, stride, buffers);
  copy_weights(p, spec, w, first_column);
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) copies.start();
  const int first_of_lane = first_column + of_n * warp_n + lane % 4 * width;
  float bias[products][in_n][2];
  read_biases<Rule, kExactnessOf<V>, width>(p, first_of_lane, bias);
  wait_for_copies_before<stages - 2>();
  __syncthreads();  // w is there

  const int b_row = of_n * warp_n + lane % 8 + lane / 16 * 8, b_piece = lane / 8 % 2;
  int slot = 0;
  for (int tile = first_tile; tile < tiles; tile += stride) {
    const int row = tile * spec.rows + lane / 4;
    RuleInputs<Rule, V, in_n * 2 / width> next;
    next.read(p, row, first_of_lane);  // it arrives during the products
    float sums[in_m][products][in_n][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies_before<stages - 2>();
      wait_for_group<warps>(group);  // this step's rows are there, and those of the step before were read
      copies.start();
      const uint32_t a_step = buffers + static_cast<uint32_t>(slot * spec.buffer_bytes());
      const int first_of_w = step * Copies::kStep;
      const uint32_t w_step = w + static_cast<uint32_t>(first_of_w / kResidentStep * spec.w_step_bytes());
#pragma unroll
      for (int k16 = 0; k16 < Copies::kStep / 16; ++k16) {
        const int piece = (first_of_w % kResidentStep / 8 + k16 * 2) + b_piece;
        uint32_t a[in_m][4];
#pragma unroll
        for (int i = 0; i < in_m; ++i) load_rows<T, X>(a[i], a_step, i * 16, k16);
#pragma unroll
        for (int of = 0; of < products; ++of) {
#pragma unroll
          for (int j = 0; j < in_n; j += 2) {
            uint32_t b[4];
            load_matrices(b, w_step + place<kResidentStep>(of * tile_n + b_row + j * 8, piece * 8));
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
      const RuleInputs<Rule, V, in_n * 2 / width> others = next;
      if (i + 1 < in_m) next.read(p, row + (i + 1) * 16, first_of_lane);
      write_rows<Rule, T, X, V, in_n>(p, sums[i], bias, others, row + i * 16, first_of_lane);
    }
  }
}

}  // namespace torchops::cuda::gemm
