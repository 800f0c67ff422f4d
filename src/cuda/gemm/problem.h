#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// The arguments and results of GEMM kernels. No torch, no CUTLASS: host code of either side includes it.
namespace torchops::cuda::gemm {

/// A matrix in device memory, or a batch of them. The elements of a row (of a column, if an operation says so) are
/// contiguous; strides are in elements. Pointers and strides are multiples of 16 bytes (linear/operand.h checks this).
struct Operand {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t batch_stride = 0;
};

/// Strides of TMA are below this.
constexpr int64_t kMostStrideBytes = int64_t{1} << 40;

/// Whether TMA takes a stride of so many elements of `size` bytes.
constexpr bool is_stride_of_tma(int64_t stride, int64_t size) {
  return stride >= 0 && stride * size % 16 == 0 && stride * size < kMostStrideBytes;
}

/// The factors by which the rows of an operand are multiplied to get its values: `data` has one factor per row, or one
/// for all rows.
struct Scale {
  const float* data = nullptr;
  bool each = false;
};

/// d (m x n) = f(a (m x k), b, b2, c) for each batch element. The operation defines f, and which of these it reads. A
/// bias has n contiguous elements and no alignment, or is null. If an operation supports z and z2, and they are not
/// null, it writes its products plus their biases there.
struct Problem {
  int m = 0, n = 0, k = 0, batch = 1;
  Operand a, b, b2, c, d, z, z2;
  const void *bias = nullptr, *bias2 = nullptr;
  /// For operations with eight-bit operands, which add a float32 `bias`, and a `bias2` of the type of d.
  Scale scale_a, scale_b;
  /// At least as many bytes as Kernel::prepare() requires, aligned to 16.
  void* workspace = nullptr;
};

/// The gradients of y = f(x @ w.T + bias, x @ w2.T + bias2, c), of which an operation reads what it needs (one that
/// reads c may be given y instead, if y is c * f(..), and the other one is null): grad, y and c are m x n, x is m x k,
/// the weights are n x k, n and k are multiples of 8. The gradients dx (m x k), dc (m x n), of weights (n x k) and of
/// biases (n) are contiguous and aligned to 16 bytes. An operation that stops at the cotangents of the products writes
/// them to dz and dz2 (m x n), or both to dz, alternating in groups of kTurn columns.
struct GradientProblem {
  static constexpr int kTurn = 8;
  int m = 0, n = 0, k = 0;
  Operand grad, y, c, x, w, w2, dz, dz2;
  const void *bias = nullptr, *bias2 = nullptr;
  void *dx = nullptr, *dc = nullptr, *dw = nullptr, *dw2 = nullptr, *dbias = nullptr, *dbias2 = nullptr;
  /// Whether x and dx are float32, which only the operations for all gradients of gate and glu support.
  bool x_is_float32 = false;
  /// Whether gradients of weights and biases are float32, which only WeightGradients supports.
  bool has_float32_sums = false;
  void* workspace = nullptr;

  /// For operations that read c.
  bool has_y_for_c() const { return c.data == nullptr && y.data != nullptr; }
  const Operand& c_or_y() const { return has_y_for_c() ? y : c; }
};

/// A linear layer: its weight, and its bias or null.
struct Layer {
  Operand weight;
  const void* bias = nullptr;
};

/// The weight or bias of a layer norm, or null: contiguous, with elements of x's type, or float32.
struct NormVector {
  const void* data = nullptr;
  bool is_float32 = false;
};

/// A layer norm over features.
struct Norm {
  NormVector weight, bias;
  float eps = 0;
};

/// A step of a triangle update, on positions (i, k) of an n x n matrix: `rows` rows of n positions; only the kernels of
/// sm90/ for up to 128 features and channels allow another number than n. x has c features at each position; its
/// strides are x.batch_stride for i and x.row_stride for k. Channels are matrices of their own: rows of k that begin at
/// multiples of 16 bytes, row_stride apart; channels are channel_stride apart, but those of channels[1]
/// second_channel_stride, which only TriangleIn allows to be another number.
struct PairProblem {
  int n = 0, rows = 0, c = 0, d = 0;
  Operand x;
  Norm norm_x;
  int64_t row_stride = 0, channel_stride = 0, second_channel_stride = 0;
  /// Whether the memory after each row, up to where the next one begins or would begin, belongs to it: the input step
  /// may write there.
  bool owns_gaps = false;
  /// Input step: value and gate for each of two results of d channels; factors per position, or null, and for all.
  Layer value[2], gate[2];
  void* channels[2] = {nullptr, nullptr};
  const void* mask = nullptr;
  int64_t mask_row_stride = 0, mask_stride = 0;
  float scale[2] = {1, 1};
  /// Output step: from channels[0], value[0] and gate[0] to `out`; plus x if `add_residual`, and then `out` may be x;
  /// or plus `residual`, if there is one: it and `out` are float32 then, and may be the same.
  Norm norm_o;
  void* out = nullptr;
  int64_t out_row_stride = 0, out_stride = 0;
  bool add_residual = false;
  Operand residual;
  /// Two floats per position, or null: the moments of the layer norm of x, which the first step that needs them writes
  /// for the later ones.
  void* moments = nullptr;
  int64_t moments_row_stride = 0, moments_stride = 0;
  void* workspace = nullptr;
};

/// The gradients of a step of a triangle update: of one side of the input step, whose cotangent is channels[0], with
/// its value[0], gate[0] and scale[0]; or of the output step, whose cotangent is `grad`, and channels[0] is o. If
/// `add_residual`, the last input side adds `grad` to its result, the gradient of x.
struct PairGradientProblem : PairProblem {
  Operand grad;
  /// (rows x n x c): the cotangent, so far, of the layer norm of x without its weight. The first step only writes it,
  /// and the last one turns it into the gradient of x.
  Operand dz;
  bool last = false;  // of the input steps
  Operand d_o;        // of the output step: channels, batch_stride apart, with zeros up to padded_positions()
  /// For the value and then for the gate: weight (rows x columns), bias (rows).
  float* sums = nullptr;
};

/// A transition of m rows of c features: x is normalised and goes through gate and up to hidden features, and through
/// down to `out`, of x's shape; plus x if `add_residual`, and then `out` may be x; or plus `residual`, if there is one:
/// it and `out` are float32 then, and may be the same. c and hidden are multiples of 8.
struct TransitionProblem {
  int m = 0, c = 0, hidden = 0;
  Operand x, out, residual;
  Norm norm;
  Layer gate, up, down;
  bool add_residual = false;
  void* workspace = nullptr;
};

/// The gradients of a transition for the cotangent `grad` of its result: dx, plus `grad` if `add_residual`; and either
/// all or none (null) of the weights of gate, up (hidden x c) and down (c x hidden). With the weights also the biases
/// and the norm, as far as they are not null. All are contiguous; those of the norm have the types of its vectors.
struct TransitionGradientProblem {
  int m = 0, c = 0, hidden = 0;
  Operand x, grad, dx;
  Norm norm;
  Layer gate, up, down;
  bool add_residual = false;
  void *dweights[3] = {}, *dbiases[3] = {}, *dnorm_weight = nullptr, *dnorm_bias = nullptr;
  void* workspace = nullptr;

  bool has_weights() const { return dweights[0] != nullptr; }
};

/// Queries, keys or values of heads: rows of d contiguous features, row_stride apart. Heads, rows and elements of the
/// batch are strides[0], [1] and [2] apart. Pointers and strides are multiples of 16 bytes.
struct HeadOperand {
  const void* data = nullptr;
  int64_t row_stride = 0, strides[3] = {};
};

/// The core of attention: out = softmax(scale * q @ k.T + bias + mask) @ v for each head of each row of a batch. The
/// bias (heads x queries x width for each element of the batch) is shared by all rows. Its rows are padded: width is a
/// multiple of 64, and the bias is -inf from the last key on. `mask` (batch x rows x width, or null) is float32, 0 or
/// -inf, contiguous and aligned to 16 bytes. `unit` is the factor from scores, as scale and bias give them, to
/// logarithms to base 2. out may have any strides that fit TMA. logsumexp (batch x rows x heads x queries) is float32
/// and contiguous, and to base e.
struct AttentionProblem {
  int batch = 0, rows = 0, heads = 0, queries = 0, keys = 0, width = 0, d = 0;
  HeadOperand q, k, v, out, bias;
  const float* mask = nullptr;
  float* logsumexp = nullptr;
  float scale = 1, unit = 1;
  void* workspace = nullptr;
};

/// How a call ended. A CUDA error is always a failure, and base/refusal.h says whether another kernel should do this.
struct Status {
  enum Kind { kDone, kNotForMe, kFailed } kind = kDone;
  cudaError_t error = cudaSuccess;

  static Status not_for_me() { return {kNotForMe, cudaSuccess}; }
  /// Done, or failed with that error.
  static Status of(cudaError_t error) { return {error == cudaSuccess ? kDone : kFailed, error}; }
  bool done() const { return kind == kDone; }
};

/// One compiled kernel. Both functions are for the current device. prepare() launches nothing: it tells whether the
/// kernel supports this problem (kDone) and how much workspace, of any contents, run() needs.
template <class Problem>
struct Kernel {
  Status (*prepare)(const Problem& problem, int64_t& workspace_bytes);
  Status (*run)(const Problem& problem, cudaStream_t stream);
};

}  // namespace torchops::cuda::gemm
