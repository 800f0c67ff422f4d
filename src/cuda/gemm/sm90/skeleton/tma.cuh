#pragma once

// Tiles of whole rows between device memory and shared memory by TMA, for kernels written by hand.

#include <cutlass/arch/barrier.h>

#include <algorithm>
#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "cuda/gemm/sm90/skeleton/cutlass.cuh"

namespace torchops::cuda::gemm {

/// Each thread that has read what TMA is to overwrite, calls this before the arrival at a barrier that lets it. Alone,
/// the arrival may pass loads that the thread has started, because these and TMA reach shared memory by different ways
/// (proxies): while products keep shared memory busy, ldmatrix has found parts of the next tile. Products need no such
/// call, since they and TMA go the same way. Unlike CUTLASS's fence, this one keeps loads of C++ before it, too.
CUTLASS_DEVICE void finish_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Whether TMA supports these operands. What the driver would refuse, CUTLASS only asserts; asserts are compiled out
/// here, and it would launch with whatever the driver has left in the descriptor.
template <class Element, class... Operands>
bool are_encodable(const Operands&... operands) {
  const auto is_encodable = [](const Operand& operand) {
    constexpr int64_t size = sizeof(Element);
    return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && is_stride_of_tma(operand.row_stride, size) &&
           is_stride_of_tma(operand.batch_stride, size);
  };
  return (is_encodable(operands) && ...);
}

/// Whether the driver has encoded these descriptors for TMA. If the driver could not be called at all, they are zeros.
template <class... Copy>
bool are_encoded(const Copy&... copies) {
  const auto is_encoded = [](const cute::TmaDescriptor* descriptor) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(descriptor);
    return std::any_of(bytes, bytes + sizeof(*descriptor), [](unsigned char byte) { return byte != 0; });
  };
  return (is_encoded(copies.get_tma_descriptor()) && ...);
}

/// Fills the maps of a kernel's parameters, and knows whether TMA supports all of them and the driver has encoded their
/// descriptors.
class TileMaps {
 public:
  /// Map::of(from, sizes...)
  template <class Map, class... Sizes>
  void operator()(Map& map, const Operand& from, Sizes... sizes) {
    are_valid_ = are_valid_ && are_encodable<typename Map::Value>(from);
    if (!are_valid_) return;
    map = Map::of(from, sizes...);
    are_valid_ = are_encoded(map.map);
  }
  /// The same for the weights of as many products as there are maps.
  template <class Map, int products, class... Sizes>
  void operator()(Map (&maps)[products], const Operand& first, const Operand& second, Sizes... sizes) {
    for (int i = 0; i < products; ++i) (*this)(maps[i], i == 0 ? first : second, sizes...);
  }
  /// The same for a tensor of heads (attention/heads.cuh), which TMA supports.
  template <class Map>
  void operator()(Map& map, const HeadOperand& from, int height, int width, const int (&outer)[3]) {
    are_valid_ = are_valid_ && Map::of(map, from, height, width, outer);
  }
  bool are_valid() const { return are_valid_; }

 private:
  bool are_valid_ = true;
};

/// A matrix in boxes of 64 columns of 16 bits, or 32 of 32, whose rows of 128 bytes are swizzled at that width, as TMA
/// delivers them; and the same bytes as the transposed matrix.
template <class Element, int rows, int columns>
using SwizzledRows = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                                  cute::Shape<cute::Int<rows>, cute::Int<columns>>{}));
template <class Element, int rows, int columns>
using SwizzledTransposed =
    decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                 cute::Shape<cute::Int<columns>, cute::Int<rows>>{}, cute::Step<cute::_2, cute::_1>{}));

/// How TMA moves tiles of rows x columns of a matrix of `Element`; Copy is SM90_TMA_LOAD, SM90_TMA_LOAD_MULTICAST or
/// SM90_TMA_STORE.
template <class Copy, class Element, int rows, int columns>
struct TileMap {
  using Value = Element;
  using Matrix = cute::Layout<cute::Shape<int, int>, cute::Stride<int64_t, cute::_1>>;
  using Global = decltype(cute::make_tensor(cute::make_gmem_ptr(static_cast<Element*>(nullptr)), Matrix{}));
  using Tile = SwizzledRows<Element, rows, columns>;
  using Map = decltype(cute::make_tma_copy(Copy{}, std::declval<Global>(), Tile{}));
  Map map;
  int height, width;

  /// For a height x width matrix; beyond it, TMA reads zeros and does not write.
  static TileMap of(const Operand& from, int height, int width) {
    using namespace cute;
    auto* const elements = static_cast<Element*>(const_cast<void*>(from.data));  // one type for both directions
    const auto matrix = make_tensor(make_gmem_ptr(elements),
                                    make_layout(make_shape(height, width), make_stride(from.row_stride, _1{})));
    return {make_tma_copy(Copy{}, matrix, Tile{}), height, width};
  }

  /// Loads the tile at this place of the grid of tiles; called by one thread. With SM90_TMA_LOAD_MULTICAST, it goes to
  /// the same addresses in all CTAs of the cluster whose bit is set in `ctas`, and signals the barrier of each.
  CUTLASS_DEVICE void load(Element* shared, int row, int column, cutlass::arch::ClusterTransactionBarrier& barrier,
                           uint16_t ctas = 0) const {
    using namespace cute;
    const Tensor from = local_tile(map.get_tma_tensor(make_shape(height, width)), Shape<Int<rows>, Int<columns>>{},
                                   make_coord(row, column));
    const Tensor to = make_tensor(make_smem_ptr(shared), Tile{});
    const auto slice = map.get_slice(0);
    copy(map.with(reinterpret_cast<uint64_t&>(barrier), ctas), slice.partition_S(from), slice.partition_D(to));
  }

  /// Starts the store as its own group; `shared` may be overwritten after tma_store_wait().
  CUTLASS_DEVICE void store(Element* shared, int row, int column) const {
    using namespace cute;
    const Tensor from = make_tensor(make_smem_ptr(shared), Tile{});
    const Tensor to = local_tile(map.get_tma_tensor(make_shape(height, width)), Shape<Int<rows>, Int<columns>>{},
                                 make_coord(row, column));
    const auto slice = map.get_slice(0);
    copy(map, slice.partition_S(from), slice.partition_D(to));
    tma_store_arrive();
  }
};

}  // namespace torchops::cuda::gemm
