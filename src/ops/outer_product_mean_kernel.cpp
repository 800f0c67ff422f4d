#include <ATen/ops/addmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/matrices.h"
#include "ops/outer_product_mean.h"

// For every backend, since it calls nothing but ATen's operators.
namespace torchops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Of one tensor of scratch. A block of the forward pass stays in the L2 cache between its steps. Backward adds to the
// gradients of b and of the weight with each block, so its blocks on a GPU are larger.
int64_t scratch_bytes(const Tensor& a, bool is_backward) {
  return int64_t{!a.is_cuda() ? 4 : is_backward ? 128 : 32} << 20;
}

// at::mm would copy other matrices anew for each block.
Tensor readable(const Tensor& t) {
  const int64_t rows = t.size(-2), columns = t.size(-1);
  const bool as_it_is = (t.stride(-1) == 1 && t.stride(-2) >= columns) || (t.stride(-2) == 1 && t.stride(-1) >= rows);
  return as_it_is ? t : t.contiguous();
}

int64_t batch_of(const Tensor& a) { return c10::multiply_integers(a.sizes().slice(0, a.dim() - 3)); }

// (*batch, S, N, C) as (batch, S, N * C).
Tensor as_matrices(const Tensor& t) { return readable(t.reshape({batch_of(t), t.size(-3), t.size(-2) * t.size(-1)})); }

// sum += x @ y, where a sum of 16-bit products is float32.
void add_product(Tensor sum, const Tensor& x, const Tensor& y) {
  if (sum.scalar_type() == x.scalar_type()) {
    at::addmm_out(sum, sum, x, y);
  } else if (!x.is_cuda()) {
    sum.add_(at::mm(x, y));
  } else {
    const int64_t rest = detail::rows_cublas_may_leave_out(x.t(), y), whole = y.size(0) - rest;
    const auto add = [&](int64_t begin, int64_t size) {
      if (size > 0) at::addmm_out(sum, sum, x.narrow(1, begin, size), y.narrow(0, begin, size), at::kFloat);
    };
    add(0, whole);
    add(whole, rest);
  }
}

// The pairs of a block: rows [begin, begin + count) of a batch element with all columns.
struct Block {
  int64_t element, begin, count;
};

class Pairs {
 public:
  /// `multiplies`: whether divided() is called, for which there is more scratch.
  Pairs(const Tensor& a, const Tensor& b, const OptionalTensor& norm, bool is_backward, bool multiplies)
      : batch_(batch_of(a)),
        s_(a.size(-3)),
        n_(a.size(-2)),
        m_(b.size(-2)),
        c_(a.size(-1)),
        d_(b.size(-1)),
        a_(as_matrices(a)),
        b_(as_matrices(b)) {
    if (norm) norm_ = norm->reshape({batch_, n_, m_});
    // cuBLAS may leave out the last sequences of a 16-bit sum over them.
    const bool padded = a.is_cuda() && a.element_size() == 2 && s_ > detail::kRowsOfCublasTile;
    if (const int64_t rest = s_ % detail::kRowsOfCublasTile; padded && rest > 0) {
      for (Tensor* t : {&a_, &b_}) *t = at::constant_pad_nd(*t, {0, 0, 0, detail::kRowsOfCublasTile - rest});
    }
    const int64_t row = m_ * c_ * d_, bytes = std::max<int64_t>(row * a.element_size(), 1);
    rows_ = std::clamp<int64_t>(scratch_bytes(a, is_backward) / bytes, 1, std::max<int64_t>(n_, 1));
    // It may round the parts of a small one, too.
    const bool wide = padded && rows_ * row < int64_t{1} << 22;
    if (multiplies) outer_ = at::empty({rows_, c_, m_, d_}, wide ? a.options().dtype(at::kFloat) : a.options());
    divided_ = at::empty({rows_, m_, c_, d_}, a.options());
  }

  template <class F>
  void for_each_block(const F& f) const {
    for (int64_t element = 0; element < batch_; ++element) {
      for (int64_t begin = 0; begin < n_; begin += rows_) f(Block{element, begin, std::min(rows_, n_ - begin)});
    }
  }

  // Scratch for one value of each outer product, like the result of divided().
  Tensor more_scratch() const { return at::empty_like(divided_); }

  // (*batch, N, M, size) as (batch, N, M, size), and of that the rows of a block as a matrix (count * M, size). Views
  // if strides allow it.
  Tensor as_pairs(const Tensor& t) const { return t.reshape({batch_, n_, m_, t.size(-1)}); }
  Tensor rows(const Tensor& t, const Block& block) const {
    return t.select(0, block.element).narrow(0, block.begin, block.count).reshape({block.count * m_, t.size(-1)});
  }

  // The outer products of a block, divided: (count * M, C * D). Overwritten by the next call, and by undivided().
  Tensor divided(const Block& block) const {
    Tensor outer = outer_.narrow(0, 0, block.count), h = divided_.narrow(0, 0, block.count);
    Tensor product = outer.view({block.count * c_, m_ * d_});
    const Tensor x = columns(a_, block).t(), y = b_.select(0, block.element);
    if (product.scalar_type() == x.scalar_type()) {
      at::mm_out(product, x, y);
    } else {
      at::mm_out(product, x, y, at::kFloat);
    }
    divide(h, outer.transpose(1, 2), block, 2);
    return flat(h);
  }

  // Back from a gradient of divided() to that of the outer products: (count * C, M * D).
  Tensor undivided(const Tensor& dh, const Block& block) const {
    Tensor out = divided_.view({rows_, c_, m_, d_}).narrow(0, 0, block.count);
    divide(out, dh.view({block.count, m_, c_, d_}).transpose(1, 2), block, 1);
    return out.view({block.count * c_, m_ * d_});
  }

  Tensor flat(const Tensor& h) const { return h.view({h.size(0) * m_, c_ * d_}); }

  // (S, count * C) of a, or of its gradient.
  Tensor columns(const Tensor& matrices, const Block& block) const {
    return matrices.select(0, block.element).narrow(1, block.begin * c_, block.count * c_);
  }
  Tensor a(const Block& block) const { return columns(a_, block).narrow(0, 0, s_); }
  Tensor b(const Block& block) const { return b_.select(0, block.element).narrow(0, 0, s_); }
  Tensor norm(const Block& block) const { return norm_.select(0, block.element).narrow(0, block.begin, block.count); }

 private:
  // `channels` is the dimension of C in `to`, which has the pairs (count, M) around it.
  void divide(Tensor& to, const Tensor& from, const Block& block, int64_t channels) const {
    if (!norm_.defined()) {
      to.copy_(from);
    } else {
      at::div_out(to, from, norm(block).unsqueeze(-1).unsqueeze(channels));
    }
  }

  int64_t batch_, s_, n_, m_, c_, d_, rows_;
  Tensor a_, b_, norm_, outer_, divided_;
};

Tensor outer_product_mean_kernel(const Tensor& a, const Tensor& b, const Tensor& weight, const OptionalTensor& bias,
                                 const OptionalTensor& norm) {
  check_outer_product_mean(a, b, weight, bias, norm);
  Tensor out = detail::empty_outer_product_mean(a, b, weight);
  if (out.numel() == 0) return out;
  const Pairs pairs(a, b, norm, /*is_backward=*/false, /*multiplies=*/true);
  const Tensor w = readable(weight).t(), out_pairs = pairs.as_pairs(out);
  pairs.for_each_block([&](const Block& block) {
    const Tensor h = pairs.divided(block);
    Tensor rows = pairs.rows(out_pairs, block);
    if (bias) {
      at::addmm_out(rows, *bias, h, w);
    } else {
      at::mm_out(rows, h, w);
    }
  });
  return out;
}

// With h the divided outer products and the cotangent g: dh = g @ weight, dweight = g.T @ h, dnorm = -sum(dh * h) /
// norm; then da = b @ (dh / norm).T and db = a @ (dh / norm), where the pairs are ordered as in the outer products.
detail::OuterProductGradients outer_product_mean_backward_kernel(const Tensor& grad, const Tensor& a, const Tensor& b,
                                                                 const Tensor& weight, const OptionalTensor& norm,
                                                                 detail::OuterProductOutputMask output_mask) {
  detail::check_outer_product_mean_backward(grad, a, b, weight, norm, output_mask);
  auto [da, db, dweight, dnorm] = detail::empty_outer_product_gradients(a, b, weight, norm, output_mask);
  const auto [for_a, for_b, for_weight, for_norm] = output_mask;
  const bool needs_h = for_weight || for_norm, needs_dh = for_a || for_b || for_norm;
  if (!needs_h && !needs_dh) return {da, db, dweight, dnorm};
  const Pairs pairs(a, b, norm, /*is_backward=*/true, /*multiplies=*/needs_h);
  const Tensor w = readable(weight), grad_pairs = pairs.as_pairs(grad);
  const Tensor scratch = needs_dh ? pairs.more_scratch() : Tensor();
  // Sums of blocks in 16 bits are float32.
  const bool widens = a.element_size() == 2;
  const auto zeros_for = [&](const Tensor& gradient) {
    return widens ? at::zeros(gradient.sizes(), a.options().dtype(at::kFloat)) : gradient.zero_();
  };
  const int64_t batch = batch_of(a), s = a.size(-3);
  const Tensor da_matrices = for_a ? da.view({batch, s, a.size(-2) * a.size(-1)}) : Tensor();
  const Tensor db_sum = for_b ? zeros_for(db).view({batch, s, b.size(-2) * b.size(-1)}) : Tensor();
  const Tensor dweight_sum = for_weight ? zeros_for(dweight) : Tensor();
  pairs.for_each_block([&](const Block& block) {
    const Tensor g = pairs.rows(grad_pairs, block);
    Tensor h, dh;
    if (needs_h) h = pairs.divided(block);
    if (for_weight) add_product(dweight_sum, g.t(), h);
    if (!needs_dh) return;
    dh = pairs.flat(scratch.narrow(0, 0, block.count));
    at::mm_out(dh, g, w);
    if (for_norm) {
      Tensor dnorm_rows = dnorm.view({batch, a.size(-2), b.size(-2)}).select(0, block.element);
      dnorm_rows = dnorm_rows.narrow(0, block.begin, block.count);
      at::sum_out(dnorm_rows, h.mul_(dh).view({block.count, b.size(-2), weight.size(1)}), {-1});
      dnorm_rows.div_(pairs.norm(block)).neg_();
    }
    if (!for_a && !for_b) return;
    const Tensor d_outer = pairs.undivided(dh, block);
    if (for_a) {
      Tensor da_columns = pairs.columns(da_matrices, block);
      at::mm_out(da_columns, pairs.b(block), d_outer.t());
    }
    if (for_b) add_product(db_sum.select(0, block.element), pairs.a(block), d_outer);
  });
  if (for_b && widens) db.copy_(db_sum.view(b.sizes()));
  if (for_weight && widens) dweight.copy_(dweight_sum);
  return {da, db, dweight, dnorm};
}

TORCH_LIBRARY_IMPL(myops, CompositeExplicitAutograd, m) {
  m.impl("outer_product_mean", outer_product_mean_kernel);
  m.impl("_outer_product_mean_backward", outer_product_mean_backward_kernel);
}

}  // namespace
}  // namespace torchops
