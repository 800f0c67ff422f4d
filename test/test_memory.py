"""In place means in place: growth of the peak resident memory in calls that record no gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_growth import A_FEW_MIB, growth, growths, needs_proc

pytestmark = needs_proc

CALLS = {
    "gate_": "torchops.gate_(t, torch.ones(1, 1).to(t).expand(t.shape[0], 1), torch.ones(t.shape[-1], 1).to(t))",
    "gate_by_itself_": "torchops.gate_(t, t, torch.eye(t.shape[-1], dtype=t.dtype))",
    "gate_mixed_": "torchops.gate_(t, t, torch.eye(t.shape[-1], dtype=torch.bfloat16))",
    "sigmoid_": "torchops.sigmoid_(t)",
    "square_matmul_": "torchops.square_matmul_(t, torch.eye(t.shape[-1], dtype=t.dtype) * 0.5)",
    "square_matmul_tb_": "torchops.square_matmul_(t, torch.eye(t.shape[-1], dtype=t.dtype) * 0.5, transpose_b=True)",
    "square_matmul_of_a_batch_": (
        "torchops.square_matmul_(t.view(-1, 64, 256), torch.eye(256).to(t).expand(len(t) // 64, 256, 256))"
    ),
    "softmax_": "torchops.softmax_(t)",
    "softmax_dim0_": "torchops.softmax_(t, 0)",
    "layer_norm_": "torchops.layer_norm_(t, [t.shape[-1]])",
    "add_transition_": (
        "torchops.add_transition_(t, gate_weight=torch.ones(64, t.shape[-1]), up_weight=torch.ones(64, t.shape[-1]),"
        " down_weight=torch.ones(t.shape[-1], 64))"
    ),
    "layer_norm_affine_": "torchops.layer_norm_(t, [t.shape[-1]], torch.ones(t.shape[-1]), torch.ones(t.shape[-1]))",
}


INFERENCE = """
t = filled(64, 256, dtype={dtype})
{call}
t = filled({rows}, 256, dtype={dtype})
growth(lambda: {call})
"""


@pytest.mark.xdist_group("memory of inference")
@pytest.mark.parametrize("name", CALLS)
def test_inference(name: str) -> None:
    """256 MiB, without gradients, after a call on a small tensor."""
    programs = (INFERENCE.format(call=call, dtype="torch.float32", rows=2**18) for call in CALLS.values())
    assert growths(*programs)[list(CALLS).index(name)] <= A_FEW_MIB


@pytest.mark.parametrize(
    "call",
    ["torchops.sigmoid_(t)", "torchops.softmax_(t)", "torchops.layer_norm_(t, [t.shape[-1]])"],
    ids=["sigmoid_", "softmax_", "layer_norm_"],
)
def test_one_long_row(call: str) -> None:
    """One row of 2^27 elements, which no panel of rows can cut."""
    program = f"""
    t = filled(1, 256)
    {call}
    t = filled(1, 2**27)
    growth(lambda: {call})
    """
    assert growth(program) <= A_FEW_MIB


@pytest.mark.parametrize("shape", ["1, 2**26", "2, 2**25", "2**13, 2**13", "2, 2, 2**24"])
def test_long_rows_of_several_dimensions(shape: str) -> None:
    """256 MiB in one row, whose first dimension is no measure of what a slice of it takes."""
    program = f"""
    torchops.layer_norm_(filled(1, 2**21), [1, 2**21])
    t = filled({shape})
    growth(lambda: torchops.layer_norm_(t, t.shape))
    """
    assert growth(program) <= A_FEW_MIB


def test_matrices_with_gaps() -> None:
    """256 MiB of matrices that BLAS cannot read are not copied as a whole."""
    for matrices, n in ((2**14, 64), (16, 2**11)):
        program = f"""
        def matrices(count):
            return filled(count, {n}, {n}), filled(count, {n}, {n}, 2)[..., 0]

        torchops.square_matmul_(*matrices(4))
        a, b = matrices({matrices})
        growth(lambda: torchops.square_matmul_(a, b))
        """
        assert growth(program) <= A_FEW_MIB + n * n * 4 / 2**20


@pytest.mark.parametrize("call", ["gate_(v, x, w)", "gate(v, x, w)", "glu(x, w, w)"])
def test_gates_of_features_with_gaps(call: str) -> None:
    """256 MiB of rows that BLAS cannot read are not copied as a whole, either."""
    program = f"""
    def arguments(rows):
        return filled(rows, 8), filled(rows, 2**13, 2)[..., 0], filled(8, 2**13)

    v, x, w = arguments(64)
    torchops.{call}
    v, x, w = arguments(2**13)
    growth(lambda: torchops.{call})
    """
    assert growth(program) <= 2 * A_FEW_MIB


# Of an x of 512 MiB, with 8 output features, so that many rows of the result fit a panel.
ROUNDED_X = {
    "gate": "torchops.gate(v, x, w)",
    "gate_16_bits": "torchops.gate(v.bfloat16(), x, w)",
    "gate_": "torchops.gate_(v, x, w)",
    "gate_16_bits_": "torchops.gate_(v.bfloat16(), x, w)",
    "glu": "torchops.glu(x, w, w)",
    "gate_dw": "torch.ops.myops._gate_backward(v, v, x, w, None, [True, False, True, False])",
    "glu_dw": (
        "torch.ops.myops._glu_backward(v.bfloat16(), x, w, w, None, None, 'silu', [False, True, True, False, False])"
    ),
}


FEW_GATES = """
def arguments(rows):
    return filled(rows, 8), filled(rows, {features}), filled(8, {features}).bfloat16()

v, x, w = arguments(64)
{call}
v, x, w = arguments({rows})
growth(lambda: {call})
"""


@pytest.mark.xdist_group("memory of few gates")
@pytest.mark.parametrize("name", ROUNDED_X)
@pytest.mark.parametrize("features", [2**7, 2**13])
def test_float32_input_of_few_gates(name: str, features: int) -> None:
    """x is rounded to 16 bits panel by panel."""
    rows = 2**27 // features
    programs = (FEW_GATES.format(features=features, rows=rows, call=call) for call in ROUNDED_X.values())
    small = 2 * 8 * 4 * rows / 2**20  # results of the size of v
    assert growths(*programs)[list(ROUNDED_X).index(name)] <= 2 * A_FEW_MIB + small


IN_16_BITS = ("gate_", "sigmoid_", "square_matmul_", "softmax_", "layer_norm_")


@pytest.mark.xdist_group("memory in 16 bits")
@pytest.mark.parametrize("name", IN_16_BITS)
def test_bfloat16(name: str) -> None:
    programs = (INFERENCE.format(call=CALLS[name], dtype="torch.bfloat16", rows=2**19) for name in IN_16_BITS)
    assert growths(*programs)[IN_16_BITS.index(name)] <= A_FEW_MIB


def test_transposed() -> None:
    """Rows that are not contiguous are not copied as a whole either."""
    program = """
    t = filled(256, 2**19).t()
    torchops.softmax_(filled(256, 64).t())
    growth(lambda: torchops.softmax_(t))
    """
    assert growth(program) <= A_FEW_MIB


def test_scratch_of_square_matmul() -> None:
    """At most 4 MiB for each of the two threads, once BLAS has its own buffers in both (up to 12 MiB were seen)."""
    program = """
    b = torch.eye(256) * 0.5
    for _ in range(3):
        torchops.square_matmul_(filled(8192, 256), b)
    a = filled(65536, 256)
    growth(lambda: torchops.square_matmul_(a, b))
    """
    assert growth(program) <= 2 * 4


def test_compiled_inference() -> None:
    """All mutating operators in one compiled graph, on its input: still no second buffer."""
    program = """
    b = torch.eye(256) * 0.5

    @torch.compile(fullgraph=True, dynamic=True)
    def function(t):
        torchops.square_matmul_(t, b)
        torchops.softmax_(t)
        torchops.layer_norm_(t, [256])
        torchops.sigmoid_(t)

    with torch.no_grad():
        function(filled(64, 256))
        t = filled(2**19, 256)
        growth(lambda: function(t))
    """
    assert growth(program) <= A_FEW_MIB


def available_gib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 2**20


@pytest.mark.serial
@pytest.mark.skipif(available_gib() < 6, reason="needs 6 GiB of free memory")
def test_more_elements_than_32_bits_can_count() -> None:
    """Every operator on 2^31 elements and a few: both ends and what lies around the 2^31st element are right."""
    program = """
    values = torch.randn(4096).bfloat16()
    memory = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    many_rows, one_row = memory.view(-1, 16), memory.view(1, -1)

    def filled_again(t):
        memory.view(-1, 4096).copy_(values)
        return t

    def some(t):
        return torch.cat([t.view(-1, 16)[i] for i in (slice(3), slice(2**27 - 2, 2**27 + 2), slice(-3, None))]).float()

    def check(name, got, expected, tolerance):
        assert (some(got) - expected).abs().max() <= tolerance, name

    old = some(filled_again(memory))
    torchops.sigmoid_(filled_again(many_rows))
    check("sigmoid_", memory, torch.sigmoid(old), 0.01)
    torchops.layer_norm_(filled_again(many_rows), [16])
    check("layer_norm_", memory, torch.nn.functional.layer_norm(old, [16]), 0.05)
    torchops.softmax_(filled_again(many_rows))
    check("softmax_", memory, torch.softmax(old, -1), 0.01)
    b = torch.randn(16, 16).bfloat16()
    torchops.square_matmul_(filled_again(many_rows), b)
    check("square_matmul_", memory, old @ b.float(), 0.1)

    period = values.float()
    torchops.layer_norm_(filled_again(one_row), [memory.numel()])
    check("layer_norm_ of one row", memory, (old - period.mean()) / period.std(correction=0), 0.05)
    torchops.softmax_(filled_again(one_row))
    memory *= 2.0**31
    check("softmax_ of one row", memory, old.exp() / period.exp().mean(), 0.2)

    del memory, many_rows, one_row
    x, w = torch.randn(2**27 + 256, 1).bfloat16(), torch.randn(16, 1).bfloat16()
    ends = torch.cat([x[:3], x[2**27 - 2 : 2**27 + 2], x[-3:]]).float()
    check("dense", torchops.dense(x, w), torch.sigmoid(ends @ w.float().t()), 0.01)
    growth(lambda: None)
    """
    growth(program)


TRIANGLES = {
    "outgoing": "torchops.triangle_multiplicative_update(t, 'outgoing', **weights)",
    "incoming": "torchops.triangle_multiplicative_update(t, 'incoming', **weights)",
    "in_place": "torchops.add_triangle_multiplicative_update_(t, **weights)",
}


@pytest.mark.parametrize("call", TRIANGLES.values(), ids=TRIANGLES)
def test_triangle_update(call: str) -> None:
    """Two tensors of the size of the pair tensor, here 72 MiB, of which one becomes the result; and 64 MiB."""
    program = f"""
    weights = dict(p_in_weight=torch.ones(64, 32), g_in_weight=torch.ones(64, 32))
    weights |= dict(p_out_weight=torch.ones(32, 32), g_out_weight=torch.ones(32, 32))
    with torch.no_grad():
        t = filled(8, 8, 32)
        {call}
        t = filled(768, 768, 32)
        growth(lambda: {call})
    """
    assert growth(program) <= 2 * 72 + 64


def test_triangle_update_of_few_pairs() -> None:
    """What the products take beside the two tensors, here of 32 MiB, is small beside them too."""
    program = """
    weights = dict(p_in_weight=torch.ones(256, 128), g_in_weight=torch.ones(256, 128))
    weights |= dict(p_out_weight=torch.ones(128, 128), g_out_weight=torch.ones(128, 128))
    with torch.no_grad():
        t = filled(8, 8, 128)
        torchops.add_triangle_multiplicative_update_(t, **weights)
        t = filled(256, 256, 128)
        growth(lambda: torchops.add_triangle_multiplicative_update_(t, **weights))
    """
    assert growth(program) <= 2 * 32 + 16
