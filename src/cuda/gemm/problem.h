#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// What a GEMM kernel is given and what it answers. No torch, no CUTLASS: host code of either side includes it.
namespace torchops::cuda::gemm {

/// A matrix in device memory, or a batch of them. Elements of a row (of a column, where an operation says so) are
/// contiguous; strides are in elements. Pointers and strides are multiples of 16 bytes (operand.h checks it).
struct Operand {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t batch_stride = 0;
};

/// What the rows of an operand are multiplied with to have their values: `data` has one factor for each, or one for
/// all.
struct Scale {
  const float* data = nullptr;
  bool each = false;
};

/// d (m x n) = f(a (m x k), b, b2, c) for each of a batch, where the operation says what f is and what of them it
/// reads. A bias has n contiguous elements and no alignment, or is null. z and z2, where an operation knows them and
/// they are not null, get its products with their biases.
struct Problem {
  int m = 0, n = 0, k = 0, batch = 1;
  Operand a, b, b2, c, d, z, z2;
  const void *bias = nullptr, *bias2 = nullptr;
  /// Of operations with eight-bit operands, which add float32 in `bias` and the type of d in `bias2`.
  Scale scale_a, scale_b;
  /// As many bytes as Kernel::prepare() asked for, aligned to 16.
  void* workspace = nullptr;
};

/// The gradients of y = f(x @ w.T + bias, x @ w2.T + bias2, c), of which the operation reads what it needs: grad, y and
/// c are m x n, x is m x k, the weights are n x k, n and k are multiples of 8. The gradients dx (m x k), dc (m x n), of
/// weights (n x k) and of biases (n) are contiguous and aligned to 16 bytes. An operation that stops at the cotangents
/// of the products writes those to dz and dz2 (m x n), or side by side, kTurn columns of each by turns, to dz alone.
struct GradientProblem {
  static constexpr int kTurn = 8;
  int m = 0, n = 0, k = 0;
  Operand grad, y, c, x, w, w2, dz, dz2;
  const void *bias = nullptr, *bias2 = nullptr;
  void *dx = nullptr, *dc = nullptr, *dw = nullptr, *dw2 = nullptr, *dbias = nullptr, *dbias2 = nullptr;
  void* workspace = nullptr;
};

/// A linear layer of up to 128 features in and out: its weight, and its bias or null.
struct Layer {
  Operand weight;
  const void* bias = nullptr;
};

/// A layer norm of features: weight and bias may be null.
struct Norm {
  const void *weight = nullptr, *bias = nullptr;
  float eps = 0;
};

/// A step of a triangle update, on an n x n matrix of positions (i, k): x has c features at each, of which rows of k
/// are x.row_stride and those of i x.batch_stride apart. Channels are matrices of their own: rows of k that begin at
/// multiples of 16 bytes, row_stride apart, and channel_stride from one channel to the next.
struct PairProblem {
  int n = 0, c = 0, d = 0;
  Operand x;
  Norm norm_x;
  int64_t row_stride = 0, channel_stride = 0;
  /// The step in: value and gate of each of two results of d channels; factors of positions, or null, and of all.
  Layer value[2], gate[2];
  void* channels[2] = {nullptr, nullptr};
  const void* mask = nullptr;
  int64_t mask_row_stride = 0, mask_stride = 0;
  float scale[2] = {1, 1};
  /// The step out: from channels[0], value[0] and gate[0] to `out`; where it adds, plus x, which may be `out`, or plus
  /// `residual`, if there is one: that and `out` are of float32 then, and may be the same.
  Norm norm_o;
  void* out = nullptr;
  int64_t out_row_stride = 0, out_stride = 0;
  bool adds = false;
  Operand residual;
  /// Two floats for each position, or null: of the layer norm of x, what the first step that needs them leaves to those
  /// that follow.
  void* moments = nullptr;
  int64_t moments_row_stride = 0, moments_stride = 0;
  void* workspace = nullptr;
};

/// The gradients of a step of a triangle update: of one side of the step in, whose cotangent is channels[0], with its
/// value[0], gate[0] and scale[0]; or of the step out, whose cotangent is `grad`, in which channels[0] is o. Where it
/// adds, the last side in adds `grad` to what it makes, the gradient of x.
struct PairGradientProblem : PairProblem {
  Operand grad;
  /// (n x n x c): the cotangent of the layer norm of x without its weight, so far; the first adds nothing to it, and
  /// the last makes that of x.
  Operand dz;
  bool first = false, last = false;
  void* d_o = nullptr;  // of the step out: of o's strides
  /// For the value and then the gate: weight (rows x columns), bias (rows).
  float* sums = nullptr;
};

/// A transition of m rows of c features: x, normalised, through gate and up to hidden features, and through down to
/// `out`, of x's shape; where it adds, plus x, which may be `out`, or plus `residual`, if there is one: that and `out`
/// are of float32 then, and may be the same. c and hidden are multiples of 8.
struct TransitionProblem {
  int m = 0, c = 0, hidden = 0;
  Operand x, out, residual;
  Norm norm;
  Layer gate, up, down;
  bool adds = false;
  void* workspace = nullptr;
};

/// The gradients of a transition for the cotangent `grad` of its result: dx, plus `grad` where it adds; and of the
/// weights of gate, up (hidden x c) and down (c x hidden), all or none (null), and with them of what is not null:
/// biases, the norm. They are contiguous.
struct TransitionGradientProblem {
  int m = 0, c = 0, hidden = 0;
  Operand x, grad, dx;
  Norm norm;
  Layer gate, up, down;
  bool adds = false;
  void *dweights[3] = {}, *dbiases[3] = {}, *dnorm_weight = nullptr, *dnorm_bias = nullptr;
  void* workspace = nullptr;

  bool has_weights() const { return dweights[0] != nullptr; }
};

/// How a call ended. An error of CUDA is always a failure: it never stands for "another kernel should do this".
struct Status {
  enum Kind { kDone, kNotForMe, kFailed } kind = kDone;
  cudaError_t error = cudaSuccess;

  static Status not_for_me() { return {kNotForMe, cudaSuccess}; }
  /// Done, or failed with that error.
  static Status of(cudaError_t error) { return {error == cudaSuccess ? kDone : kFailed, error}; }
  bool done() const { return kind == kDone; }
};

/// One compiled kernel. Both functions work for the current device. prepare() launches nothing: it tells whether the
/// kernel is for this problem (kDone) and how much workspace run() needs, whose contents do not matter.
template <class Problem>
struct Kernel {
  Status (*prepare)(const Problem& problem, int64_t& workspace_bytes);
  Status (*run)(const Problem& problem, cudaStream_t stream);
};

}  // namespace torchops::cuda::gemm
