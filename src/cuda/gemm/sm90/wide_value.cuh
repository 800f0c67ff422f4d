#pragma once

// The rule's value of two products. They leave the registers only where they are wanted too: rounded, and with their
// biases.

#include "cuda/gemm/sm90/wide.cuh"

namespace torchops::cuda::gemm {

template <class Rule, class Tile_>
struct ValueEpilogue {
  using Tile = Tile_;
  using Element = typename Tile::Element;
  using Bias = WideBias<Rule, Tile>;
  static constexpr int kRows = Tile::kRows, kN = Tile::kN;
  static_assert(Rule::kProducts == 2 && !Rule::kReadsC);

  struct Shared {
    typename Tile::SharedRows result;
    typename Bias::Shared bias;
  };
  struct Parameters {
    TileMap<cute::SM90_TMA_STORE, Element, kRows, kN> d, z[2];  // z: d where it is not wanted
    bool writes_z;
    typename Bias::Pointers bias;
  };

  CUTLASS_DEVICE static void init(Shared&) {}
  CUTLASS_DEVICE ValueEpilogue(const Parameters& p, Shared& shared, int n, int thread)
      : p_(p), shared_(shared), n_(n), thread_(thread) {}

  CUTLASS_DEVICE void begin(int row, int column) {
    row_ = row;
    column_ = column;
    bias_.read(p_.bias, n_, column, thread_);
  }

  CUTLASS_DEVICE void share() {
    bias_.share(shared_.bias, thread_);
    end();  // of the former result
  }

  template <class Sums, class Sync>
  CUTLASS_DEVICE void finish(const Sums& sums, const Sync& sync) {
    if (p_.writes_z) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        write(sums, sync, p_.z[i], [i](float z, float t) { return i == 0 ? z : t * (1.f / Rule::scale(1)); });
        end();
        sync();
      }
    }
    write(sums, sync, p_.d, [](float z, float t) { return Rule::template value<Tile::kExactness>(z, t, 0.f); });
  }

  CUTLASS_DEVICE void end() {
    if (thread_ == 0) cute::tma_store_wait<0>();
  }

 private:
  // f(z, t) of all pairs of sums, to `to`.
  template <class Sums, class Sync, class Map, class F>
  CUTLASS_DEVICE void write(const Sums& sums, const Sync& sync, const Map& to, const F& f) {
    using namespace cute;
    const typename Tile::Result result_of;
    const auto write = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, result_of);
    const auto write_slice = write.get_slice(thread_);
    const Tensor places = result_of.get_slice(thread_).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<kN>>{}));
    Tensor result = make_tensor_like<Element>(partition_fragment_C(result_of, Shape<Int<kRows>, Int<kN>>{}));
    const cutlass::NumericArrayConverter<Element, float, 2> converted;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kN / 8; ++block) {  // a thread has pairs of neighbouring columns, of two rows in 16
      const int column = get<1>(places(make_coord(make_coord(0, 0, block), 0, 0)));
      const float2 value_bias = *reinterpret_cast<const float2*>(&shared_.bias.at[0][column]);
      const float2 gate_bias = *reinterpret_cast<const float2*>(&shared_.bias.at[1][column]);
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kRows / 64; ++m) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          cutlass::Array<float, 2> values;
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 2; ++v) {
            const float z = sums(make_coord(make_coord(v, r, block), m, 0));
            const float t = sums(make_coord(make_coord(v, r, block + kN / 8), m, 0));
            values[v] = f(fmaf(Rule::scale(0), z, v == 0 ? value_bias.x : value_bias.y),
                          fmaf(Rule::scale(1), t, v == 0 ? gate_bias.x : gate_bias.y));
          }
          pairs(make_coord(make_coord(0, r, block), m, 0)) = converted(values);
        }
      }
    }
    copy(write, write_slice.retile_S(result), write_slice.partition_D(Tile::swizzled(shared_.result)));
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread_ == 0) to.store(shared_.result.data(), row_, column_);
  }

  const Parameters& p_;
  Shared& shared_;
  Bias bias_;
  int n_, thread_, row_ = 0, column_ = 0;
};

/// d = the rule's value of a @ b.T and a @ b2.T, and, where they are wanted, z and z2.
template <class Rule>
struct Wide {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Epilogue = ValueEpilogue<Rule, WideTile<T, tiling, Rule::kProducts>>;
    using Launch = WideLaunch<WideKernel<Epilogue>>;

    static Status prepare(const Problem& p, int64_t& workspace_bytes) {
      workspace_bytes = 0;
      return p.batch > 1 || p.k == 0 ? Status::not_for_me() : Launch::prepare();
    }

    static Status run(const Problem& p, cudaStream_t stream) {
      const bool writes_z = p.z.data != nullptr;
      const Operand &z = writes_z ? p.z : p.d, &z2 = writes_z ? p.z2 : p.d;
      if (!are_encodable<T>(p.a, p.b, p.b2, p.d, z, z2)) return Status::of(cudaErrorInvalidValue);
      typename Launch::Parameters parameters{};
      Launch::describe(parameters, p.m, p.n, p.k, p.a, p.b, p.b2);
      auto& epilogue = parameters.epilogue;
      epilogue.d = decltype(epilogue.d)::of(p.d.data, p.d.row_stride, p.m, p.n);
      epilogue.z[0] = decltype(epilogue.d)::of(z.data, z.row_stride, p.m, p.n);
      epilogue.z[1] = decltype(epilogue.d)::of(z2.data, z2.row_stride, p.m, p.n);
      epilogue.writes_z = writes_z;
      epilogue.bias[0] = static_cast<const T*>(p.bias);
      epilogue.bias[1] = static_cast<const T*>(p.bias2);
      if (!are_encoded(epilogue.d.map, epilogue.z[0].map, epilogue.z[1].map)) return Status::of(cudaErrorInvalidValue);
      return Status::of(Launch::run(parameters, stream));
    }
  };
};

}  // namespace torchops::cuda::gemm
