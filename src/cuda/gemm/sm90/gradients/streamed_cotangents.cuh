#pragma once

// The cotangents of a rule's products, which are recomputed from the rows: the first step of its gradients if the
// weights don't fit gradients/one_pass.cuh or gradients/gated.cuh.
//
// TMA loads the cotangent of the result while the products run, and stores the rule's results from the same place.
// Each warp sums the columns of a tile over its own rows, in float32; a second kernel adds those sums, in an order
// that depends only on the shape.

#include "cuda/base/column_sum.cuh"
#include "cuda/gemm/sm90/products/streamed_weights.cuh"

namespace torchops::cuda::gemm {

template <class Rule, class Tile_>
struct CotangentEpilogue {
  using Tile = Tile_;
  using Element = typename Tile::Element;
  using Bias = StreamedBias<Rule, Tile>;
  static constexpr int kRows = Tile::kRows, kN = Tile::kN, kProducts = Rule::kProducts;
  static constexpr int kLoadBytes = kRows * kN * Tile::kSize * (Rule::kReadsC ? 2 : 1);
  static constexpr int kWarps = 4;  // of a warpgroup, each with its own rows
  static_assert((kProducts == 2) != Rule::kReadsC);

  struct Shared {
    typename Tile::SharedRows first;   // grad, then the cotangent of the first product
    typename Tile::SharedRows second;  // c, then its cotangent; or the cotangent of the second product
    typename Bias::Shared bias;
    LoadBarrier<> loaded;

    CUTLASS_DEVICE void init() { loaded.init(); }
  };
  struct Parameters {
    TileMap<cute::SM90_TMA_LOAD, Element, kRows, kN> grad, c;  // c: a copy of grad's if the rule reads none
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kN> first, second;
    bool writes_second, c_is_y;
    typename Bias::Pointers bias;
    float* sums;  // for each warp of each tile, for each product: n; or null
  };

  CUTLASS_DEVICE CotangentEpilogue(const Parameters& p, Shared& shared, int n, int thread)
      : p_(p), shared_(shared), n_(n), thread_(thread) {}

  CUTLASS_DEVICE void begin(int row, int column) {
    row_ = row;
    column_ = column;
    if (thread_ == 0) {
      cute::tma_store_wait<0>();  // the store of the previous tile
      shared_.loaded.arrive_and_expect_tx(kLoadBytes);
      p_.grad.load(shared_.first.data(), row, column, shared_.loaded);
      if constexpr (Rule::kReadsC) p_.c.load(shared_.second.data(), row, column, shared_.loaded);
    }
    bias_.read(p_.bias, n_, column, thread_);
  }

  CUTLASS_DEVICE void share() { bias_.share(shared_.bias, thread_); }

  template <class Sums, class Sync>
  CUTLASS_DEVICE void finish(const Sums& sums, const Sync& sync);

  CUTLASS_DEVICE void end() {
    if (thread_ == 0) cute::tma_store_wait<0>();
  }

 private:
  const Parameters& p_;
  Shared& shared_;
  Bias bias_;
  int n_, thread_, row_ = 0, column_ = 0;
  uint32_t phase_ = 0;
};

template <class Rule, class Tile>
template <class Sums, class Sync>
CUTLASS_DEVICE void CotangentEpilogue<Rule, Tile>::finish(const Sums& sums, const Sync& sync) {
  using namespace cute;
  // In boxes of 64 columns and 64 rows, so that few registers are needed besides the sums.
  using Box = Shape<_64, _64>;
  const typename Tile::template ProductOf<64> box_of;
  const auto read = make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, box_of);
  const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, box_of);
  const auto read_slice = read.get_slice(thread_);
  const auto write_slice = write.get_slice(thread_);
  const auto in_box = [](typename Tile::SharedRows& rows, int box) {
    return as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(rows.data() + box * kRows * 64), SwizzledRows<Element, kRows, 64>{}));
  };
  const Tensor places = box_of.get_slice(thread_).partition_C(make_identity_tensor(Box{}));
  const cutlass::NumericArrayConverter<Element, float, 2> converted;

  shared_.loaded.wait(phase_);
  phase_ ^= 1;
  float columns[kProducts][kN / 4] = {};  // for this thread's pairs of columns, over its rows
  CUTLASS_PRAGMA_UNROLL
  for (int box = 0; box < kN / 64; ++box) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kRows / 64; ++m) {
      Tensor first = make_tensor_like<Element>(partition_fragment_C(box_of, Box{}));
      Tensor second = make_tensor_like<Element>(first);
      // A warp reads and writes only its own rows.
      copy(read, read_slice.partition_S(in_box(shared_.first, box))(_, m, _), read_slice.retile_D(first)(_, 0, _));
      if constexpr (Rule::kReadsC) {
        copy(read, read_slice.partition_S(in_box(shared_.second, box))(_, m, _), read_slice.retile_D(second)(_, 0, _));
      }
      Tensor first_pairs = recast<cutlass::Array<Element, 2>>(first);
      Tensor second_pairs = recast<cutlass::Array<Element, 2>>(second);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < 8; ++block) {  // a thread has pairs of neighbouring columns, in two rows of 16
        const int column = box * 64 + get<1>(places(make_coord(make_coord(0, 0, block), 0, 0)));
        const int block_of_tile = box * 8 + block;
        float2 bias[2];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kProducts; ++j) bias[j] = *reinterpret_cast<const float2*>(&shared_.bias.at[j][column]);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          cutlass::Array<float, 2> of_first, of_second;
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 2; ++v) {
            const auto at = make_coord(make_coord(v, r, block), 0, 0);
            const float z = fmaf(Rule::scale(0), sums(make_coord(make_coord(v, r, block_of_tile), m, 0)),
                                 v == 0 ? bias[0].x : bias[0].y);
            float t = 0.f;
            if constexpr (kProducts == 2) {
              t = fmaf(Rule::scale(1), sums(make_coord(make_coord(v, r, block_of_tile + kN / 8), m, 0)),
                       v == 0 ? bias[1].x : bias[1].y);
            }
            const float c = Rule::kReadsC ? static_cast<float>(second(at)) : 0.f;
            Rule::template backward<Tile::kExactness>(static_cast<float>(first(at)), z, t, c, p_.c_is_y, of_first[v],
                                                      of_second[v]);
            columns[0][2 * block_of_tile + v] += of_first[v];
            if constexpr (kProducts == 2) columns[kProducts - 1][2 * block_of_tile + v] += of_second[v];
          }
          first_pairs(make_coord(make_coord(0, r, block), 0, 0)) = converted(of_first);
          second_pairs(make_coord(make_coord(0, r, block), 0, 0)) = converted(of_second);
        }
      }
      copy(write, write_slice.retile_S(first)(_, 0, _), write_slice.partition_D(in_box(shared_.first, box))(_, m, _));
      copy(write, write_slice.retile_S(second)(_, 0, _), write_slice.partition_D(in_box(shared_.second, box))(_, m, _));
    }
  }
  cutlass::arch::fence_view_async_shared();
  sync();
  if (thread_ == 0) {
    p_.first.store(shared_.first.data(), row_, column_);
    if (p_.writes_second) p_.second.store(shared_.second.data(), row_, column_);
  }
  if (p_.sums == nullptr) return;
  // Lanes that are four apart have the same columns.
  float* const to = p_.sums + (int64_t{row_} * kWarps + thread_ / 32) * (int64_t{kProducts} * n_);
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < kProducts; ++j) {
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kN / 8; ++block) {
      float2 sum = make_float2(columns[j][2 * block], columns[j][2 * block + 1]);
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 4; distance < 32; distance *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, distance);
        sum.y += __shfl_xor_sync(~0u, sum.y, distance);
      }
      const int column = column_ * kN + block / 8 * 64 + get<1>(places(make_coord(make_coord(0, 0, block % 8), 0, 0)));
      if (thread_ % 32 < 4 && column < n_) *reinterpret_cast<float2*>(to + j * n_ + column) = sum;
    }
  }
}

/// From grad, x, the weights and, if the rule reads it, c: dz, and dz2 or dc, the second of which may be null; and
/// dbias and dbias2, if they are not null.
template <class Rule>
struct StreamedCotangents {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Epilogue = CotangentEpilogue<Rule, StreamedTile<T, tiling, Rule::kProducts>>;
    using Kernel = StreamedKernel<Epilogue>;
    using Launch = StreamedLaunch<Kernel>;
    static constexpr int kMostPieces = 64;  // of the rows of sums, each of which is added first

    static bool wants_sums(const GradientProblem& p) { return p.dbias != nullptr || p.dbias2 != nullptr; }
    static int64_t sum_rows(const GradientProblem& p) {
      return int64_t{Epilogue::kWarps} * divided(p.m, Kernel::kM) * (Kernel::kM / Kernel::kRows);
    }
    static int64_t sum_columns(const GradientProblem& p) { return int64_t{Rule::kProducts} * p.n; }

    static Status prepare(const GradientProblem& p, int64_t& workspace_bytes) {
      workspace_bytes = wants_sums(p) ? 4 * (sum_rows(p) + kMostPieces) * sum_columns(p) : 0;
      return p.k == 0 ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const GradientProblem& p, cudaStream_t stream) {
      const Operand second = Rule::kReadsC ? Operand{p.dc, p.n, 0} : p.dz2;
      const bool writes_second = second.data != nullptr;
      float* const sums = static_cast<float*>(p.workspace);
      const Status status = Launch::run(p.m, p.n, p.k, p.x, p.w, p.w2, stream, [&](auto& epilogue, TileMaps& maps) {
        maps(epilogue.grad, p.grad, p.m, p.n);
        maps(epilogue.c, Rule::kReadsC ? p.c_or_y() : p.grad, p.m, p.n);
        maps(epilogue.first, p.dz, p.m, p.n);
        maps(epilogue.second, writes_second ? second : p.dz, p.m, p.n);
        epilogue.writes_second = writes_second;
        epilogue.c_is_y = p.has_y_for_c();
        epilogue.bias[0] = static_cast<const T*>(p.bias);
        epilogue.bias[1] = static_cast<const T*>(p.bias2);
        epilogue.sums = wants_sums(p) ? sums : nullptr;
      });
      if (!status.done() || !wants_sums(p)) return status;
      launch_column_sum_in_pieces<T>(sums, static_cast<T*>(p.dbias), static_cast<T*>(p.dbias2), sum_rows(p), p.n,
                                     sum_columns(p), kMostPieces, stream);
      return Status::of(cudaGetLastError());
    }
  };
};

}  // namespace torchops::cuda::gemm
