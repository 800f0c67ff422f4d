#pragma once

// Tiles of a tensor of heads by TMA: queries, keys or values of one head of one row, or a tile of their bias.

#include <cute/tensor.hpp>

#include "cuda/gemm/sm90/skeleton/tma.cuh"

namespace torchops::cuda::gemm {

/// Rows of 64 or 128 bytes, swizzled at their width, as TMA delivers them; and the same bytes as the transposed matrix.
/// With stages, as many of such matrices one after another.
template <class Element, int rows, int columns, int... stages>
struct SwizzledHeads {
  static constexpr int kRowBytes = columns * static_cast<int>(sizeof(Element));
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  template <class Narrow, class Wide>
  using OfWidth = std::conditional_t<kRowBytes == 64, Narrow, Wide>;
  using Rows = decltype(cute::tile_to_shape(
      OfWidth<cute::GMMA::Layout_K_SW64_Atom<Element>, cute::GMMA::Layout_K_SW128_Atom<Element>>{},
      cute::Shape<cute::Int<rows>, cute::Int<columns>, cute::Int<stages>...>{}));
  using Transposed = decltype(cute::tile_to_shape(
      OfWidth<cute::GMMA::Layout_MN_SW64_Atom<Element>, cute::GMMA::Layout_MN_SW128_Atom<Element>>{},
      cute::Shape<cute::Int<columns>, cute::Int<rows>, cute::Int<stages>...>{}));
};

/// Tiles of rows x columns of the matrices of a tensor with three more dimensions; like TileMap.
template <class Copy, class Element, int rows, int columns>
struct HeadMap {
  using Heads =
      cute::Layout<cute::Shape<int, int, int, int, int>, cute::Stride<int64_t, cute::_1, int64_t, int64_t, int64_t>>;
  using Global = decltype(cute::make_tensor(cute::make_gmem_ptr(static_cast<Element*>(nullptr)), Heads{}));
  using Tile = typename SwizzledHeads<Element, rows, columns>::Rows;
  using Map = decltype(cute::make_tma_copy(Copy{}, std::declval<Global>(), Tile{}));
  Map map;
  Heads heads;

  /// Whether the driver has encoded the descriptor.
  static bool of(HeadMap& to, const HeadOperand& from, int height, int width, const int (&outer)[3]) {
    using namespace cute;
    const auto [first, second, third] = from.strides;
    to.heads = make_layout(make_shape(height, width, outer[0], outer[1], outer[2]),
                           make_stride(from.row_stride, _1{}, first, second, third));
    auto* const elements = static_cast<Element*>(const_cast<void*>(from.data));  // one type for both directions
    to.map = make_tma_copy(Copy{}, make_tensor(make_gmem_ptr(elements), to.heads), Tile{});
    return are_encoded(to.map);
  }

  CUTLASS_DEVICE auto tile(int row, int column, int first, int second, int third) const {
    using namespace cute;
    const Tensor all = map.get_tma_tensor(heads.shape());
    return local_tile(all(_, _, first, second, third), Shape<Int<rows>, Int<columns>>{}, make_coord(row, column));
  }
  /// Loads a tile; called by one thread.
  CUTLASS_DEVICE void load(Element* shared, int row, int column, int first, int second, int third,
                           cutlass::arch::ClusterTransactionBarrier& barrier) const {
    using namespace cute;
    const auto slice = map.get_slice(0);
    copy(map.with(reinterpret_cast<uint64_t&>(barrier)), slice.partition_S(tile(row, column, first, second, third)),
         slice.partition_D(make_tensor(make_smem_ptr(shared), Tile{})));
  }
  /// Starts a store as its own group.
  CUTLASS_DEVICE void store(Element* shared, int row, int column, int first, int second, int third) const {
    using namespace cute;
    const auto slice = map.get_slice(0);
    copy(map, slice.partition_S(make_tensor(make_smem_ptr(shared), Tile{})),
         slice.partition_D(tile(row, column, first, second, third)));
    tma_store_arrive();
  }
};

}  // namespace torchops::cuda::gemm
