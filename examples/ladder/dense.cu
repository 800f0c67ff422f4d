// Steps 6 and 7 of docs/ladder.md: sigmoid(x @ w.T + b) for bfloat16 matrices without gaps, on the CUDA cores and on
// the tensor cores. No header of torch: steps.py compiles this file to PTX and launches it on torch's tensors.
//
// x: (rows, in), w: (out, in), b: (out,), y: (rows, out). Sums are float32. Tiles of y are numbered along its columns,
// so that blocks which run at the same time share rows of x in the L2 cache.
#include <cuda_bf16.h>
#include <cuda_pipeline.h>
#include <mma.h>

namespace {

using Element = __nv_bfloat16;
using nvcuda::wmma::accumulator;
using nvcuda::wmma::col_major;
using nvcuda::wmma::fragment;
using nvcuda::wmma::matrix_a;
using nvcuda::wmma::matrix_b;
using nvcuda::wmma::row_major;

__device__ float logistic(float z) { return 1.f / (1.f + __expf(-z)); }

}  // namespace

// --- CUDA cores ------------------------------------------------------------------------------------------------------

namespace {

constexpr int kTile = 64, kDepth = 16, kPerThread = 4;  // 256 threads, 4 x 4 sums each

// Rows of `from` (rows x depth) into a tile of which each k has its rows side by side; 0 beyond the matrix.
__device__ void load_tile(float (&tile)[kDepth][kTile + 1], const Element* from, long long first_row, long long rows,
                          long long first_k, long long depth) {
  for (int i = threadIdx.x; i < kTile * kDepth; i += blockDim.x) {
    const int row = i / kDepth, k = i % kDepth;
    const bool inside = first_row + row < rows && first_k + k < depth;
    tile[k][row] = inside ? __bfloat162float(from[(first_row + row) * depth + first_k + k]) : 0.f;
  }
}

}  // namespace

// A block of 256 threads makes a tile of 64 x 64. What one thread loads into shared memory is read by 16, and each of
// the 4 x 4 sums of a thread reuses its row and column from registers: 8 loads for 16 multiply-adds.
extern "C" __global__ void dense_cuda(const Element* __restrict__ x, const Element* __restrict__ w,
                                      const Element* __restrict__ b, Element* __restrict__ y, long long rows,
                                      long long in, long long out) {
  __shared__ float x_tile[kDepth][kTile + 1], w_tile[kDepth][kTile + 1];
  const long long tiles_across = (out + kTile - 1) / kTile;
  const long long first_row = blockIdx.x / tiles_across * kTile, first_column = blockIdx.x % tiles_across * kTile;
  const int row = threadIdx.x / (kTile / kPerThread), column = threadIdx.x % (kTile / kPerThread);

  float sums[kPerThread][kPerThread] = {};
  for (long long k = 0; k < in; k += kDepth) {
    load_tile(x_tile, x, first_row, rows, k, in);
    load_tile(w_tile, w, first_column, out, k, in);
    __syncthreads();
    for (int step = 0; step < kDepth; ++step) {
      float of_x[kPerThread], of_w[kPerThread];
      for (int i = 0; i < kPerThread; ++i) {
        of_x[i] = x_tile[step][row * kPerThread + i];
        of_w[i] = w_tile[step][column + i * (kTile / kPerThread)];
      }
      for (int i = 0; i < kPerThread; ++i) {
        for (int j = 0; j < kPerThread; ++j) sums[i][j] = fmaf(of_x[i], of_w[j], sums[i][j]);
      }
    }
    __syncthreads();  // everyone has read the tiles before they are overwritten
  }

  for (int i = 0; i < kPerThread; ++i) {
    for (int j = 0; j < kPerThread; ++j) {
      const long long r = first_row + row * kPerThread + i, c = first_column + column + j * (kTile / kPerThread);
      if (r < rows && c < out) y[r * out + c] = __float2bfloat16_rn(logistic(sums[i][j] + __bfloat162float(b[c])));
    }
  }
}

// --- tensor cores ----------------------------------------------------------------------------------------------------

namespace {

constexpr int kBlock = 128, kSlice = 32, kStages = 2, kPiece = 8;  // a piece: 16 bytes, as one thread copies them
constexpr int kStride = kSlice + kPiece;                           // rows of a tile start in different banks
constexpr int kFragment = 16, kWarpRows = 32, kWarpColumns = 64;   // 8 warps: 4 along rows, 2 along columns

struct Tiles {
  Element x[kBlock][kStride], w[kBlock][kStride];
};

// Queues the copy of 128 rows of a slice of k; what lies beyond the matrix is filled with 0.
__device__ void fetch(Element (&tile)[kBlock][kStride], const Element* from, long long first_row, long long rows,
                      long long first_k, long long depth) {
  constexpr int pieces = kSlice / kPiece;
  for (int i = threadIdx.x; i < kBlock * pieces; i += blockDim.x) {
    const long long row = first_row + i / pieces, k = first_k + i % pieces * kPiece;
    const bool inside = row < rows && k < depth;
    const Element* source = inside ? from + row * depth + k : from;
    __pipeline_memcpy_async(&tile[i / pieces][i % pieces * kPiece], source, 16, inside ? 0 : 16);
  }
}

}  // namespace

// A block of 8 warps makes a tile of 128 x 128. A warp instruction multiplies 16 x 16 x 16; while the tensor cores work
// on one slice of k, the next one is on its way to shared memory. Bias and sigmoid are applied to the sums before they
// are stored. `in` and `out` are multiples of 8, and all pointers of 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
    dense_tensor_cores(const Element* __restrict__ x, const Element* __restrict__ w, const Element* __restrict__ b,
                       Element* __restrict__ y, long long rows, long long in, long long out) {
  __shared__ __align__(128) Tiles stages[kStages];
  const long long tiles_across = (out + kBlock - 1) / kBlock;
  const long long first_row = blockIdx.x / tiles_across * kBlock, first_column = blockIdx.x % tiles_across * kBlock;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % (kBlock / kWarpRows) * kWarpRows;
  const int warp_column = warp / (kBlock / kWarpRows) * kWarpColumns;
  const long long slices = (in + kSlice - 1) / kSlice;

  const auto start = [&](long long slice) {
    if (slice < slices) {
      fetch(stages[slice % kStages].x, x, first_row, rows, slice * kSlice, in);
      fetch(stages[slice % kStages].w, w, first_column, out, slice * kSlice, in);
    }
    __pipeline_commit();  // empty at the end, so that the number of groups on their way is always the same
  };

  constexpr int down = kWarpRows / kFragment, across = kWarpColumns / kFragment;
  fragment<accumulator, kFragment, kFragment, kFragment, float> sums[down][across];
  for (auto& row : sums) {
    for (auto& sum : row) nvcuda::wmma::fill_fragment(sum, 0.f);
  }
  start(0);
  for (long long slice = 0; slice < slices; ++slice) {
    start(slice + 1);
    __pipeline_wait_prior(1);  // this slice has arrived, the next one may be on its way
    __syncthreads();
    const Tiles& tiles = stages[slice % kStages];
    for (int k = 0; k < kSlice; k += kFragment) {
      fragment<matrix_a, kFragment, kFragment, kFragment, Element, row_major> of_x[down];
      // w is stored as (out, in), so w.T has its columns side by side.
      fragment<matrix_b, kFragment, kFragment, kFragment, Element, col_major> of_w[across];
      for (int i = 0; i < down; ++i) {
        nvcuda::wmma::load_matrix_sync(of_x[i], &tiles.x[warp_row + i * kFragment][k], kStride);
      }
      for (int j = 0; j < across; ++j) {
        nvcuda::wmma::load_matrix_sync(of_w[j], &tiles.w[warp_column + j * kFragment][k], kStride);
      }
      for (int i = 0; i < down; ++i) {
        for (int j = 0; j < across; ++j) nvcuda::wmma::mma_sync(sums[i][j], of_x[i], of_w[j], sums[i][j]);
      }
    }
    __syncthreads();  // everyone has read the stage before it is overwritten
  }

  // Which lane holds which sum is the hardware's business, so a fragment goes through shared memory, where the tiles
  // are done with; then a lane has 8 neighbours, 16 bytes of y.
  __pipeline_wait_prior(0);
  float* const staged = reinterpret_cast<float*>(stages) + warp * kFragment * kFragment;
  const int of_row = lane / 2, of_column = lane % 2 * kPiece;
#pragma unroll  // fragments are registers, which have no index at run time
  for (int i = 0; i < down; ++i) {
#pragma unroll
    for (int j = 0; j < across; ++j) {
      nvcuda::wmma::store_matrix_sync(staged, sums[i][j], kFragment, nvcuda::wmma::mem_row_major);
      __syncwarp();
      const long long r = first_row + warp_row + i * kFragment + of_row;
      const long long c = first_column + warp_column + j * kFragment + of_column;
      if (r < rows && c < out) {
        uint4 words;
        auto* const elements = reinterpret_cast<Element*>(&words);
        for (int e = 0; e < kPiece; ++e) {
          const float z = staged[of_row * kFragment + of_column + e] + __bfloat162float(b[c + e]);
          elements[e] = __float2bfloat16_rn(logistic(z));
        }
        *reinterpret_cast<uint4*>(y + r * out + c) = words;
      }
      __syncwarp();
    }
  }
}
