"""What training keeps: growth of the peak resident memory in the forward pass on an intermediate, and in backward."""

from __future__ import annotations

import pytest
from memory_growth import A_FEW_MIB, growth, growths, needs_proc

pytestmark = needs_proc


@pytest.mark.parametrize(
    "call",
    [
        "torch.ops.myops._gate_backward(v, v, x, w, None, [False, True, False, False])",
        "torch.ops.myops._glu_backward(v.bfloat16(), x, w, w, None, None, 'silu', [True, False, False, False, False])",
    ],
    ids=["gate", "glu"],
)
def test_gradient_of_a_float32_input_of_few_gates(call: str) -> None:
    """512 MiB for the gradient itself, and no product of its size in 16 bits."""
    program = f"""
    def arguments(rows):
        return filled(rows, 8), filled(rows, 128), filled(8, 128).bfloat16()

    v, x, w = arguments(64)
    {call}
    v, x, w = arguments(2**20)
    growth(lambda: {call})
    """
    assert growth(program) <= 512 + 4 * A_FEW_MIB


def training(call: str, trained: bool) -> str:
    """The forward call on an intermediate of 512 MiB, with everything recorded for the gradient."""
    return f"""
    def intermediate(rows):
        x = torch.linspace(-1, 1, 256).requires_grad_()
        return x * filled(rows, 1), x

    def forward(t):
        b = (torch.eye(256) * 0.5).requires_grad_({trained})
        w = torch.ones(256, requires_grad={trained})
        {call}
        return b, w

    t, x = intermediate(64)
    forward(t)
    t.sum().backward()
    t, x = intermediate(2**19)
    assert t.requires_grad
    growth(lambda: forward(t))
    assert t.grad_fn is not None and t._version > 0
    t.sum().backward()
    assert x.grad.isfinite().all()
    """


FROZEN = {
    "gate_": "torchops.gate_(t, torch.ones(1, 1).expand(t.shape[0], 1), w[:, None], w)",
    "sigmoid_": "torchops.sigmoid_(t)",
    "square_matmul_": "torchops.square_matmul_(t, b)",
    "square_matmul_tb_": "torchops.square_matmul_(t, b, transpose_b=True)",
    "softmax_": "torchops.softmax_(t)",
    "softmax_dim0_": "torchops.softmax_(t, 0)",
}


@pytest.mark.xdist_group("memory of training")
@pytest.mark.parametrize("name", FROZEN)
def test_training(name: str) -> None:
    programs = (training(call, trained=False) for call in FROZEN.values())
    assert growths(*programs)[list(FROZEN).index(name)] <= A_FEW_MIB


def test_training_of_layer_norm_without_parameters() -> None:
    """The moments of the 2^19 rows are kept: 2 MiB each."""
    assert growth(training("torchops.layer_norm_(t, [256])", trained=False)) <= A_FEW_MIB


@pytest.mark.parametrize(
    "call",
    [
        "torchops.square_matmul_(t, b)",
        "torchops.layer_norm_(t, [256], w)",
    ],
    ids=["square_matmul_", "layer_norm_"],
)
def test_training_keeps_one_copy_where_the_gradient_needs_it(call: str) -> None:
    """The gradient of the matrix needs the old value: one copy, and no second."""
    measured = growth(training(call, trained=True))
    assert 512 - 1 <= measured <= 512 + A_FEW_MIB


def test_training_of_a_gate() -> None:
    """Its gradient needs the result, not the old value."""
    call = "torchops.gate_(t, torch.ones(1, 1).expand(t.shape[0], 1), w[:, None])"
    assert growth(training(call, trained=True)) <= A_FEW_MIB


TRAINED_TRIANGLES = {
    "new": "torchops.triangle_multiplicative_update(t, **weights)",
    "in_place": "torchops.add_triangle_multiplicative_update_(t + 0, **weights)",
    "hooks": "under_hooks(lambda: torchops.triangle_multiplicative_update(t, **weights))",
}


@pytest.mark.parametrize("name", TRAINED_TRIANGLES)
def test_gradients_of_a_triangle_update(name: str) -> None:
    """The gradient of x, d(o), a and b, of which one has the memory of o, whether autograd keeps that or hooks do. The
    pair tensor takes 40.5 MiB."""
    program = f"""
    class Kept:  # as a checkpoint keeps what it computes again: until it is asked for
        def __init__(self, t):
            self.tensor = t.detach()
        def take(self):
            tensor, self.tensor = self.tensor, None
            return tensor
    def under_hooks(call):
        with torch.autograd.graph.saved_tensors_hooks(Kept, Kept.take):
            return call()
    weights = dict(p_in_weight=torch.ones(64, 32), g_in_weight=torch.ones(64, 32))
    weights |= dict(p_out_weight=torch.ones(32, 32), g_out_weight=torch.ones(32, 32))
    t = filled(8, 8, 32).requires_grad_()
    torch.autograd.grad({TRAINED_TRIANGLES[name]}, t, filled(8, 8, 32))
    t, cotangent = filled(576, 576, 32).requires_grad_(), filled(576, 576, 32)
    y = {TRAINED_TRIANGLES[name]}
    growth(lambda: torch.autograd.grad(y, t, cotangent))
    """
    assert growth(program) <= 3.2 * 40.5 + A_FEW_MIB
