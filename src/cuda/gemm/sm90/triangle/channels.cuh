#pragma once

// How the input step of a triangle update writes its results: two boxes of 64 positions at a time.

#include "cuda/gemm/sm90/triangle/steps.cuh"

namespace torchops::cuda::gemm {

/// Where 64 positions are: in a row, from 64 * place on.
struct PositionBox {
  int row, place;
};

/// Where position, channel and box of a tile of two boxes are in shared memory, in swizzled rows of 128 bytes.
template <int channels, int channel_stride, int box_stride>
using SwizzledBoxes = decltype(cute::composition(
    cute::Swizzle<3, 4, 3>{}, cute::smem_ptr_flag_bits<16>{},
    cute::Layout<cute::Shape<cute::Int<kPairRows>, cute::Int<channels>, cute::_2>,
                 cute::Stride<cute::_1, cute::Int<channel_stride>, cute::Int<box_stride>>>{}));

/// Tiles of `channels` x 128 positions, in two boxes, to channels of positions. If `lines`, the boxes are neighbours in
/// a row, and TMA writes both at once, so that the 256 bytes of a channel stay together.
template <class Element, int channels, bool lines>
struct ChannelMap;

template <class Element, int channels>
struct ChannelMap<Element, channels, false> : PlaneMap<cute::SM90_TMA_STORE, Element, channels, kPairRows> {
  using Planes = PlaneMap<cute::SM90_TMA_STORE, Element, channels, kPairRows>;
  using Tile = SwizzledBoxes<channels, kPairRows, kPairRows * channels>;

  static ChannelMap of(const Operand& from, int channel_count, int positions, int rows) {
    return {Planes::of(from, channel_count, positions, rows)};
  }
  CUTLASS_DEVICE void store(Element* shared, int part, const PositionBox (&boxes)[2]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      Planes::store(shared + i * (kPairRows * channels), part, boxes[i].place, boxes[i].row);
    }
  }
};

// The descriptor is encoded here, because CuTe would merge position and box, which are contiguous in memory, to a row
// that is too long for the swizzle.
template <class Element, int channels>
struct ChannelMap<Element, channels, true> {
  using Value = Element;
  using Tile = SwizzledBoxes<channels, 2 * kPairRows, kPairRows>;

  struct Map {
    cute::TmaDescriptor descriptor{};
    const cute::TmaDescriptor* get_tma_descriptor() const { return &descriptor; }
  };
  Map map;

  static ChannelMap of(const Operand& from, int channel_count, int positions, int rows) {
    const auto size = [](auto count) { return static_cast<cuuint64_t>(count); };
    const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride * sizeof(Element)); };
    // Position in the box, box, channel, row.
    const cuuint64_t sizes[] = {kPairRows, size((positions + kPairRows - 1) / kPairRows), size(channel_count),
                                size(rows)};
    const cuuint64_t strides[] = {bytes(kPairRows), bytes(from.row_stride), bytes(from.batch_stride)};
    const cuuint32_t box[] = {kPairRows, 2, channels, 1}, steps[] = {1, 1, 1, 1};
    constexpr auto type = std::is_same_v<Element, cutlass::bfloat16_t> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    ChannelMap result;
    const CUresult error = call_cuTensorMapEncodeTiled(
        &result.map.descriptor, type, cuuint32_t{4}, const_cast<void*>(from.data),
        static_cast<const cuuint64_t*>(sizes), static_cast<const cuuint64_t*>(strides),
        static_cast<const cuuint32_t*>(box), static_cast<const cuuint32_t*>(steps), CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? result : ChannelMap{};
  }
  CUTLASS_DEVICE void store(Element* shared, int part, const PositionBox (&boxes)[2]) const {
    cute::SM90_TMA_STORE_4D::copy(&map.descriptor, shared, 0, boxes[0].place, channels * part, boxes[0].row);
    cute::tma_store_arrive();
  }
};

}  // namespace torchops::cuda::gemm
