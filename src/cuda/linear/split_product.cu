#include "cuda/gemm/sm80/float32_tile.cuh"
#include "cuda/gemm/ways.h"
#include "cuda/linear/operand.h"
#include "cuda/linear/run.cuh"
#include "cuda/linear/sm80_float32.cuh"
#include "cuda/linear/split_product.h"
#include "ops/kernel_path.h"

namespace torchops::cuda {
namespace {

using at::Tensor;
using namespace gemm;

// d = a @ b.T, plus d with `accumulate`, for each of a batch. Strides are in elements.
struct SplitProblem {
  Float32Operand a, b;
  float* d;
  int64_t d_stride, a_batch, b_batch, d_batch;
  int m, n, k, tiles_n;
  bool accumulate;
};

// Tiles of 128 x 128, or of 256 x 64.
template <Major major_a, Major major_b, int warps_m>
__global__ void __launch_bounds__(kSm80Threads, 2) split_product_kernel(const SplitProblem p) {
  using Tile = Float32Tile<1, warps_m>;
  using Sums = SplitSums<1, major_a, major_b, Tile::kRows, Tile::kColumns>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first_row = static_cast<int>(blockIdx.x) / p.tiles_n * Tile::kRows;
  const int first_column = static_cast<int>(blockIdx.x) % p.tiles_n * Tile::kColumns;
  const int warp_row = warp % warps_m * 32, warp_column = warp / warps_m * Tile::kWarpColumns;
  const int64_t batch = blockIdx.y;
  const Float32Operands<1> of{.a = {p.a.data + batch * p.a_batch, p.a.stride},
                              .b = {{p.b.data + batch * p.b_batch, p.b.stride}},
                              .m = p.m,
                              .n = p.n};
  float sums[Sums::kRows][4 * Sums::kVectors] = {};
  sum_tile<Sums, 1, warps_m>(sums, shared, of, first_row, first_column, warp_row, warp_column, p.k);
  float* const d = p.d + batch * p.d_batch;
#pragma unroll
  for (int v = 0; v < Sums::kVectors; ++v) {
    const int column = first_column + warp_column + Sums::column(lane, v);
    if (column >= p.n) continue;
#pragma unroll
    for (int i = 0; i < Sums::kRows; ++i) {
      const int row = first_row + warp_row + Sums::row(lane, i);
      if (row >= p.m) continue;
      float* const to = d + row * p.d_stride + column;
      Packed<float, 4> values;
      if (p.accumulate) values = load<float, 4>(to);
#pragma unroll
      for (int j = 0; j < 4; ++j) values.at[j] = sums[i][4 * v + j] + (p.accumulate ? values.at[j] : 0.f);
      store<float, 4>(to, values);
    }
  }
}

void launch(const SplitProblem& p, Major major_a, Major major_b, unsigned batch) {
  const auto with = [&]<Major a, Major b>() {
    const auto with_tile = [&]<int warps_m>() {
      using Tile = Float32Tile<1, warps_m>;
      launch_tiles<split_product_kernel<a, b, warps_m>>(p, Tile::kRows, Tile::kColumns, Tile::kSharedBytes, batch);
    };
    p.n <= 64 ? with_tile.template operator()<8>() : with_tile.template operator()<4>();
  };
  constexpr Major columns = Major::kColumns, rows = Major::kRows;
  if (major_a == columns) {
    major_b == columns ? with.template operator()<columns, columns>() : with.template operator()<columns, rows>();
  } else {
    major_b == columns ? with.template operator()<rows, columns>() : with.template operator()<rows, rows>();
  }
}

// A matrix whose columns, of which sums are taken, are its last dimension.
bool read(const Tensor& t, Float32Operand& to, int64_t& batch_stride, Major& major) {
  auto of = operand(t);
  major = of ? Major::kColumns : Major::kRows;
  if (!of) of = operand(t.transpose(-2, -1));
  if (!of) return false;
  to = {static_cast<const float*>(of->data), of->row_stride};
  batch_stride = of->batch_stride;
  return true;
}

}  // namespace

bool split_linear(const Tensor& out, const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  const detail::KernelPath path = detail::kernel_path();
  if (path == detail::KernelPath::kCublas || out.dim() != 2 || out.numel() == 0 || x.size(1) == 0 ||
      x.scalar_type() != w.scalar_type() || x.scalar_type() != out.scalar_type()) {
    return false;
  }
  if (b && !b->is_contiguous()) return false;
  const RuleTensors t{.d = out, .a = x, .b = w, .bias = b};
  auto p = aligned_problem(t);
  const auto c = p ? split_case_of<LinearRule<Identity>>(*p, t) : std::nullopt;
  if (!c || (detail::is_automatic(path) && !prefers_split_sm90(*c, /*has_pass=*/false))) return false;
  return run_chosen<Float32Product>(*p, *c, out);
}

bool split_product(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  if (!accumulate && out.dim() == 2 && split_linear(out, a, b.t(), std::nullopt)) return true;
  constexpr int64_t most_batches = 65535;
  const int64_t m = out.size(-2), n = out.size(-1), k = a.size(-1), batch = out.dim() == 3 ? out.size(0) : 1;
  const detail::KernelPath path = detail::kernel_path();
  if (path == detail::KernelPath::kCublas || a.scalar_type() != b.scalar_type() ||
      a.scalar_type() != out.scalar_type() || !is_exact_float32(a.scalar_type()) || !splits_float32() ||
      out.numel() == 0 || k == 0 || n % 4 != 0 || batch > most_batches ||
      product_way(case_of(m, n, k, at::kFloat, batch), /*splits=*/true, detail::is_automatic(path)) !=
          ProductWay::kSplit) {
    return false;
  }
  SplitProblem p{};
  Major major_a, major_b;
  const auto to = operand(out);
  if (!to || !read(a, p.a, p.a_batch, major_a) || !read(b.transpose(-2, -1), p.b, p.b_batch, major_b)) return false;
  p.m = static_cast<int>(m);
  p.n = static_cast<int>(n);
  p.k = static_cast<int>(k);
  p.d = out.mutable_data_ptr<float>();
  p.d_stride = to->row_stride;
  p.d_batch = to->batch_stride;
  p.accumulate = accumulate;
  return attempt(Family::kSm80, [&] {
    launch(p, major_a, major_b, static_cast<unsigned>(batch));
    return true;
  });
}

}  // namespace torchops::cuda
