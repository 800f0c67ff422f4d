#include <ATen/LegacyVmapTransforms.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/graph_task.h>

#include "autograd/autocast.h"
#include "autograd/functional.h"
#include "autograd/path.h"
#include "autograd/recipe.h"
#include "autograd/triangle_written_out.h"
#include "ops/triangle_multiplicative_update.h"

namespace torchops::autograd {
namespace {

using detail::OptionalTensor;
using detail::TriangleArguments;
using detail::TriangleOutputMask;
using detail::TriangleParameterList;
using detail::TriangleProduct;

// Function::apply accepts lists of tensors, but not lists with gaps. So it gets those of x, mask and parameters that
// are given, and `given` has one bit for each of them.
struct Form {
  int64_t given;
  bool outgoing;
  double eps;
  bool add_residual;
};

struct Inputs {
  Tensor x;
  OptionalTensor mask;
  TriangleParameterList parameters;

  Inputs(at::TensorList tensors, int64_t given) : x(tensors[0]) {
    size_t next = 1;
    const auto take = [&](size_t i) { return given >> i & 1 ? OptionalTensor(tensors[next++]) : std::nullopt; };
    mask = take(1);
    parameters.reserve(detail::kTriangleParameters);
    for (size_t i = 2; i < detail::kTriangleGradients; ++i) parameters.push_back(take(i));
  }
};

TriangleProduct list_of(Tensor product) {
  TriangleProduct list;
  list.push_back(std::move(product));
  return list;
}

// Saved variables are released only after backward() has returned, but the memory of o can be reused as soon as o has
// been read. So o, which nobody else holds and which cannot have changed, is stored in saved_data. Exceptions:
// saved-tensor hooks must see it (and then decide themselves how long to hold it), and so must tracing.
void keep_product(AutogradContext* ctx, variable_list& saved, Tensor product) {
  if (at::SavedTensorDefaultHooks::get_hooks() || is_traced(product)) {
    saved.push_back(std::move(product));
  } else {
    ctx->saved_data["product"] = std::move(product);
  }
}

TriangleProduct take_product(AutogradContext* ctx, variable_list& saved) {
  const auto kept = ctx->saved_data.find("product");
  if (kept == ctx->saved_data.end()) {
    Tensor product = std::move(saved.back());
    saved.pop_back();
    return list_of(std::move(product));
  }
  TORCH_CHECK(kept->second.isTensor(),
              "Trying to backward through the graph a second time, after the product of a "
              "triangle_multiplicative_update has been freed. Specify retain_graph=True.");
  Tensor product = kept->second.toTensor();
  if (!torch::autograd::get_current_graph_task_keep_graph()) kept->second = c10::IValue();
  return list_of(std::move(product));
}

// Saves x, the mask, the parameters and o, and recomputes everything else. With `add_residual`, the result is x plus
// the update; it overwrites `target`, which was x, if there is one.
struct Update : torch::autograd::Function<Update> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, at::TensorList tensors, const Form& form, const OptionalTensor& target) {
    at::AutoDispatchBelowAutograd below_autograd;
    save_path(ctx);
    const auto [x, mask, parameters] = Inputs(tensors, form.given);
    Tensor out, product;
    if (target) {
      check_can_be_saved(tensors);
      out = overwrite(*target, [&, &mask = mask, &parameters = parameters](Tensor& self) {
        product = detail::triangle_update_(self, mask, parameters, form.outgoing, form.eps, /*keep_product=*/true);
      });
    } else {
      std::tie(out, product) = detail::triangle_update(x, mask, parameters, form.outgoing, form.eps,
                                                       /*keep_product=*/true, form.add_residual);
    }
    variable_list saved = tensors.vec();
    keep_product(ctx, saved, std::move(product));
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["given"] = form.given;
    ctx->saved_data["outgoing"] = form.outgoing;
    ctx->saved_data["eps"] = form.eps;
    ctx->saved_data["add_residual"] = form.add_residual;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list saved = ctx->get_saved_variables();
    const TriangleProduct product = take_product(ctx, saved);
    const detail::KernelPathGuard on_path(saved_path(ctx));
    const int64_t given = ctx->saved_data["given"].toInt();
    TriangleOutputMask output_mask{};
    size_t edges = 0;
    for (size_t i = 0; i < output_mask.size(); ++i) output_mask[i] = given >> i & 1 && ctx->needs_input_grad(edges++);
    const auto [x, mask, parameters] = Inputs(at::TensorList(saved).slice(0, edges), given);
    // The gradient of the update, in the dtype of the parameters. If x is wider, its own gradient keeps the full
    // precision.
    const Tensor grad = grads[0].to(parameters.get(detail::kPA)->scalar_type());
    const bool is_sum = ctx->saved_data["add_residual"].toBool(),
               add_residual = is_sum && grad.scalar_type() == grads[0].scalar_type();
    const variable_list gradients =
        detail::triangle_update_backward(grad, x, product, mask, parameters, ctx->saved_data["outgoing"].toBool(),
                                         ctx->saved_data["eps"].toDouble(), output_mask, add_residual);
    variable_list out;
    for (size_t i = 0; i < output_mask.size(); ++i) {
      if (given >> i & 1) out.push_back(output_mask[i] ? gradients[i] : Tensor());
    }
    if (output_mask[0] && is_sum && !add_residual) out[0] = out[0] + grads[0];
    out.resize(out.size() + 2);  // for form and target
    return out;
  }
};

// g++ 13 of Ubuntu 24.04 warns about the empty std::vector<bool> of a new node, in which apply() reserves space for its
// three arguments: it assumes that the vector could be longer than its destination.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Warray-bounds"
#pragma GCC diagnostic ignored "-Wstringop-overflow"
Tensor apply(at::TensorList tensors, const Form& form, const OptionalTensor& target) {
  return Update::apply(tensors, form, target);
}
#pragma GCC diagnostic pop

Tensor train(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
             double eps, bool add_residual, const OptionalTensor& target = std::nullopt) {
  variable_list tensors;
  Form form{0, outgoing, eps, add_residual};
  const auto give = [&](size_t i, const OptionalTensor& tensor) {
    if (!tensor) return;
    form.given |= int64_t{1} << i;
    tensors.push_back(*tensor);
  };
  tensors.reserve(detail::kTriangleGradients);
  give(0, x);
  give(1, mask);
  for (size_t i = 0; i < parameters.size(); ++i) give(2 + i, parameters.get(i));
  return autograd::apply(tensors, form, target);
}

Tensor train(const TriangleArguments& t, bool add_residual, const OptionalTensor& target = std::nullopt) {
  return autograd::train(t.x, t.mask, detail::to_list(t), t.direction == "outgoing", t.eps, add_residual, target);
}

// --- the public operators, which take packed weights

struct Functional : FunctionalOp<Functional, triangle_multiplicative_update> {
  template <class... Args>
  static void check(const Args&... args) {
    detail::check_triangle("triangle_multiplicative_update", {args...}, false);
  }
  template <class... Args>
  static Tensor decomposed(const Args&... args) {
    return TriangleWrittenOut(detail::taken_apart({args...})).result();
  }
  template <class... Args>
  static Tensor train(const Args&... args) {
    return autograd::train(TriangleArguments{args...}, /*add_residual=*/false);
  }
};

template <auto function>
struct InPlaceOf;

template <class... Args, Tensor (*function)(const Tensor&, Args...)>
struct InPlaceOf<function> : MutatingOp<InPlaceOf<function>, Args...> {
  static constexpr const char* name = "add_triangle_multiplicative_update_";
  static void check(const Tensor& x, Args... args) {
    detail::check_triangle("add_triangle_multiplicative_update_", {x, args...}, true);
  }
  static Tensor decomposed(const Tensor& x, Args... args) {
    return x + Functional::decomposed(x, args...).to(x.scalar_type());
  }
  static Tensor functional(const Tensor& x, Args... args) {
    const TriangleArguments t{x, args...};
    return std::get<0>(detail::triangle_update(t.x, t.mask, detail::to_list(t), t.direction == "outgoing", t.eps,
                                               /*keep_product=*/false, /*add_residual=*/true));
  }
  static Tensor traced(const Tensor& x, Args... args) { return functional(detail::saved_copy(x), args...); }
  static void in_place(Tensor& x, Args... args) { add_triangle_multiplicative_update_(x, args...); }
  static Tensor train(const Tensor& x, const Tensor& target, Args... args) {
    return autograd::train(TriangleArguments{x.clone(), args...}, /*add_residual=*/true, target);
  }
};
using InPlace = InPlaceOf<triangle_multiplicative_update>;

// --- the private operators that they call

struct Beneath : FunctionalOp<Beneath, detail::triangle_update> {
  static void check(const Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                    double eps, bool, bool) {
    detail::check_triangle_update(x, mask, parameters, outgoing, eps);
  }
  // No product: only backward needs one, and here backward is ATen's.
  static std::tuple<Tensor, Tensor> without_product(const Tensor& y) { return {y, at::empty({0}, y.options())}; }
  static std::tuple<Tensor, Tensor> decomposed(const Tensor& x, const OptionalTensor& mask,
                                               const TriangleParameterList& parameters, bool outgoing, double eps,
                                               bool keep_product, bool add_residual) {
    TORCH_CHECK(!keep_product, "_triangle_multiplicative_update: expected keep_product=False under autograd, got True");
    const Tensor update = TriangleWrittenOut(detail::taken_apart(x, mask, parameters, outgoing, eps)).result();
    return without_product(add_residual ? (x + update).contiguous() : update);
  }
  static std::tuple<Tensor, Tensor> train(const Tensor& x, const OptionalTensor& mask,
                                          const TriangleParameterList& parameters, bool outgoing, double eps,
                                          bool keep_product, bool add_residual) {
    TORCH_CHECK(!keep_product, "_triangle_multiplicative_update: expected keep_product=False under autograd, got True");
    return without_product(autograd::train(x, mask, parameters, outgoing, eps, add_residual));
  }
};

// The model adapters call it only in inference.
Tensor below_autograd_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                       double eps, bool keep_product) {
  detail::check_triangle_update_(x, mask, parameters, outgoing, eps);
  TORCH_CHECK(!needs_decomposition(x, mask, parameters) && !needs_grad(x, mask, parameters),
              "_triangle_multiplicative_update_: expected no argument that needs a gradient or has a tangent, got one");
  at::AutoDispatchBelowAutograd below_autograd;
  return detail::triangle_update_(x, mask, parameters, outgoing, eps, keep_product);
}

Tensor beneath_version_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                        double eps, bool keep_product) {
  return bump_version_after(x,
                            [&] { return detail::triangle_update_(x, mask, parameters, outgoing, eps, keep_product); });
}

Tensor beneath_functionalized_(Tensor& x, const OptionalTensor& mask, const TriangleParameterList& parameters,
                               bool outgoing, double eps, bool keep_product) {
  detail::check_triangle_update_(x, mask, parameters, outgoing, eps);
  Tensor y, product;
  overwrite_with_new(x, [&] {
    std::tie(y, product) =
        detail::triangle_update(x, mask, parameters, outgoing, eps, keep_product, /*add_residual=*/true);
    return y;
  });
  return product;
}

// Differentiated only by double backward, which goes through o too and so recomputes it.
struct Backward : FunctionalOp<Backward, detail::triangle_update_backward> {
  static void check(const Tensor& grad, const Tensor& x, const TriangleProduct& product, const OptionalTensor& mask,
                    const TriangleParameterList& parameters, bool outgoing, double eps,
                    const TriangleOutputMask& output_mask, bool /*add_residual*/) {
    detail::check_triangle_update_backward(grad, x, product, mask, parameters, outgoing, eps, output_mask);
  }
  static std::vector<Tensor> decomposed(const Tensor& grad, const Tensor& x, const TriangleProduct&,
                                        const OptionalTensor& mask, const TriangleParameterList& parameters,
                                        bool outgoing, double eps, const TriangleOutputMask& output_mask,
                                        bool add_residual) {
    return TriangleWrittenOut(detail::taken_apart(x, mask, parameters, outgoing, eps))
        .gradients(grad, output_mask, add_residual);
  }
};

TORCH_LIBRARY_IMPL(myops, Autograd, m) {
  m.impl("triangle_multiplicative_update", Functional::autograd);
  m.impl("_triangle_multiplicative_update", Beneath::autograd);
  m.impl("_triangle_multiplicative_update_", below_autograd_);
  m.impl("_triangle_multiplicative_update_backward", Backward::autograd);
}

TORCHOPS_MUTATING(InPlace)

TORCH_LIBRARY_IMPL(myops, ADInplaceOrView, m) { m.impl("_triangle_multiplicative_update_", beneath_version_); }

TORCH_LIBRARY_IMPL(myops, Functionalize, m) { m.impl("_triangle_multiplicative_update_", beneath_functionalized_); }

TORCHOPS_LAZY("_triangle_multiplicative_update", detail::triangle_update)
TORCHOPS_LAZY("_triangle_multiplicative_update_", detail::triangle_update_)
TORCHOPS_LAZY("_triangle_multiplicative_update_backward", detail::triangle_update_backward)

// The places of the norms' parameters among the arguments, and in the list.
constexpr std::array<size_t, 4> kNorms{3, 4, 9, 10};
constexpr std::array<size_t, 4> kNormsOfList{detail::kNormIn, detail::kNormIn + 1, detail::kNormOut,
                                             detail::kNormOut + 1};

TORCHOPS_AUTOCAST(m) {
  m.impl("triangle_multiplicative_update", cast_parameters<triangle_multiplicative_update, kNorms>);
  m.impl("add_triangle_multiplicative_update_", cast_parameters<InPlace::in_place, kNorms>);
  m.impl("_triangle_multiplicative_update", cast_parameters<detail::triangle_update, kNormsOfList>);
  m.impl("_triangle_multiplicative_update_", cast_parameters<detail::triangle_update_, kNormsOfList>);
}

TORCH_LIBRARY_IMPL(myops, FuncTorchBatched, m) {
  m.impl("triangle_multiplicative_update", cast_parameters<Functional::batched, kNorms>);
  m.impl("add_triangle_multiplicative_update_", cast_parameters<InPlace::batched, kNorms>);
  m.impl("_triangle_multiplicative_update", cast_parameters<Beneath::batched, kNormsOfList>);
  m.impl("_triangle_multiplicative_update_backward", Backward::batched);
}

// Batched gradients (torch.autograd.grad(..., is_grads_batched=True)) have their own dispatch key. Its fallback calls
// an operator once per batch element, but doesn't support operators with lists of tensors. This does the same for them.
std::vector<Tensor> each_of_batch(const Tensor& grad, const Tensor& x, const TriangleProduct& product,
                                  const OptionalTensor& mask, const TriangleParameterList& parameters, bool outgoing,
                                  double eps, TriangleOutputMask output_mask, bool add_residual) {
  std::vector<Tensor> given{grad, x, *product.get(0)};
  if (mask) given.push_back(*mask);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters.get(i)) given.push_back(*parameters.get(i));
  }
  const auto views = at::MultiBatchVmapTransform::logicalToPhysical(at::TensorList(given));
  const int64_t batch_dims = views[0].numBatchDims();
  const at::DimVector batch(views[0].tensor().sizes().slice(0, batch_dims));
  std::vector<std::vector<Tensor>> results(detail::kTriangleGradients);
  for (int64_t index = 0; index < c10::multiply_integers(batch); ++index) {
    size_t next = 0;
    const auto take = [&] {
      const Tensor& physical = views[next++].tensor();
      return detail::batch_element(physical, physical.dim() - batch_dims, index);
    };
    const Tensor grad_i = take(), x_i = take(), product_i = take();
    const OptionalTensor mask_i = mask ? OptionalTensor(take()) : mask;
    TriangleParameterList parameters_i;
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters_i.push_back(parameters.get(i) ? OptionalTensor(take()) : std::nullopt);
    }
    const auto gradients = detail::triangle_update_backward(grad_i, x_i, list_of(product_i), mask_i, parameters_i,
                                                            outgoing, eps, output_mask, add_residual);
    for (size_t i = 0; i < results.size(); ++i) results[i].push_back(gradients[i]);
  }
  std::vector<Tensor> out;
  for (const std::vector<Tensor>& of_batch : results) {
    const Tensor stacked = of_batch.empty() ? at::empty({0}, x.options()) : at::stack(of_batch);
    at::DimVector shape(batch);
    shape.append(stacked.sizes().begin() + 1, stacked.sizes().end());
    out.push_back(views[0].getPhysicalToLogicalMap().apply(stacked.reshape(shape)));
  }
  return out;
}

TORCH_LIBRARY_IMPL(myops, Batched, m) { m.impl("_triangle_multiplicative_update_backward", each_of_batch); }

}  // namespace
}  // namespace torchops::autograd
