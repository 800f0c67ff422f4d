#pragma once

#include <cstdint>

#include "cuda/base/vector.cuh"

// Rows of channels as positions of a pair matrix whose channels come first. No torch, but c10's number types.
namespace torchops::cuda {

/// Where row r is within a channel: rows of n positions that begin `padded` apart.
struct Positions {
  int64_t n, padded;

  __device__ int64_t of(int64_t row) const { return row / n * padded + row % n; }
  /// The same if an int has room for n, by the faster division.
  __device__ int64_t of_int(int row) const {
    const auto r = static_cast<uint32_t>(row), of_n = static_cast<uint32_t>(n);
    return r / of_n * padded + r % of_n;
  }
};

template <class T>
struct RowFactors {
  const T* of_row;  // null: none
  Accumulate<T> of_all;

  __device__ Accumulate<T> of(int64_t row) const {
    return of_row == nullptr ? of_all : of_all * static_cast<Accumulate<T>>(of_row[row]);
  }
};

/// Where the values of rows are that come in channels: those of a row at its position in the matrix of each channel,
/// times the factor of the row.
template <class T>
struct ChannelRows {
  T* data;
  int64_t channel_stride;
  Positions positions;
  RowFactors<T> factors;
};

}  // namespace torchops::cuda
