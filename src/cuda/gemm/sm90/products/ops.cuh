#pragma once

// The operations: each is a mainloop and an epilogue, composed as its formula reads. table.def names them.

#include "cuda/gemm/sm90/products/epilogue.cuh"
#include "cuda/gemm/sm90/products/kernel.cuh"

namespace torchops::cuda::gemm {

inline int round_up(int value, int step) { return (value + step - 1) / step * step; }

/// d = F(a @ b.T + bias); the rows of b are contiguous.
template <class F>
struct Linear {
  template <Element element, Tiling tiling>
  struct With {
    using T = typename ElementOf<element>::Type;
    using Tile = cute::Shape<cute::Int<kSpec<tiling>.tile_m>, cute::Int<kSpec<tiling>.tile_n>,
                             cute::Int<128 / static_cast<int>(sizeof(T))>>;
    using Product = Gemm<T, tiling, /*b_k_major=*/true, Apply<F, T, Sum, Bias<Tile, T>>>;

    static Status prepare(const Problem& p, int64_t&) {
      constexpr int most_k = kSpec<tiling>.resident_k;
      if (most_k > 0 && (p.k > most_k || p.batch > 1)) return Status::not_for_me();
      int clusters = 0;
      return Product::grid_clusters(p.n, clusters);
    }

    static Status run(const Problem& p, cudaStream_t stream) {
      int clusters = 0;
      if (!are_encodable<T>(p.a, p.b, p.d)) return Status::of(cudaErrorInvalidValue);
      if (const Status status = Product::grid_clusters(p.n, clusters); !status.done()) return status;
      auto arguments = Product::arguments(p, clusters);
      arguments.epilogue.thread = {{{static_cast<const T*>(p.bias)}, {}, {}}, {}};
      if constexpr (kSpec<tiling>.resident_k > 0) {
        arguments.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongN;
      } else if constexpr (kSpec<tiling>.tile_n > kSpec<tiling>.tile_m) {
        arguments.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongN;
        arguments.scheduler.max_swizzle_size = swizzle(p);
      }
      return Product::launch(arguments, /*cooperative=*/false, stream);
    }

    // Tiles that are computed at the same time share more panels of a and b if they form squares of this side. The
    // scheduler rounds the counts of tiles up to multiples of it, and computes what it adds.
    static int swizzle(const Problem& p) {
      constexpr TilingSpec spec = kSpec<tiling>;
      const auto tiles = [&](int side) {
        const int rows = (p.m + spec.tile_m - 1) / spec.tile_m, columns = (p.n + spec.tile_n - 1) / spec.tile_n;
        return int64_t{round_up(rows, side * spec.cluster_m)} * round_up(columns, side * spec.cluster_n);
      };
      int side = 4;
      while (side > 1 && tiles(side) * 32 > tiles(1) * 33) side /= 2;
      return side;
    }
  };
};

/// a = a @ b, or with b_k_major a @ b.T, without a second buffer; d is a. The rows of b are contiguous. If a row has
/// several tiles, the workspace holds a counter for each panel of rows.
template <bool b_k_major>
struct Overwrite {
  template <Element element, Tiling tiling>
  struct With {
    static constexpr TilingSpec kTiling = kSpec<tiling>;
    using T = typename ElementOf<element>::Type;
    using Barrier = PanelBarrier<kTiling.schedule == Schedule::kPingPong ? 128 : 256>;
    using Product = Gemm<T, tiling, b_k_major, fusion::Sm90EVT<Barrier, Sum>>;

    static int tiles(const Problem& p) {
      return round_up((p.n + kTiling.tile_n - 1) / kTiling.tile_n, kTiling.cluster_n);
    }
    static int panels(const Problem& p) {
      return round_up((p.m + kTiling.tile_m - 1) / kTiling.tile_m, kTiling.cluster_m);
    }

    // Progress of the kernel must be guaranteed: see PanelBarrier.
    static Status prepare(const Problem& p, int64_t& workspace_bytes) {
      if (kTiling.resident_k > 0 && (p.k > kTiling.resident_k || p.batch > 1)) return Status::not_for_me();
      int clusters = 0;
      if (const Status status = Product::grid_clusters(p.n, clusters); !status.done()) return status;
      if (tiles(p) / kTiling.cluster_n > clusters) return Status::not_for_me();
      workspace_bytes = tiles(p) == 1 ? 0 : int64_t{4} * panels(p) * p.batch;
      return {};
    }

    static Status run(const Problem& p, cudaStream_t stream) {
      int64_t workspace_bytes = 0;
      int clusters = 0;
      if (!are_encodable<T>(p.a, p.b, p.d)) return Status::of(cudaErrorInvalidValue);
      if (const Status status = prepare(p, workspace_bytes); !status.done()) return status;
      if (const Status status = Product::grid_clusters(p.n, clusters); !status.done()) return status;
      if (workspace_bytes > 0) {
        const cudaError_t error = cudaMemsetAsync(p.workspace, 0, workspace_bytes, stream);
        if (error != cudaSuccess) return Status::of(error);
      }
      auto arguments = Product::arguments(p, clusters);
      arguments.epilogue.thread = {
          {}, {static_cast<unsigned*>(p.workspace), static_cast<unsigned>(tiles(p)), static_cast<unsigned>(panels(p))}};
      arguments.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongN;
      arguments.scheduler.max_swizzle_size = 1;
      return Product::launch(arguments, /*cooperative=*/workspace_bytes > 0, stream);
    }
  };
};

}  // namespace torchops::cuda::gemm
