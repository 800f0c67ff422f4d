#pragma once

// All gradients of dense in one pass over the rows, for few columns.
//
// As a pass that makes dz and two GEMMs, the backward pass reads or writes m rows seven times: grad, y and dz, dz and
// dx, dz and x. With so few columns that is all of its time. Here a CTA keeps w in shared memory and its sums of dw in
// registers, so that a tile of rows passes through once: grad, y and x in, dx out. Measured on an H100, bfloat16,
// (1048576, 128) to 128 features: 371 us, 2.89 TB/s, where the pass and two products of cuBLAS take 690; from 128 to
// 256 features 616 instead of 1144, from 256 to 128 587 instead of 876.
//
//   load warp    grad, y, x -> a stage of shared memory, by the copy engine, several stages ahead
//   consumers    dz = grad * y * (1 - y), written over grad;  dx = dz @ w, written over y (over x where k > n);
//                dw += dz.T @ x;  db += dz
//   store warp   dx -> device memory, by the copy engine; then the stage is free
//
// At the end each CTA writes its dw and db, and a second kernel adds those in the order of the CTAs. Rows and columns
// beyond the matrices arrive as zeros from the copy engine, which also leaves them out of what it stores.

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>

#include <array>
#include <atomic>
#include <cute/algorithm/gemm.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "cuda/gemm/dense_backward.h"
#include "cuda/gemm/element.cuh"

namespace torchops::cuda::gemm {

/// What the kernel needs at compile time, for at most tile_n x tile_k elements of w.
template <class Element_, int tile_n, int tile_k>
struct BackwardTiling {
  using Element = Element_;
  static constexpr int kRows = kDenseBackwardRows, kN = tile_n, kK = tile_k;
  static constexpr int kConsumers = 256, kLoadWarp = kConsumers / 32, kStoreWarp = kLoadWarp + 1;
  static constexpr int kThreads = kConsumers + 128;  // whole warpgroups, of which two warps work
  static constexpr int kStageBytes = kRows * (2 * kN + kK) * static_cast<int>(sizeof(Element));
  static constexpr int kWeightBytes = kN * kK * static_cast<int>(sizeof(Element));
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kStages = (227 * 1024 - kBarrierBytes - kWeightBytes) / kStageBytes;
  static constexpr bool kResultOverY = kK <= kN;

  /// A matrix in boxes of 64 columns, each with its rows of 128 bytes in the swizzle of that width, as the copy engine
  /// delivers them; and the same bytes as the transposed matrix.
  template <int rows, int columns>
  using Rows = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                            cute::Shape<cute::Int<rows>, cute::Int<columns>>{}));
  template <int rows, int columns>
  using Transposed = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                  cute::Shape<cute::Int<columns>, cute::Int<rows>>{},
                                                  cute::Step<cute::_2, cute::_1>{}));

  /// The two warpgroups divide dx by its columns and dw by its rows.
  template <int m, int n, int k, cute::GMMA::Major major_a>
  using Product = decltype(cute::GMMA::ss_op_selector<Element, Element, float,
                                                      cute::Shape<cute::Int<m>, cute::Int<n>, cute::Int<k>>, major_a,
                                                      cute::GMMA::Major::MN>());
  using ProductX = decltype(cute::make_tiled_mma(Product<kRows, kK / 2, kN, cute::GMMA::Major::K>{},
                                                 cute::Layout<cute::Shape<cute::_1, cute::_2, cute::_1>>{}));
  using ProductW = decltype(cute::make_tiled_mma(Product<kN, kK, kRows, cute::GMMA::Major::MN>{},
                                                 cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));

  struct Shared {
    struct Stage {
      cute::array_aligned<Element, kRows * kN, 1024> grad, y;
      cute::array_aligned<Element, kRows * kK, 1024> x;
    };
    cute::array_aligned<Element, kN * kK, 1024> w;
    Stage stages[kStages];
    cutlass::arch::ClusterTransactionBarrier w_loaded, loaded[kStages];
    cutlass::arch::ClusterBarrier computed[kStages], stored[kStages];
  };
  static_assert(sizeof(Shared) <= 227 * 1024);

  using Matrix = cute::Layout<cute::Shape<int, int>, cute::Stride<int64_t, cute::_1>>;
  using Global = decltype(cute::make_tensor(cute::make_gmem_ptr(static_cast<Element*>(nullptr)), Matrix{}));
  template <class Copy, int rows, int columns>
  using Map = decltype(cute::make_tma_copy(Copy{}, std::declval<Global>(), Rows<rows, columns>{}));
  struct Parameters {
    Map<cute::SM90_TMA_LOAD, kRows, kN> grad, y;
    Map<cute::SM90_TMA_LOAD, kRows, kK> x;
    Map<cute::SM90_TMA_LOAD, kN, kK> w;
    Map<cute::SM90_TMA_STORE, kRows, kK> dx;
    float* partial;
    int m, n, k;
  };
};

/// A stage, and how often the ring of them has been passed through.
template <int stages>
struct StageCounter {
  int index = 0;
  uint32_t phase = 0;
  CUTLASS_DEVICE void advance() {
    if (++index == stages) index = 0, phase ^= 1;
  }
};

/// A tile of `rows` rows of an m x columns matrix between device memory and `shared`, asked for by one thread.
template <int rows, int columns, class Tiling, class Map>
CUTLASS_DEVICE void load_rows(const Map& map, typename Tiling::Element* shared, int m, int width, int tile,
                              cutlass::arch::ClusterTransactionBarrier& barrier) {
  using namespace cute;
  const Tensor matrix = map.get_tma_tensor(make_shape(m, width));
  const Tensor from = local_tile(matrix, Shape<Int<rows>, Int<columns>>{}, make_coord(tile, 0));
  const Tensor to = make_tensor(make_smem_ptr(shared), typename Tiling::template Rows<rows, columns>{});
  const auto slice = map.get_slice(0);
  copy(map.with(reinterpret_cast<uint64_t&>(barrier)), slice.partition_S(from), slice.partition_D(to));
}

template <class Tiling>
CUTLASS_DEVICE void load_tiles(const typename Tiling::Parameters& p, typename Tiling::Shared& shared, int tiles) {
  constexpr int rows = Tiling::kRows;
  shared.w_loaded.arrive_and_expect_tx(Tiling::kWeightBytes);
  load_rows<Tiling::kN, Tiling::kK, Tiling>(p.w, shared.w.data(), p.n, p.k, 0, shared.w_loaded);
  StageCounter<Tiling::kStages> at;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, at.advance()) {
    auto& stage = shared.stages[at.index];
    auto& loaded = shared.loaded[at.index];
    shared.stored[at.index].wait(at.phase ^ 1);  // at once in the first round
    loaded.arrive_and_expect_tx(Tiling::kStageBytes);
    load_rows<rows, Tiling::kN, Tiling>(p.grad, stage.grad.data(), p.m, p.n, tile, loaded);
    load_rows<rows, Tiling::kN, Tiling>(p.y, stage.y.data(), p.m, p.n, tile, loaded);
    load_rows<rows, Tiling::kK, Tiling>(p.x, stage.x.data(), p.m, p.k, tile, loaded);
  }
}

template <class Tiling>
CUTLASS_DEVICE void store_tiles(const typename Tiling::Parameters& p, typename Tiling::Shared& shared, int tiles) {
  using namespace cute;
  using Tile = Shape<Int<Tiling::kRows>, Int<Tiling::kK>>;
  const Tensor matrix = p.dx.get_tma_tensor(make_shape(p.m, p.k));
  const auto slice = p.dx.get_slice(0);
  StageCounter<Tiling::kStages> at;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, at.advance()) {
    auto& stage = shared.stages[at.index];
    shared.computed[at.index].wait(at.phase);
    const Tensor from = make_tensor(make_smem_ptr(Tiling::kResultOverY ? stage.y.data() : stage.x.data()),
                                    typename Tiling::template Rows<Tiling::kRows, Tiling::kK>{});
    copy(p.dx, slice.partition_S(from), slice.partition_D(local_tile(matrix, Tile{}, make_coord(tile, 0))));
    tma_store_arrive();
    tma_store_wait<0>();
    shared.stored[at.index].arrive();
  }
}

/// dz, written over grad, by all consumers. A thread has the same 8 columns of every kRowStep-th row; it adds them to
/// sums.
template <class Tiling>
CUTLASS_DEVICE void gate_tile(typename Tiling::Element* grad, const typename Tiling::Element* y, float (&sums)[8],
                              int thread) {
  using Element = typename Tiling::Element;
  using Vector = cutlass::AlignedArray<Element, 8>;
  constexpr int vectors = Tiling::kN / 8, row_step = Tiling::kConsumers / vectors, count = Tiling::kRows / row_step;
  static_assert(row_step % 8 == 0);
  // The swizzle: in row r of a box, the vector v lies at v ^ (r % 8).
  const int row = thread / vectors, vector = thread % vectors;
  const int first = vector / 8 * (Tiling::kRows * 64) + row * 64 + (vector % 8 ^ row % 8) * 8;
  Vector g[count], s[count];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < count; ++i) {
    g[i] = *reinterpret_cast<const Vector*>(grad + first + i * row_step * 64);
    s[i] = *reinterpret_cast<const Vector*>(y + first + i * row_step * 64);
  }
  const cutlass::NumericArrayConverter<float, Element, 8> widen;
  const cutlass::NumericArrayConverter<Element, float, 8> round;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < count; ++i) {
    auto products = widen(g[i]);
    const auto sigmoids = widen(s[i]);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < 8; ++v) {
      products[v] = products[v] * sigmoids[v] * (1.f - sigmoids[v]);
      sums[v] += products[v];
    }
    static_cast<cutlass::Array<Element, 8>&>(g[i]) = round(products);
    *reinterpret_cast<Vector*>(grad + first + i * row_step * 64) = g[i];
  }
}

/// The sums of db of all consumers, added in the order of their rows, to `to`. scratch has room for 8 floats each.
template <class Tiling>
CUTLASS_DEVICE void write_bias_sums(const float (&sums)[8], float* scratch, float* to, int n, int thread) {
  constexpr int height = Tiling::kConsumers / (Tiling::kN / 8);
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < 8; ++v) scratch[thread * 8 + v] = sums[v];
  cutlass::arch::NamedBarrier::sync(Tiling::kConsumers, 1);
  if (thread >= n) return;
  float sum = 0.f;
  for (int row = 0; row < height; ++row) sum += scratch[row * Tiling::kN + thread];
  to[thread] = sum;
}

template <class Tiling>
CUTLASS_DEVICE void compute_tiles(const typename Tiling::Parameters& p, typename Tiling::Shared& shared, int tiles) {
  using namespace cute;
  using Element = typename Tiling::Element;
  constexpr int rows = Tiling::kRows, n = Tiling::kN, k = Tiling::kK;
  const int thread = threadIdx.x;
  // Descriptors are the same for a warpgroup, and the compiler should know it.
  const int leader = __shfl_sync(~0u, thread / 128, 0) * 128;

  typename Tiling::ProductX product_x;
  typename Tiling::ProductW product_w;
  const auto slice_x = product_x.get_slice(leader);
  const auto slice_w = product_w.get_slice(leader);
  Tensor sums_x = partition_fragment_C(product_x, Shape<Int<rows>, Int<k>>{});
  Tensor sums_w = partition_fragment_C(product_w, Shape<Int<n>, Int<k>>{});
  const Tensor weight =
      make_tensor(make_smem_ptr(shared.w.data()), typename Tiling::template Transposed<n, k>{});  // (k, n)
  const Tensor b_x = slice_x.make_fragment_B(slice_x.partition_B(weight));
  const auto write_result = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_x);
  const auto write_slice = write_result.get_slice(thread);
  clear(sums_w);
  float sums_b[8] = {};

  shared.w_loaded.wait(0);
  StageCounter<Tiling::kStages> at;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, at.advance()) {
    auto& stage = shared.stages[at.index];
    shared.loaded[at.index].wait(at.phase);
    gate_tile<Tiling>(stage.grad.data(), stage.y.data(), sums_b, thread);
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(Tiling::kConsumers, 0);

    const auto dz = make_smem_ptr(stage.grad.data());
    const Tensor a_x =
        slice_x.make_fragment_A(slice_x.partition_A(make_tensor(dz, typename Tiling::template Rows<rows, n>{})));
    const Tensor a_w =
        slice_w.make_fragment_A(slice_w.partition_A(make_tensor(dz, typename Tiling::template Transposed<rows, n>{})));
    const Tensor b_w = slice_w.make_fragment_B(slice_w.partition_B(
        make_tensor(make_smem_ptr(stage.x.data()), typename Tiling::template Transposed<rows, k>{})));
    warpgroup_fence_operand(sums_x);
    warpgroup_fence_operand(sums_w);
    warpgroup_arrive();
    product_x.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(a_x); ++block) {
      cute::gemm(product_x, a_x(_, _, block), b_x(_, _, block), sums_x);
      product_x.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(a_w); ++block) {
      cute::gemm(product_w, a_w(_, _, block), b_w(_, _, block), sums_w);
    }
    warpgroup_commit_batch();

    if constexpr (Tiling::kResultOverY) {
      warpgroup_wait<1>();  // dx goes to memory while the products of dw run
      warpgroup_fence_operand(sums_x);
    } else {
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums_x);
      cutlass::arch::NamedBarrier::sync(Tiling::kConsumers, 0);  // both warpgroups are done with x
    }
    Tensor result = make_tensor_like<Element>(sums_x);
    const cutlass::NumericArrayConverter<Element, float, decltype(size(sums_x))::value> round;
    recast<cutlass::Array<Element, decltype(size(sums_x))::value>>(result)(0) =
        round(recast<cutlass::Array<float, decltype(size(sums_x))::value>>(sums_x)(0));
    const Tensor to = make_tensor(make_smem_ptr(Tiling::kResultOverY ? stage.y.data() : stage.x.data()),
                                  typename Tiling::template Rows<rows, k>{});
    copy(write_result, write_slice.retile_S(result),
         write_slice.partition_D(as_position_independent_swizzle_tensor(to)));
    cutlass::arch::fence_view_async_shared();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums_w);
    shared.computed[at.index].arrive();
  }

  float* const partial = p.partial + int64_t{blockIdx.x} * (p.n * p.k + p.n);
  const Tensor places = product_w.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<n>, Int<k>>{}));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(sums_w); i += 2) {  // a thread has pairs of neighbouring columns
    const auto [row, column] = places(i);
    if (row < p.n && column < p.k) {
      *reinterpret_cast<float2*>(partial + row * p.k + column) = make_float2(sums_w(i), sums_w(i + 1));
    }
  }
  // No product reads w any more once all consumers are here.
  cutlass::arch::NamedBarrier::sync(Tiling::kConsumers, 0);
  write_bias_sums<Tiling>(sums_b, reinterpret_cast<float*>(shared.w.data()), partial + p.n * p.k, p.n, thread);
}

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, 1)
    dense_backward_kernel(const __grid_constant__ typename Tiling::Parameters p) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<typename Tiling::Shared*>(bytes);
  if (threadIdx.x == 0) {
    shared.w_loaded.init(1);
    for (int stage = 0; stage < Tiling::kStages; ++stage) {
      shared.loaded[stage].init(1);
      shared.computed[stage].init(Tiling::kConsumers);
      shared.stored[stage].init(1);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int tiles = p.m / Tiling::kRows + (p.m % Tiling::kRows != 0);
  // The sums of dw need more registers than there are for each of 384 threads; whole warpgroups give and take them.
  if (warp >= Tiling::kLoadWarp) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == Tiling::kLoadWarp && cute::elect_one_sync()) load_tiles<Tiling>(p, shared, tiles);
    if (warp == Tiling::kStoreWarp && cute::elect_one_sync()) store_tiles<Tiling>(p, shared, tiles);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    compute_tiles<Tiling>(p, shared, tiles);
  }
}

constexpr int kPartialVectors = 32, kPartialRows = 16;

/// dw and db, one behind the other, from `count` rows of their partial sums. Each block of kPartialVectors x
/// kPartialRows threads makes 4 * kPartialVectors of them.
template <class Element>
__global__ void __launch_bounds__(kPartialVectors* kPartialRows)
    add_partial_kernel(const float* __restrict__ partial, Element* __restrict__ dw, Element* __restrict__ db, int count,
                       int weights, int columns) {
  __shared__ float4 shared[kPartialRows][kPartialVectors];
  const int column = (blockIdx.x * kPartialVectors + threadIdx.x) * 4;
  float4 sum{};
  const auto add = [&sum](const float4& other) {
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
  };
  if (column < columns) {
#pragma unroll 4
    for (int row = threadIdx.y; row < count; row += kPartialRows) {
      add(*reinterpret_cast<const float4*>(partial + int64_t{row} * columns + column));
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int row = 1; row < kPartialRows; ++row) add(shared[row][threadIdx.x]);
  const cutlass::NumericArrayConverter<Element, float, 4> round;
  const cutlass::Array<float, 4> sums{sum.x, sum.y, sum.z, sum.w};
  Element* const to = column < weights ? dw + column : db + (column - weights);
  static_cast<cutlass::Array<Element, 4>&>(*reinterpret_cast<cutlass::AlignedArray<Element, 4>*>(to)) = round(sums);
}

/// Whether the current device has room for the kernel's shared memory, which is then granted. Asked once per device.
template <class Tiling>
bool grant_shared_memory() {
  constexpr int most_devices = 64;
  static std::array<std::atomic<int>, most_devices> cache{};  // 1: no, 2: yes; 0 is "not asked yet"
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= most_devices) return false;
  if (const int known = cache[device].load(std::memory_order_acquire)) return known == 2;
  const bool granted = cudaFuncSetAttribute(dense_backward_kernel<Tiling>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(sizeof(typename Tiling::Shared))) == cudaSuccess;
  if (!granted) cudaGetLastError();  // the caller goes another way: nothing is left to report
  cache[device].store(granted ? 2 : 1, std::memory_order_release);
  return granted;
}

template <DenseType type, int most_n, int most_k>
cudaError_t run_dense_backward(const DenseBackwardProblem& p, cudaStream_t stream) {
  using Element = typename DenseElement<type>::Type;
  using Tiling = BackwardTiling<Element, most_n, most_k>;
  using namespace cute;
  if (p.n > most_n || p.k > most_k || !grant_shared_memory<Tiling>()) return cudaErrorNotSupported;
  const auto matrix = [](const void* data, int rows, int columns, int64_t stride) {
    auto* const elements = static_cast<Element*>(const_cast<void*>(data));  // a copy has one type for both directions
    return make_tensor(make_gmem_ptr(elements), make_layout(make_shape(rows, columns), make_stride(stride, _1{})));
  };
  using RowsN = typename Tiling::template Rows<Tiling::kRows, most_n>;
  using RowsK = typename Tiling::template Rows<Tiling::kRows, most_k>;
  using Weight = typename Tiling::template Rows<most_n, most_k>;
  const typename Tiling::Parameters parameters{
      make_tma_copy(SM90_TMA_LOAD{}, matrix(p.grad, p.m, p.n, p.grad_stride), RowsN{}),
      make_tma_copy(SM90_TMA_LOAD{}, matrix(p.y, p.m, p.n, p.y_stride), RowsN{}),
      make_tma_copy(SM90_TMA_LOAD{}, matrix(p.x, p.m, p.k, p.x_stride), RowsK{}),
      make_tma_copy(SM90_TMA_LOAD{}, matrix(p.w, p.n, p.k, p.w_stride), Weight{}),
      make_tma_copy(SM90_TMA_STORE{}, matrix(p.dx, p.m, p.k, p.k), RowsK{}),
      p.partial,
      p.m,
      p.n,
      p.k};
  dense_backward_kernel<Tiling><<<p.blocks, Tiling::kThreads, sizeof(typename Tiling::Shared), stream>>>(parameters);
  if (const cudaError_t error = cudaPeekAtLastError(); error != cudaSuccess) return error;
  const int weights = p.n * p.k, columns = weights + p.n;
  add_partial_kernel<Element>
      <<<(columns / 4 + kPartialVectors - 1) / kPartialVectors, dim3(kPartialVectors, kPartialRows), 0, stream>>>(
          p.partial, static_cast<Element*>(p.dw), static_cast<Element*>(p.db), p.blocks, weights, columns);
  return cudaPeekAtLastError();
}

}  // namespace torchops::cuda::gemm
