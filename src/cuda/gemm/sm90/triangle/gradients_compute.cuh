#pragma once

// What the warpgroups of triangle/gradients_tiles.cuh compute.

#include "cuda/gemm/sm90/triangle/gradients_tiles.cuh"
#include "cuda/gemm/sm90/weight_sums.cuh"

namespace torchops::cuda::gemm {

template <class Element, class Gate, bool kOut, GradientTiling tiling, DxHat kDxHat>
CUTLASS_DEVICE void PairGradientsKernel<Element, Gate, kOut, tiling, kDxHat>::compute(const Parameters& p,
                                                                                      Shared& shared) {
  using namespace cute;
  using Positions = cute::Shape<Int<kRows>, Int<kFeatures>>;
  const int thread = threadIdx.x;
  // The same for all of a warpgroup, as descriptors must be; the shuffle tells the compiler.
  const int warpgroup = __shfl_sync(~0u, thread / 128, 0), leader = warpgroup * 128;
  const auto view = [](Element* data, auto layout) { return make_tensor(make_smem_ptr(data), layout); };
  const auto swizzled = [&](Element* data, auto layout) {
    return as_position_independent_swizzle_tensor(view(data, layout));
  };
  // sums (+)= a @ b.T, both tiles in shared memory.
  const auto multiply = [&](auto& product, Element* a, auto layout_a, Element* b, auto layout_b, auto& sums) {
    const auto slice = product.get_slice(leader);
    const Tensor of_a = slice.make_fragment_A(slice.partition_A(view(a, layout_a)));
    const Tensor of_b = slice.make_fragment_B(slice.partition_B(view(b, layout_b)));
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(of_a); ++block) {
      cute::gemm(product, of_a(_, _, block), of_b(_, _, block), sums);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
  };
  using InMatrix = SwizzledRows<Element, kFeatures, kFeatures>;
  using InMatrixT = SwizzledTransposed<Element, kFeatures, kFeatures>;
  ProductU product_u;
  ProductT product_t;
  ProductX product_x;
  ProductW0 product_w0;
  ProductW1 product_w1;
  Tensor u = partition_fragment_C(product_t, Positions{});
  Tensor t = make_fragment_like(u);
  Tensor dx = make_fragment_like(u);   // dxhat
  Tensor d_o = make_fragment_like(u);  // dohat, in the output step
  Tensor dw0 = partition_fragment_C(product_w0, cute::Shape<Int<kFeatures>, Int<kFeatures>>{});
  Tensor dw1 = make_fragment_like(dw0);
  ProductSums product_sums;
  Tensor db0 = partition_fragment_C(product_sums, cute::Shape<Int<kFeatures>, _8>{});
  Tensor db1 = make_fragment_like(db0);
  clear(dw0);
  clear(dw1);
  clear(db0);
  clear(db1);
  const auto fence_sums = [&] {
    warpgroup_fence_operand(dw0);
    warpgroup_fence_operand(dw1);
    warpgroup_fence_operand(db0);
    warpgroup_fence_operand(db1);
  };
  const Tensor places = product_t.get_slice(thread).partition_C(make_identity_tensor(Positions{}));
  // Copies fragments of positions and features from and to rows and channels, in pieces of 16 columns.
  const auto read = [&](auto atom, Element* data, auto layout, auto& fragment, int first = 0,
                        int count = kColumns / 16) {
    const auto tiled = make_tiled_copy_C(atom, product_t);
    const auto slice = tiled.get_slice(thread_here());
    const Tensor from = slice.partition_S(swizzled(data, layout));
    Tensor to = slice.retile_D(fragment);
    CUTLASS_PRAGMA_UNROLL
    for (int i = first; i < first + count; ++i) copy(tiled, from(make_coord(_, i), _, _), to(make_coord(_, i), _, _));
  };
  const auto write = [&](auto atom, const auto& fragment, Element* data, auto layout, int first = 0,
                         int count = kColumns / 16) {
    const auto tiled = make_tiled_copy_C(atom, product_t);
    const auto slice = tiled.get_slice(thread_here());
    const Tensor from = slice.retile_S(fragment);
    Tensor to = slice.partition_D(swizzled(data, layout));
    CUTLASS_PRAGMA_UNROLL
    for (int i = first; i < first + count; ++i) copy(tiled, from(make_coord(_, i), _, _), to(make_coord(_, i), _, _));
  };
  const Copy_Atom<SM75_U32x4_LDSM_N, Element> from_rows;
  const Copy_Atom<SM75_U16x8_LDSM_T, Element> from_channels;
  const Copy_Atom<SM90_U32x4_STSM_N, Element> to_rows;
  const Copy_Atom<SM90_U16x8_STSM_T, Element> to_channels;
  const auto read_grad = [&](Element* data, auto& fragment, int first, int count) {
    if constexpr (kOut) {
      read(from_rows, data, InRows{}, fragment, first, count);
    } else {
      read(from_channels, data, InChannels{}, fragment, first, count);
    }
  };
  const auto write_dz = [&](const auto& fragment, Element* data, int first, int count) {
    if constexpr (kOut) {
      write(to_rows, fragment, data, InRows{}, first, count);
    } else {
      write(to_channels, fragment, data, InChannels{}, first, count);
    }
  };
  const cutlass::NumericArrayConverter<Element, float, 2> round;
  const auto round_to = [&](auto& to, const auto& from) {
    Tensor pairs = recast<cutlass::Array<Element, 2>>(to);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(from); i += 2) pairs(i / 2) = round(cutlass::Array<float, 2>{from(i), from(i + 1)});
  };
  // The gradient through a norm with the output `normalized`, y: rstd (g - mean(g) - y mean(g y)). The other warpgroup
  // has the other columns of these rows; finish() is called before both synchronise.
  const auto through_norm = [&](auto& g, const auto& normalized, const float (&rstd)[kRows], int features,
                                const auto& finish) {
    float2 row_sums[2] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(g); ++i) {  // two columns of a row, then two of the other row
      float2& sum = row_sums[i / 2 % 2];
      sum.x += g(i);
      sum.y = fmaf(g(i), static_cast<float>(normalized(i)), sum.y);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 1; step < 4; step *= 2) {
        row_sums[i].x += __shfl_xor_sync(~0u, row_sums[i].x, step);
        row_sums[i].y += __shfl_xor_sync(~0u, row_sums[i].y, step);
      }
      if (thread % 4 == 0) shared.row_sums[warpgroup][get<0>(places(2 * i))] = row_sums[i];
    }
    finish();
    sync();
    const float by = 1.f / static_cast<float>(features);
    float scale[2], shift[2], slope[2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = get<0>(places(2 * i));
      const float2 one = shared.row_sums[0][row], other = shared.row_sums[1][row];
      scale[i] = rstd[row];
      shift[i] = -scale[i] * by * (one.x + other.x);
      slope[i] = -scale[i] * by * (one.y + other.y);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(g); ++i) {
      const int row = i / 2 % 2;
      g(i) = fmaf(scale[row], g(i), fmaf(slope[row], static_cast<float>(normalized(i)), shift[row]));
    }
  };

  // The mask of a thread's positions is read one tile ahead, so that nothing waits for it.
  Element mask[2] = {Element(1.f), Element(1.f)};
  const auto read_mask = [&](PairPlace tile) {
    if (kOut || p.mask == nullptr || !p.tiles.has(tile)) return;
    const Element* const of_row = p.mask + tile.row * p.mask_row_stride;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int position = tile.place * kRows + get<0>(places(2 * i));
      if (position < p.tiles.n) mask[i] = of_row[position * p.mask_stride];  // beyond that the cotangent is zero
    }
  };

  // In the layout of the accumulators. Rows past the last one read that; no store writes them.
  const auto read_residual = [&](auto& fragment, PairPlace tile) {
    Tensor pairs = recast<cutlass::Array<Element, 2>>(fragment);
    const int first = get<1>(places(0));
    const Element* rows[2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int position = min(tile.place * kRows + get<0>(places(2 * i)), p.tiles.n - 1);
      rows[i] = p.residual.data + tile.row * p.residual.row_stride + position * p.residual.stride + first;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(fragment); i += 2) {
      const int column = i / 4 * 8;  // in this layout: pairs alternating between two rows, and then 8 columns further
      if (first + column < p.c) {
        pairs(i / 2) = *reinterpret_cast<const cutlass::Array<Element, 2>*>(rows[i / 2 % 2] + column);
      }
    }
  };

  fold_norms(p, shared);
  PairPlace tile = p.tiles.first();
  read_mask(tile);
  At at, next;
  if constexpr (kOut) {
    normalize_x(p, shared, next, tile);  // every CTA has a tile
    cutlass::arch::fence_view_async_shared();
    sync();
  }
  int former = -1;  // the stage that a store may still be reading
  while (p.tiles.has(tile)) {
    Stage& stage = shared.stages[at.index()];
    shared.normalized[at.index()].wait(at.phase());
    warpgroup_fence_operand(u);
    warpgroup_fence_operand(t);
    warpgroup_arrive();
    product_u.accumulate_ = product_t.accumulate_ = GMMA::ScaleOut::Zero;
    if constexpr (kOut) {
      multiply(product_u, stage.other.data(), InChannels{}, shared.w[0].data(), InMatrix{}, u);
    } else {
      multiply(product_u, stage.x.data(), InRows{}, shared.w[0].data(), InMatrix{}, u);
    }
    multiply(product_t, stage.x.data(), InRows{}, shared.w[1].data(), InMatrix{}, t);
    warpgroup_commit_batch();
    const PairPlace following = p.tiles.after(tile);
    const float factors[2] = {p.scale * static_cast<float>(mask[0]), p.scale * static_cast<float>(mask[1])};
    read_mask(following);
    Tensor du = make_tensor_like<Element>(u), dt = make_tensor_like<Element>(u);
    if constexpr (!kOut) {
      warpgroup_wait<1>();
      fence_sums();
      if (former >= 0 && thread % 32 == 0) shared.ring.free[former].arrive();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(u);
    warpgroup_fence_operand(t);

    Tensor du_pairs = recast<cutlass::Array<Element, 2>>(du), dt_pairs = recast<cutlass::Array<Element, 2>>(dt);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kColumns / 32; ++group) {
      // Only what one group needs is in registers at a time.
      read_grad(stage.grad.data(), du, 2 * group, 2);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 16; j += 2) {  // pairs of neighbouring columns, alternating between two rows
        const int i = 16 * group + j, in_tile = get<1>(places(i));
        const float2 bias_u = *reinterpret_cast<const float2*>(&shared.bias[0][in_tile]);
        const float2 bias_t = *reinterpret_cast<const float2*>(&shared.bias[1][in_tile]);
        cutlass::Array<float, 2> of_u, of_t;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float g = kOut ? static_cast<float>(du(i + v)) : factors[j / 2 % 2] * static_cast<float>(du(i + v));
          // The gate's small errors are lost in the sums that follow.
          float slope;
          const float tanh = tanh_approximate(fmaf(Gate::kTanhScale, t(i + v), v == 0 ? bias_t.x : bias_t.y));
          of_u[v] = g * Gate::from_tanh_with_slope(tanh, slope);
          of_t[v] = g * (u(i + v) + (v == 0 ? bias_u.x : bias_u.y)) * slope;
        }
        du_pairs(i / 2) = round(of_u);
        dt_pairs(i / 2) = round(of_t);
      }
      write_dz(du, stage.grad.data(), 2 * group, 2);
      write_dz(dt, shared.dt.data(), 2 * group, 2);
    }
    if (thread == 0) {
      tma_store_wait<0>();  // the store of the previous tile
      if (former >= 0) shared.ring.free[former].arrive();
    }
    cutlass::arch::fence_view_async_shared();
    sync();

    warpgroup_fence_operand(dx);
    warpgroup_fence_operand(d_o);
    fence_sums();
    warpgroup_arrive();
    product_x.accumulate_ = GMMA::ScaleOut::Zero;
    if constexpr (kOut) {
      multiply(product_x, stage.grad.data(), OfDz{}, shared.w[0].data(), InMatrixT{}, d_o);
      product_x.accumulate_ = GMMA::ScaleOut::Zero;
    } else {
      multiply(product_x, stage.grad.data(), OfDz{}, shared.w[0].data(), InMatrixT{}, dx);
    }
    multiply(product_x, shared.dt.data(), OfDz{}, shared.w[1].data(), InMatrixT{}, dx);
    warpgroup_commit_batch();
    if constexpr (kOut) {
      multiply(product_w0, stage.grad.data(), OfDzT{}, stage.other.data(), InChannelsT{}, dw0);
    } else {
      multiply(product_w0, stage.grad.data(), OfDzT{}, stage.x.data(), InRowsT{}, dw0);
    }
    multiply(product_w1, shared.dt.data(), OfDzT{}, stage.x.data(), InRowsT{}, dw1);
    multiply(product_sums, stage.grad.data(), OfDzT{}, shared.ones, Ones{}, db0);
    multiply(product_sums, shared.dt.data(), OfDzT{}, shared.ones, Ones{}, db1);
    warpgroup_commit_batch();
    Tensor residual = make_tensor_like<Element>(u);
    if constexpr (kOut) {
      ++next;
      if (p.tiles.has(following)) normalize_x(p, shared, next, following);
    }
    if constexpr (kAddsResidual)
      read_residual(residual, tile);  // arrives from the second-level cache during the products
    Tensor other = make_tensor_like<Element>(u);
    if constexpr (kOut) {
      read(from_channels, stage.other.data(), InChannels{}, other);
    } else {
      read(from_rows, stage.other.data(), InRows{}, other);
    }
    warpgroup_wait<1>();
    warpgroup_fence_operand(dx);
    warpgroup_fence_operand(d_o);

    Tensor result = make_tensor_like<Element>(u);
    if constexpr (kOut) {
      Tensor result_x = make_tensor_like<Element>(u);
      round_to(result_x, dx);  // now, because registers are few
      through_norm(d_o, other, shared.rstd[at.index()], p.d, [&] {
        warpgroup_wait<0>();  // both results overwrite what the products of dw have read
        fence_sums();
      });
      round_to(result, d_o);
      write(to_channels, result, stage.other.data(), InChannels{});
      write(to_rows, result_x, stage.x.data(), InRows{});
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(dx); ++i) dx(i) += static_cast<float>(other(i));
      if constexpr (kLast) {
        read(from_rows, stage.x.data(), InRows{}, other);
        through_norm(dx, other, shared.rstd[at.index()], p.c, [] {});
        if constexpr (kAddsResidual) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < size(dx); ++i) dx(i) += static_cast<float>(residual(i));
        }
      }
      round_to(result, dx);
      write(to_rows, result, stage.other.data(), InRows{});
    }
    cutlass::arch::fence_view_async_shared();
    sync();
    if (thread == 0) {
      if constexpr (kOut) p.d_o.store(stage.other.data(), 0, tile.place, tile.row);
      p.dxhat.store((kOut ? stage.x : stage.other).data(), tile.place, 0, tile.row);
    }
    former = at.index();
    tile = following;
    ++at;
  }
  warpgroup_wait<0>();
  fence_sums();
  if (thread == 0) tma_store_wait<0>();

  const int outputs = p.outputs();
  float* const of_u = p.partial + blockIdx.x * (p.sums(0) + p.sums(1));
  float* const of_t = of_u + p.sums(0);
  write_weight_sums(product_w0, dw0, thread, of_u, outputs, p.features(0));
  write_weight_sums(product_w1, dw1, thread, of_t, outputs, p.features(1));
  const Tensor rows =
      product_sums.get_slice(thread).partition_C(make_identity_tensor(cute::Shape<Int<kFeatures>, _8>{}));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(db0); ++i) {  // eight equal columns
    const auto [row, column] = rows(i);
    if (column == 0 && row < outputs) {
      of_u[int64_t{outputs} * p.features(0) + row] = db0(i);
      of_t[int64_t{outputs} * p.features(1) + row] = db1(i);
    }
  }
}

}  // namespace torchops::cuda::gemm
