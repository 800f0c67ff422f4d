#pragma once

#include "cuda/rows/places.cuh"

// The device side of operators that reduce the rows of a matrix and write rows of the same length. An operator is
// written once, for two types that the launch chooses by the length of the rows:
//   Group  the threads that share a row: some lanes of a warp, a block, or the blocks of a cluster (rows/groups.cuh)
//   Row    their view of one of Row::Rows: for_each() reads it, possibly again, and write() writes the output; before,
//          read_ahead() may start to read parameters
// or, if rows are long and have parameters, for those of rows/streamed.cuh. Those of rows/pairs.cuh have two inputs.
//
// An operator on elements of type T has
//   State                                what the output depends on, beside the element and the parameters
//   State measure(row, group)            State of the elements of this group, or of this block if it is a cluster
//   State pool(State part, reduce)       State of several parts together, which are not all empty; reduce(value, op)
//                                        reduces a number of each
//   State nothing()                      State of no elements
//   void write(row, group, State)        writes the row, from State of all of it
//   kParameters, parameters              vectors with a number per column, which write() reads; or none
//   kReductions                          how often measure() reduces over a whole row
//   kStaged                              the vectors per thread that a row may have in shared memory
namespace torchops::cuda {

/// Rows with unit column stride. y may be x.
template <class T>
struct Rows {
  const T* x;
  T* y;
  int64_t rows, columns, x_stride, y_stride;
};

/// Vectors with a number per column, at any alignment. One that is null has the same number, `otherwise`, everywhere.
/// Their type may be another one than that of the rows, with the same Accumulate.
template <class T, int n>
struct Parameters {
  const T* at[n];
  T otherwise[n];

  template <int N>
  __device__ void read(int which, int64_t column, Accumulate<T> (&out)[N]) const {
    if (at[which] == nullptr) return fill(which, out);
    const T* const from = at[which] + column;
    if constexpr (N > 1) {
      if (reinterpret_cast<uintptr_t>(from) % kVectorBytes == 0) {
        constexpr int kPieces = N * sizeof(T) / kVectorBytes;
        alignas(Packed<T, N>) uint4 bits[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) bits[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
        unpack(*reinterpret_cast<const Packed<T, N>*>(bits), out);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = static_cast<Accumulate<T>>(from[i]);
  }
  /// Whether vectors from this column on lie at multiples of their size.
  __device__ bool are_aligned(int64_t column) const {
    bool all = true;
#pragma unroll
    for (int which = 0; which < n; ++which) {
      all = all && (at[which] == nullptr || reinterpret_cast<uintptr_t>(at[which] + column) % kVectorBytes == 0);
    }
    return all;
  }
  /// Brings an aligned vector to shared memory, where it is after wait_for_copies().
  template <int N>
  __device__ void copy_aligned(int which, int64_t column, Packed<T, N>* shared) const {
    if (at[which] != nullptr) return copy_vector_through_l1(shared, at[which] + column);
    Accumulate<T> values[N];
    fill(which, values);
    *shared = pack<T, N>(values);
  }

 private:
  template <int N>
  __device__ void fill(int which, Accumulate<T> (&out)[N]) const {
    for (auto& value : out) value = static_cast<Accumulate<T>>(otherwise[which]);
  }
};
template <class T>
struct Parameters<T, 0> {
  template <class Out>
  __device__ void read(int, int64_t, Out&) const {}
};

/// A row that is read once. Per thread, up to kVectors vectors stay in registers, as in memory, and up to kStaged more
/// in shared memory that no other thread reads. x and y must have the same distance to a 16-byte boundary.
///
/// kAhead parameters of these vectors, if they are aligned and of T, come to shared memory while the row is on its way:
/// reading them after the reductions takes about as long as a reduction. In registers they would leave room for fewer
/// threads.
template <class T, class Group, int kVectors, int kStaged = 0, int kAhead = 0>
class RowInRegisters : RowPlaces<T, Group, kVectors + kStaged> {
  using Places = RowPlaces<T, Group, kVectors + kStaged>;
  using Places::kSize, Places::kEdges, Places::has_vector, Places::column, Places::has_edge, Places::edge_column;

 public:
  using Rows = cuda::Rows<T>;
  static constexpr int kCapacity = kVectors + kStaged;                                // vectors per thread
  static constexpr int kSharedBytes = (kStaged + kCapacity * kAhead) * kVectorBytes;  // per thread

  __device__ RowInRegisters(const Rows& rows, const Group& group)
      : Places(rows.x + group.row * rows.x_stride, rows.rows, rows.columns, group),
        y_(rows.y + group.row * rows.y_stride) {
    const T* const x = rows.x + group.row * rows.x_stride;
#pragma unroll
    for (int k = kVectors; k < kCapacity; ++k) {
      if (has_vector(k)) copy_vector(staged(k), x + column(k));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (has_vector(k)) body_[k] = load<T, kSize>(x + column(k));
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (has_edge(k)) edge_[k] = x[edge_column(k)];
    }
  }

  /// Called before write().
  template <class P, int n>
  __device__ void read_ahead(const Parameters<P, n>& parameters) {
    if constexpr (kAhead > 0 && std::is_same_v<P, T>) {
      static_assert(kAhead == n);
      are_ahead_ = parameters.are_aligned(this->head());
      if (!are_ahead_) return;
#pragma unroll
      for (int k = 0; k < kCapacity; ++k) {
        if (!has_vector(k)) continue;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) parameters.copy_aligned(i, column(k), ahead(k, i));
      }
    }
  }

  /// The number of elements of this thread.
  __device__ int count() const {
    int vectors = 0, edges = 0;
#pragma unroll
    for (int k = 0; k < kCapacity; ++k) vectors += has_vector(k);
#pragma unroll
    for (int k = 0; k < kEdges; ++k) edges += has_edge(k);
    return vectors * kSize + edges;
  }

  /// Calls f(value, index in its vector) for every element of this thread.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (has_vector(k)) {
        A values[kSize];
        unpack(body_[k], values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) f(values[i], i);
      }
    }
    if constexpr (kStaged > 0) wait_for_copies();
#pragma unroll
    for (int k = kVectors; k < kCapacity; ++k) {
      if (has_vector(k)) {
        A values[kSize];
        unpack(*staged(k), values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) f(values[i], i);
      }
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (has_edge(k)) f(static_cast<A>(edge_[k]), 0);
    }
  }

  /// Calls f(values, read) with arrays of neighbouring elements; f makes them the output. read(i, out) reads their
  /// parameters number i.
  template <class P, int n, class F>
  __device__ void write(const Parameters<P, n>& parameters, F f) const {
    if (kAhead > 0 && are_ahead_) {
      wait_for_copies();
      write_vectors(f, [&](int k, int i, auto& out) { unpack(*ahead(k, i), out); });
    } else {
      write_vectors(f, [&](int k, int i, auto& out) { parameters.read(i, column(k), out); });
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
      if (has_edge(k)) {
        A values[1] = {static_cast<A>(edge_[k])};
        f(values, [&](int i, auto& out) { parameters.read(i, edge_column(k), out); });
        y_[edge_column(k)] = static_cast<T>(values[0]);
      }
    }
  }

 private:
  using A = Accumulate<T>;

  /// Calls f for each vector; read(k, i, out) reads the parameters number i of the k-th one.
  template <class F, class Read>
  __device__ void write_vectors(F f, const Read& read) const {
#pragma unroll
    for (int k = 0; k < kCapacity; ++k) {
      if (has_vector(k)) {
        A values[kSize];
        unpack(k < kVectors ? body_[k < kVectors ? k : 0] : *staged(k), values);
        f(values, [&](int i, auto& out) { read(k, i, out); });
        store(y_ + column(k), pack<T, kSize>(values));
      }
    }
  }

  // Places for vectors in shared memory, of this thread alone.
  static __device__ Packed<T, kSize>* place(int i) {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<Packed<T, kSize>*>(memory) + i * blockDim.x + threadIdx.x;
  }
  static __device__ Packed<T, kSize>* staged(int k) { return place(k - kVectors); }
  static __device__ Packed<T, kSize>* ahead(int k, int i) { return place(kStaged + k * kAhead + i); }

  T* const y_;
  bool are_ahead_ = false;  // the parameters of the vectors
  Packed<T, kSize> body_[kVectors];
  T edge_[kEdges];
};

/// A row of any length, read from memory each time, kSize elements at once. With kSize = 1, x and y may lie anywhere.
template <class T, class Group, int kSize>
class RowInMemory {
 public:
  using Rows = cuda::Rows<T>;

  __device__ RowInMemory(const Rows& rows, const Group& group)
      : rank_(group.rank),
        size_(group.size),
        x_(rows.x + group.row * rows.x_stride),
        y_(rows.y + group.row * rows.y_stride) {
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(x_) / sizeof(T) % kSize);
    head_ = static_cast<int>(min(int64_t{(kSize - misaligned) % kSize}, rows.columns));
    vectors_ = (rows.columns - head_) / kSize;
    edges_ = static_cast<int>(rows.columns - vectors_ * kSize);
  }

  template <class P, int n>
  __device__ void read_ahead(const Parameters<P, n>&) {}

  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll 4
    for (int64_t i = rank_; i < vectors_; i += size_) {
      A values[kSize];
      unpack(load<T, kSize>(x_ + head_ + i * kSize), values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) f(values[j], j);
    }
    if (rank_ < edges_) f(static_cast<A>(x_[edge_column()]), 0);
  }

  template <class P, int n, class F>
  __device__ void write(const Parameters<P, n>& parameters, F f) const {
    for (int64_t i = rank_; i < vectors_; i += size_) {
      const int64_t column = head_ + i * kSize;
      A values[kSize];
      unpack(load<T, kSize>(x_ + column), values);
      f(values, [&](int which, auto& out) { parameters.read(which, column, out); });
      store(y_ + column, pack<T, kSize>(values));
    }
    if (rank_ < edges_) {
      A values[1] = {static_cast<A>(x_[edge_column()])};
      f(values, [&](int which, auto& out) { parameters.read(which, edge_column(), out); });
      y_[edge_column()] = static_cast<T>(values[0]);
    }
  }

 private:
  using A = Accumulate<T>;
  static_assert(2 * (kSize - 1) <= Group::kMinSize);

  __device__ int64_t edge_column() const { return rank_ < head_ ? rank_ : rank_ + vectors_ * kSize; }

  const int rank_, size_;
  const T* const x_;
  T* const y_;
  int head_, edges_;
  int64_t vectors_;
};

template <class T, class Row, class Group, class Operator>
__global__ __launch_bounds__(Group::kMaxThreads,
                             sizeof(T) == 8 ? 1 : Group::kMinBlocks) void rows_kernel(const typename Row::Rows rows,
                                                                                      const Operator op) {
  Group group;
  // The last blocks of a grid that continues along y may have no row. Groups that share a warp also share its shuffles,
  // so they stay, with an empty row.
  if constexpr (Group::kWholeBlocks) {
    if (group.row >= rows.rows) return;
  }
  Row row(rows, group);
  if constexpr (requires { row.read_ahead(op.parameters); }) row.read_ahead(op.parameters);
  op.write(row, group, group.pool(op.measure(row, group), op));
}

}  // namespace torchops::cuda
