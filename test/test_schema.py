"""A snapshot of what the library registers: schemas, tags, and kernels by dispatch key.

To accept a change, run pytest with EXPECTTEST_ACCEPT=1.
"""

# ruff: noqa: E501 (schemas are long)
from __future__ import annotations

import expecttest
import pytest
import torch
from op_db import OPS, SCALED, UPDATES

KEYS = (
    *("CPU", "Meta", "Autograd", "ADInplaceOrView", "Functionalize", "AutocastCPU", "AutocastCUDA", "FuncTorchBatched"),
    "CompositeExplicitAutograd",
)


def operators() -> list[torch._C.FunctionSchema]:
    names = sorted(str(name) for name in torch._C._dispatch_get_all_op_names() if str(name).startswith("myops::"))
    return [torch._C._get_schema(*name.partition(".")[::2]) for name in names]


def full_name(schema: torch._C.FunctionSchema) -> str:
    """With the name of the overload, if it has one, as the dispatcher knows it."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def registered(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


class TestSnapshot(expecttest.TestCase):
    def test_schemas(self) -> None:
        self.assertExpectedInline(
            "\n".join(map(str, operators())),
            """\
myops::_add_transition(Tensor x, *, Tensor? norm_weight=None, Tensor? norm_bias=None, Tensor gate_weight, Tensor? gate_bias=None, Tensor up_weight, Tensor? up_bias=None, Tensor down_weight, Tensor? down_bias=None, float eps=1.0000000000000001e-05) -> Tensor
myops::_dense_backward(Tensor grad, Tensor y, bool[2] output_mask=[True, True]) -> (Tensor, Tensor)
myops::_dense_gradients(Tensor grad, Tensor y, Tensor x, Tensor w, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
myops::_dense_on_path(Tensor x, Tensor w, Tensor? b, str path) -> Tensor
myops::_gate(Tensor v, Tensor x, Tensor w, Tensor? b) -> (Tensor, Tensor)
myops::_gate_backward(Tensor grad, Tensor v, Tensor x, Tensor w, Tensor? b, bool[4] output_mask, bool v_is_y=False, Tensor? z=None) -> (Tensor, Tensor, Tensor, Tensor)
myops::_glu(Tensor x, Tensor w, Tensor wg, Tensor? b, Tensor? bg, str activation) -> (Tensor, Tensor, Tensor)
myops::_glu_backward(Tensor grad, Tensor x, Tensor w, Tensor wg, Tensor? b, Tensor? bg, str activation, bool[5] output_mask, Tensor? z=None, Tensor? u=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
myops::_keeps_products(Tensor x, Tensor w, bool of_glu) -> bool
myops::_kernel_path(str? path=None) -> str
myops::_layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)
myops::_layer_norm_(Tensor(a!) x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)
myops::_layer_norm_backward(Tensor grad, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
myops::_linear(Tensor x, Tensor w, Tensor? b=None) -> Tensor
myops::_only_candidate(int way, int tiling) -> int[]
myops::_outer_product_mean_backward(Tensor grad, Tensor a, Tensor b, Tensor weight, Tensor? norm, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)
myops::_pretended_device() -> int[]
myops::_saved_copy(Tensor x) -> Tensor
myops::_softmax_backward(Tensor grad, Tensor y, int dim) -> Tensor
myops::_transition(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor gate_weight, Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, Tensor down_weight, Tensor? down_bias, float eps, bool add_residual) -> (Tensor, Tensor, Tensor)
myops::_transition_backward(Tensor grad, Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor gate_weight, Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, Tensor down_weight, float eps, bool[9] output_mask, bool add_residual=False, Tensor? up=None, Tensor? gate=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
myops::_triangle_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, float scale) -> (Tensor, Tensor)
myops::_triangle_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, Tensor out, Tensor logsumexp, float scale, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)
myops::_triangle_attention_core(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, float scale, bool scaled, Tensor(a!) out, Tensor(b!) logsumexp) -> bool
myops::_triangle_attention_update(Tensor x, Tensor? mask, Tensor?[] parameters, int heads, float eps, bool ending, bool add_residual=False) -> Tensor
myops::_triangle_attention_update_(Tensor(a!) x, Tensor? mask, Tensor?[] parameters, int heads, float eps, bool ending) -> ()
myops::_triangle_attention_update_backward(Tensor grad, Tensor x, Tensor product, Tensor logsumexp, Tensor? mask, Tensor?[] parameters, int heads, float eps, bool ending, bool[11] output_mask, bool low_memory=False, bool add_residual=False) -> Tensor[]
myops::_triangle_attention_update_kept(Tensor x, Tensor? mask, Tensor?[] parameters, int heads, float eps, bool ending, bool add_residual=False) -> (Tensor, Tensor, Tensor)
myops::_triangle_multiplicative_update(Tensor x, Tensor? mask, Tensor?[] parameters, bool outgoing, float eps, bool keep_product=False, bool add_residual=False) -> (Tensor, Tensor)
myops::_triangle_multiplicative_update_(Tensor(a!) x, Tensor? mask, Tensor?[] parameters, bool outgoing, float eps, bool keep_product=False) -> Tensor
myops::_triangle_multiplicative_update_backward(Tensor grad, Tensor x, Tensor?[] product, Tensor? mask, Tensor?[] parameters, bool outgoing, float eps, bool[18] output_mask, bool add_residual=False) -> Tensor[]
myops::_triangle_rows_in(Tensor x, Tensor? mask, Tensor?[] parameters, float scale, float eps, Tensor(a!) a, Tensor(b!) b) -> bool
myops::_triangle_rows_in_backward(Tensor da, Tensor db, Tensor x, Tensor? mask, Tensor?[] parameters, float scale, float eps, Tensor moments, Tensor(a!) dz, Tensor? residual, Tensor(b!) sums) -> bool
myops::_triangle_rows_out(Tensor o, Tensor x, Tensor?[] parameters, float eps, float eps_out, Tensor(a!) out, bool add_residual) -> bool
myops::_triangle_rows_out_backward(Tensor grad, Tensor o, Tensor x, Tensor?[] parameters, float eps, float eps_out, Tensor(a!) d_o, Tensor(b!) dz, Tensor(c!) moments, Tensor(d!) sums) -> bool
myops::_triangle_rows_parameter_gradients(Tensor sums, Tensor?[] parameters, bool[16] output_mask) -> Tensor[]
myops::add_transition_(Tensor(a!) x, *, Tensor? norm_weight=None, Tensor? norm_bias=None, Tensor gate_weight, Tensor? gate_bias=None, Tensor up_weight, Tensor? up_bias=None, Tensor down_weight, Tensor? down_bias=None, float eps=1.0000000000000001e-05) -> ()
myops::add_triangle_multiplicative_update_(Tensor(a!) x, str direction="outgoing", *, Tensor? mask=None, Tensor? norm_in_weight=None, Tensor? norm_in_bias=None, Tensor p_in_weight, Tensor? p_in_bias=None, Tensor g_in_weight, Tensor? g_in_bias=None, Tensor? norm_out_weight=None, Tensor? norm_out_bias=None, Tensor p_out_weight, Tensor? p_out_bias=None, Tensor g_out_weight, Tensor? g_out_bias=None, float eps=1.0000000000000001e-05) -> ()
myops::dense(Tensor x, Tensor w, Tensor? b=None) -> Tensor
myops::dense.scaled(Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, Tensor? b=None, *, ScalarType? out_dtype=None) -> Tensor
myops::gate(Tensor v, Tensor x, Tensor w, Tensor? b=None) -> Tensor
myops::gate.scaled(Tensor v, Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, Tensor? b=None) -> Tensor
myops::gate_(Tensor(a!) v, Tensor x, Tensor w, Tensor? b=None) -> ()
myops::glu(Tensor x, Tensor w, Tensor wg, Tensor? b=None, Tensor? bg=None, *, str activation="sigmoid") -> Tensor
myops::glu.scaled(Tensor x, Tensor w, Tensor wg, Tensor scale_x, Tensor scale_w, Tensor scale_wg, Tensor? b=None, Tensor? bg=None, *, str activation="sigmoid", ScalarType? out_dtype=None) -> Tensor
myops::layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1.0000000000000001e-05) -> Tensor
myops::layer_norm_(Tensor(a!) x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1.0000000000000001e-05) -> ()
myops::outer_product_mean(Tensor a, Tensor b, Tensor weight, Tensor? bias=None, Tensor? norm=None) -> Tensor
myops::sigmoid(Tensor x) -> Tensor
myops::sigmoid_(Tensor(a!) x) -> ()
myops::softmax(Tensor x, int dim=-1) -> Tensor
myops::softmax_(Tensor(a!) x, int dim=-1) -> ()
myops::square_matmul(Tensor a, Tensor b, *, bool transpose_b=False) -> Tensor
myops::square_matmul_(Tensor(a!) a, Tensor b, *, bool transpose_b=False) -> ()
myops::transition(Tensor x, *, Tensor? norm_weight=None, Tensor? norm_bias=None, Tensor gate_weight, Tensor? gate_bias=None, Tensor up_weight, Tensor? up_bias=None, Tensor down_weight, Tensor? down_bias=None, float eps=1.0000000000000001e-05) -> Tensor
myops::triangle_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask=None, float? scale=None) -> Tensor
myops::triangle_multiplicative_update(Tensor x, str direction="outgoing", *, Tensor? mask=None, Tensor? norm_in_weight=None, Tensor? norm_in_bias=None, Tensor p_in_weight, Tensor? p_in_bias=None, Tensor g_in_weight, Tensor? g_in_bias=None, Tensor? norm_out_weight=None, Tensor? norm_out_bias=None, Tensor p_out_weight, Tensor? p_out_bias=None, Tensor g_out_weight, Tensor? g_out_bias=None, float eps=1.0000000000000001e-05) -> Tensor""",
        )

    def test_dispatch_table(self) -> None:
        width = max(len(full_name(s)) for s in operators())
        header = " " * width + "  " + "  ".join(KEYS)
        rows = [
            f"{full_name(s):{width}}  "
            + "  ".join(("x" if registered(full_name(s), k) else ".").ljust(len(k)) for k in KEYS)
            for s in operators()
        ]
        self.assertExpectedInline(
            "\n".join(line.rstrip() for line in [header, *rows]),
            """\
                                                 CPU  Meta  Autograd  ADInplaceOrView  Functionalize  AutocastCPU  AutocastCUDA  FuncTorchBatched  CompositeExplicitAutograd
myops::_add_transition                           x    x     x         .                .              x            x             x                 x
myops::_dense_backward                           x    x     x         .                .              .            .             x                 x
myops::_dense_gradients                          .    x     x         .                .              .            .             x                 x
myops::_dense_on_path                            .    .     x         .                .              x            x             x                 x
myops::_gate                                     x    x     .         .                .              .            .             .                 x
myops::_gate_backward                            x    x     x         .                .              .            .             x                 x
myops::_glu                                      x    x     .         .                .              .            .             .                 x
myops::_glu_backward                             x    x     x         .                .              .            .             x                 x
myops::_keeps_products                           .    .     .         .                .              .            .             .                 .
myops::_kernel_path                              .    .     .         .                .              .            .             .                 .
myops::_layer_norm                               x    x     .         .                .              .            .             .                 x
myops::_layer_norm_                              x    x     .         x                x              .            .             .                 x
myops::_layer_norm_backward                      x    x     .         .                .              .            .             .                 x
myops::_linear                                   .    x     x         .                .              x            x             x                 x
myops::_only_candidate                           .    .     .         .                .              .            .             .                 .
myops::_outer_product_mean_backward              .    x     x         .                .              .            .             x                 x
myops::_pretended_device                         .    .     .         .                .              .            .             .                 .
myops::_saved_copy                               .    x     x         .                .              .            .             x                 x
myops::_softmax_backward                         .    x     x         .                .              .            .             x                 x
myops::_transition                               x    x     .         .                .              .            .             .                 x
myops::_transition_backward                      x    x     x         .                .              .            .             x                 x
myops::_triangle_attention                       x    x     x         .                .              .            .             .                 .
myops::_triangle_attention_backward              x    x     x         .                .              .            .             x                 .
myops::_triangle_attention_core                  .    .     .         .                .              .            .             .                 x
myops::_triangle_attention_update                x    x     x         .                .              x            x             x                 .
myops::_triangle_attention_update_               x    x     x         x                x              x            x             x                 .
myops::_triangle_attention_update_backward       x    x     x         .                .              .            .             x                 .
myops::_triangle_attention_update_kept           x    x     x         .                .              .            .             .                 .
myops::_triangle_multiplicative_update           x    x     x         .                .              x            x             x                 .
myops::_triangle_multiplicative_update_          x    x     x         x                x              x            x             .                 .
myops::_triangle_multiplicative_update_backward  x    x     x         .                .              .            .             x                 .
myops::_triangle_rows_in                         .    x     .         .                .              .            .             .                 x
myops::_triangle_rows_in_backward                .    x     .         .                .              .            .             .                 x
myops::_triangle_rows_out                        .    x     .         .                .              .            .             .                 x
myops::_triangle_rows_out_backward               .    x     .         .                .              .            .             .                 x
myops::_triangle_rows_parameter_gradients        .    x     .         .                .              .            .             .                 x
myops::add_transition_                           x    x     x         x                x              x            x             x                 .
myops::add_triangle_multiplicative_update_       x    x     x         x                x              x            x             x                 .
myops::dense                                     x    x     x         .                .              x            x             x                 .
myops::dense.scaled                              x    x     x         .                .              .            .             .                 x
myops::gate                                      x    x     x         .                .              x            x             x                 .
myops::gate.scaled                               x    x     x         .                .              .            .             .                 x
myops::gate_                                     x    x     x         x                x              x            x             x                 .
myops::glu                                       x    x     x         .                .              x            x             x                 .
myops::glu.scaled                                x    x     x         .                .              .            .             .                 x
myops::layer_norm                                x    x     x         .                .              x            x             x                 .
myops::layer_norm_                               x    x     x         x                x              x            x             x                 .
myops::outer_product_mean                        .    x     x         .                .              x            x             x                 x
myops::sigmoid                                   x    x     x         .                .              .            .             x                 .
myops::sigmoid_                                  x    x     x         x                x              .            .             x                 .
myops::softmax                                   x    x     x         .                .              x            x             x                 .
myops::softmax_                                  x    x     x         x                x              x            x             x                 .
myops::square_matmul                             x    x     x         .                .              x            x             x                 .
myops::square_matmul_                            x    x     x         x                x              x            x             x                 .
myops::transition                                x    x     x         .                .              x            x             x                 .
myops::triangle_attention                        x    x     x         .                .              x            x             x                 .
myops::triangle_multiplicative_update            x    x     x         .                .              x            x             x                 .""",
        )


def test_every_public_operator_is_tested() -> None:
    public = {full_name(s).removeprefix("myops::") for s in operators() if not s.name.startswith("myops::_")}
    assert {case.name for case in (*OPS, *SCALED, *UPDATES) if not case.private} == public


def test_operators_are_compliant() -> None:
    """Every operator promises PyTorch 2 that its fake kernel and its schema are right; opcheck holds it to that."""
    for schema in operators():
        packet = getattr(torch.ops.myops, schema.name.removeprefix("myops::"))
        op = getattr(packet, schema.overload_name or "default")
        assert torch.Tag.pt2_compliant_tag in op.tags, full_name(schema)


# Registered from Python for both devices, in every build.
IN_PYTHON = {f"myops::{name}" for name in ("triangle_attention", "_triangle_attention", "_triangle_attention_backward")}
IN_PYTHON |= {f"myops::_triangle_attention_update{suffix}" for suffix in ("", "_", "_kept", "_backward")}


def test_cuda_column() -> None:
    """In a build with CUDA every operator with a CPU kernel has a CUDA kernel too; one without has those from Python."""
    on_cuda = {full_name(s) for s in operators() if registered(full_name(s), "CUDA")}
    assert on_cuda >= IN_PYTHON
    on_cpu = {full_name(s) for s in operators() if registered(full_name(s), "CPU")}
    composite = {full_name(s) for s in operators() if registered(full_name(s), "CompositeExplicitAutograd")}
    if not on_cuda - composite - IN_PYTHON:
        pytest.skip("this build has no CUDA kernels")
    assert on_cuda >= on_cpu
