#pragma once

// The rule's value of its products. The two products leave the registers only if they are wanted too: rounded, and with
// their biases. Other inputs of a rule arrive by TMA, while the products run, at the place that the result leaves from.

#include "cuda/gemm/sm90/products/streamed_weights.cuh"

namespace torchops::cuda::gemm {

template <class Rule, class Tile_>
struct ValueEpilogue {
  using Tile = Tile_;
  using Element = typename Tile::Element;
  using Bias = StreamedBias<Rule, Tile>;
  static constexpr int kRows = Tile::kRows, kN = Tile::kN;
  static constexpr bool kReadsC = Rule::kReadsC;
  static_assert((Rule::kProducts == 2) != kReadsC);

  struct Shared {
    typename Tile::SharedRows result;  // c before that, if the rule reads it
    typename Bias::Shared bias;
    LoadBarrier<> loaded;

    CUTLASS_DEVICE void init() { loaded.init(); }
  };
  struct Parameters {
    TileMap<cute::SM90_TMA_LOAD, Element, kRows, kN> c;         // a copy of d's if the rule reads none
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kN> d, z[2];  // z: copies of d's if not wanted
    bool writes_z;
    typename Bias::Pointers bias;
  };

  CUTLASS_DEVICE ValueEpilogue(const Parameters& p, Shared& shared, int n, int thread)
      : p_(p), shared_(shared), n_(n), thread_(thread) {}

  CUTLASS_DEVICE void begin(int row, int column) {
    row_ = row;
    column_ = column;
    if constexpr (kReadsC) {
      end();
      if (thread_ == 0) {
        shared_.loaded.arrive_and_expect_tx(sizeof(shared_.result));
        p_.c.load(shared_.result.data(), row, column, shared_.loaded);
      }
    }
    bias_.read(p_.bias, n_, column, thread_);
  }

  CUTLASS_DEVICE void share() {
    bias_.share(shared_.bias, thread_);
    if constexpr (!kReadsC) end();  // the store of the previous result
  }

  template <class Sums, class Sync>
  CUTLASS_DEVICE void finish(const Sums& sums, const Sync& sync) {
    if constexpr (kReadsC) {
      shared_.loaded.wait(phase_);
      phase_ ^= 1;
    } else if (p_.writes_z) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        write(sums, sync, p_.z[i], [i](float z, float t, float) { return i == 0 ? z : t * (1.f / Rule::scale(1)); });
        end();
        sync();
      }
    }
    write(sums, sync, p_.d, Rule::template value<Tile::kExactness>);
  }

  CUTLASS_DEVICE void end() {
    if (thread_ == 0) cute::tma_store_wait<0>();
  }

 private:
  // Writes f(z, t, c) of all sums to `to`; t is from the second product.
  template <class Sums, class Sync, class Map, class F>
  CUTLASS_DEVICE void write(const Sums& sums, const Sync& sync, const Map& to, const F& f) {
    using namespace cute;
    // In boxes of 64 columns, so that few registers are needed besides the sums.
    using Box = Shape<Int<kRows>, _64>;
    const typename Tile::template ProductOf<64> box_of;
    const auto read = make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, box_of);
    const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, box_of);
    const auto read_slice = read.get_slice(thread_);
    const auto write_slice = write.get_slice(thread_);
    const Tensor places = box_of.get_slice(thread_).partition_C(make_identity_tensor(Box{}));
    const cutlass::NumericArrayConverter<Element, float, 2> converted;
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < kN / 64; ++box) {
      const Tensor in_box = as_position_independent_swizzle_tensor(
          make_tensor(make_smem_ptr(shared_.result.data() + box * kRows * 64), SwizzledRows<Element, kRows, 64>{}));
      Tensor result = make_tensor_like<Element>(partition_fragment_C(box_of, Box{}));
      // A warp reads and writes only its own rows.
      if constexpr (kReadsC) copy(read, read_slice.partition_S(in_box), read_slice.retile_D(result));
      Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < 8; ++block) {  // a thread has pairs of neighbouring columns, in two rows of 16
        const int column = box * 64 + get<1>(places(make_coord(make_coord(0, 0, block), 0, 0)));
        const int block_of_tile = box * 8 + block;
        const float2 bias = *reinterpret_cast<const float2*>(&shared_.bias.at[0][column]);
        float2 second_bias = make_float2(0.f, 0.f);
        if constexpr (!kReadsC) second_bias = *reinterpret_cast<const float2*>(&shared_.bias.at[1][column]);
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kRows / 64; ++m) {
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            cutlass::Array<float, 2> values;
            CUTLASS_PRAGMA_UNROLL
            for (int v = 0; v < 2; ++v) {
              const float z = fmaf(Rule::scale(0), sums(make_coord(make_coord(v, r, block_of_tile), m, 0)),
                                   v == 0 ? bias.x : bias.y);
              float t = 0.f, c = 0.f;
              if constexpr (kReadsC) {
                c = static_cast<float>(result(make_coord(make_coord(v, r, block), m, 0)));
              } else {
                t = fmaf(Rule::scale(1), sums(make_coord(make_coord(v, r, block_of_tile + kN / 8), m, 0)),
                         v == 0 ? second_bias.x : second_bias.y);
              }
              values[v] = f(z, t, c);
            }
            pairs(make_coord(make_coord(0, r, block), m, 0)) = converted(values);
          }
        }
      }
      copy(write, write_slice.retile_S(result), write_slice.partition_D(in_box));
    }
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread_ == 0) to.store(shared_.result.data(), row_, column_);
  }

  const Parameters& p_;
  Shared& shared_;
  Bias bias_;
  int n_, thread_, row_ = 0, column_ = 0;
  uint32_t phase_ = 0;
};

/// d = the rule's value for a @ b.T and, if it has them, for a @ b2.T and c; also z and z2, if they are wanted. d may
/// be c.
template <class Rule>
struct Streamed {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Epilogue = ValueEpilogue<Rule, StreamedTile<T, tiling, Rule::kProducts>>;
    using Launch = StreamedLaunch<StreamedKernel<Epilogue>>;

    static Status prepare(const Problem& p, int64_t&) {
      return p.batch > 1 || p.k == 0 ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const Problem& p, cudaStream_t stream) {
      const bool writes_z = p.z.data != nullptr;
      return Launch::run(p.m, p.n, p.k, p.a, p.b, p.b2, stream, [&](auto& epilogue, TileMaps& maps) {
        maps(epilogue.c, Rule::kReadsC ? p.c : p.d, p.m, p.n);
        maps(epilogue.d, p.d, p.m, p.n);
        maps(epilogue.z, writes_z ? p.z : p.d, writes_z ? p.z2 : p.d, p.m, p.n);
        epilogue.writes_z = writes_z;
        epilogue.bias[0] = static_cast<const T*>(p.bias);
        epilogue.bias[1] = static_cast<const T*>(p.bias2);
      });
    }
  };
};

/// The same for a rule of one product, in the tilings that leave threads room for the rule's other inputs.
template <class Rule>
using StreamedSingle = Streamed<Rule>;

}  // namespace torchops::cuda::gemm
