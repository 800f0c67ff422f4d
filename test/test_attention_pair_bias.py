"""torchops.nn.AttentionPairBias beside algorithm 24 as it is written, and beside the modules of Boltz."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from memory_growth import growth, needs_proc
from pair_bias_samples import C_Z, DEVICES, HEADS, SIZES, C, check, in_float64, inputs, module_of, reference
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torchops
from torchops import PairBiasWeights, attention_pair_bias
from torchops.nn import AttentionPairBias
from torchops.ops import pair_bias

# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("c_z", [C_Z, None], ids=["projected", "given"])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size: str, c_z: int | None, device: str) -> None:
    for initial_norm in (False, True):
        w = module_of(c_z, initial_norm=initial_norm, dtype=torch.float64, device=device).weights()
        s, z, mask, keys = inputs(size, c_z, device=device)
        for given in (None, mask, mask > 0):
            check(w, s, z, given, keys)
    check(w._replace(q_bias=None, z_norm_weight=None, norm_bias=None), s, z, mask * -0.5, keys)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [16, 24, 32, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, head_dim: int, device: str) -> None:
    """Also of float32 inputs and norms beside parameters of 16 bits."""
    module = module_of(head_dim=head_dim, initial_norm=True, dtype=dtype, device=device)
    for size in ("samples", "windows"):
        check(module.weights(), *inputs(size, dtype=dtype, device=device))
        check(module.weights(), *inputs(size, dtype=torch.float32, device=device))
    norms = (layer.float() for layer in module.modules() if isinstance(layer, torch.nn.LayerNorm))
    assert len(list(norms)) == 2
    check(module.weights(), *inputs("samples", dtype=torch.float32, device=device))


@pytest.mark.parametrize("size", SIZES)
def test_packed_weights(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    """One product of each input, as on other devices."""
    monkeypatch.setattr(pair_bias, "_projections", pair_bias._packed_projections)
    w = module_of(initial_norm=True, dtype=torch.float64).weights()
    check(w, *inputs(size))
    check(w._replace(q_bias=None), *inputs(size))


def test_samples_share_one_bias() -> None:
    """Each is what it is alone, with a mask of its own or one for all."""
    module = module_of(initial_norm=True, dtype=torch.float64)
    s, z, mask, _ = inputs("samples")
    alone = torch.stack([module(s[:, i], z, mask[:, i]) for i in range(s.shape[1])], 1)
    assert_all_close([module(s, z, mask)], [alone])
    assert_all_close([module(s, z, mask[:, 1])], [module(s, z, mask[:, 1:2].expand_as(mask))])


def test_row_without_keys() -> None:
    module = module_of(dtype=torch.float32)
    s, z, _, keys = inputs("windows", dtype=torch.float32)
    mask = torch.zeros(2, 3, 16)
    out = module(s.requires_grad_(), z, mask, keys)
    torch.testing.assert_close(out, module(s, z, None, keys))
    out.sum().backward()
    assert s.grad is not None
    assert s.grad.isfinite().all()


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_no_elements(empty: int) -> None:
    """Of the batch, samples, queries or keys."""
    sizes = [2, 3, 5, 7]
    sizes[empty] = 0
    b, samples, n, k = sizes
    module = module_of(dtype=torch.float64)
    s, keys = (torch.ones(b, samples, rows, C, dtype=torch.float64, requires_grad=True) for rows in (n, k))
    out = module(s, torch.ones(b, n, k, C_Z, dtype=torch.float64), torch.ones(b, k), keys)
    assert out.shape == s.shape
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (s, keys)))


def test_strides() -> None:
    """Samples that are not beside the batch's elements, and features that are not side by side."""
    w = module_of(dtype=torch.float64).weights()
    s, z, mask, _ = inputs("samples")
    check(w, s.transpose(0, 1).contiguous().transpose(0, 1), z.transpose(1, 2).contiguous().transpose(1, 2), mask)
    check(w, s.mT.contiguous().mT, z.movedim(-1, 1).contiguous().movedim(1, -1), mask.mT.contiguous().mT)
    check(w, s[:1].expand(2, -1, -1, -1), z[:1].expand(2, -1, -1, -1), mask[:1].expand(2, -1, -1))
    check(w._replace(q=w.q.T.contiguous().T, out=w.out.T.contiguous().T), s, z, mask)


@needs_proc
def test_memory_of_inference() -> None:
    """The scores of all samples would take 256 MiB, and the bias takes 8."""
    program = """
    layer = torchops.nn.AttentionPairBias(64, None, heads=8).requires_grad_(False)
    s, z = filled(32, 512, 64), filled(512, 512, 8)
    layer(s[:, :16], z[:16, :16])
    growth(lambda: layer(s, z))
    """
    assert growth(program) <= 80


# --- what the dispatcher and the compiler ask for --------------------------------------------------------------------


def test_derivatives_of_gradients() -> None:
    module = module_of(head_dim=1, dtype=torch.float64)
    s, z, mask, _ = inputs("fewer keys")
    s, z, mask = s[:2, :3], z[:3, :, :], mask[:2]
    keys = random_like(torch.empty(2, 2, C, dtype=torch.float64), 7)

    def function(s: Tensor, z: Tensor, keys: Tensor) -> Tensor:
        return module(s, z, mask, keys)

    leaves = tuple(t.detach().requires_grad_() for t in (s, z, keys))
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device: str, residual: bool) -> None:
    """Products in the lower precision; the sum in the dtype of s."""
    module = module_of(initial_norm=True, device=device)
    for size, dtype in (("samples", torch.float32), ("windows", torch.float32), ("samples", torch.bfloat16)):
        s, z, mask, keys = inputs(size, dtype=dtype, device=device)
        s.requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            out = module(s, z, mask, keys, residual=residual)
        assert out.dtype == (dtype if residual else torch.bfloat16)
        out.sum().backward()
        weights = PairBiasWeights(*in_float64(*module.weights()))
        in_keys = None if keys is None else keys.double()
        exact = reference(s.double(), z.double(), mask, weights, in_keys, residual=residual)
        assert (out.double() - exact).norm() <= 3e-2 * exact.norm()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic: bool, device: str) -> None:
    """In one graph; dynamic, one for all numbers of samples, queries and keys."""
    module = module_of(initial_norm=True, dtype=torch.float64, device=device)
    counter, graphs = CompileCounterWithBackend("inductor"), 0
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=counter)
    for samples, n, k in ((2, 5, 7), (3, 6, 9), (4, 8, 8))[: 3 if dynamic else 1]:
        shapes = (samples, n, C), (n, k, C_Z), (k,), (samples, k, C)
        s, z, mask, keys = (random_like(torch.empty(t, dtype=torch.float64, device=device), 3) for t in shapes)
        results = []
        for function in (module, compiled):
            leaves = [t.clone().requires_grad_() for t in (s, z, keys)]
            out = function(leaves[0], leaves[1], mask, leaves[2], residual=True)
            results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *module.parameters()])])
        assert_all_close(*results)
        # Dynamo starts again once where a graph has a float, here eps: not another graph, of other sizes.
        graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs
    with pytest.raises(Exception, match="attention_pair_bias"):
        compiled(s, z[:, :-1], mask, keys)


def test_vmap() -> None:
    module = module_of(dtype=torch.float64)
    s, z, mask, keys = inputs("windows")
    expected = module(s, z, mask, keys)
    assert_all_close([torch.vmap(torch.vmap(module))(s, z, mask, keys)], [expected])
    shared = torch.vmap(module, (0, None, None, 0))(s, z[0], mask[0], keys)
    assert_all_close([shared[1]], [module(s[1], z[0], mask[0], keys[1])])  # type: ignore[index]


@pytest.mark.parametrize("size", ["samples", "windows"])
def test_exported(size: str) -> None:
    module = module_of(dtype=torch.float64)
    given = inputs(size)
    n, k = torch.export.Dim("n", min=2), torch.export.Dim("k", min=2)
    sizes = ({2: n}, {1: n, 2: n}, {2: n}, None) if size == "samples" else ({2: n}, {2: n, 3: k}, {2: k}, {2: k})
    program = torch.export.export(module, given, dynamic_shapes=sizes).module()
    assert_all_close([program(*given)], [module(*given)])
    s, z, mask, keys = given
    fewer = (s[..., :4, :], z[..., :4, :4, :], mask[..., :4], None if keys is None else keys[..., :4, :])
    assert_all_close([program(*fewer)], [module(*fewer)])


# --- the module ------------------------------------------------------------------------------------------------------


def test_module() -> None:
    module = AttentionPairBias(C, C_Z, HEADS, initial_norm=True, eps=1e-3)
    width = {f"proj_{name}.weight": (C, C) for name in "qkvgo"}
    shapes = width | {"proj_q.bias": (C,), "proj_z.0.weight": (C_Z,), "proj_z.0.bias": (C_Z,)}
    shapes |= {"proj_z.1.weight": (HEADS, C_Z), "norm_s.weight": (C,), "norm_s.bias": (C,)}
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == shapes
    assert "12, 10, heads=3, head_dim=4, initial_norm=True, eps=0.001" in repr(module)
    given = AttentionPairBias(C, None, HEADS, 5)
    assert not any(name.startswith(("proj_z", "norm_s")) for name in given.state_dict())
    assert given.weights().bias_weight is None
    s, z, mask, keys = inputs("samples", dtype=torch.float32)
    assert not module(s, z, mask, keys).any()
    other = module_of(initial_norm=True, eps=1e-3)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(s, z, mask, keys), other(s, z, mask, keys))
    with pytest.raises(ValueError, match="expected heads that divide c = 12, got 5"):
        AttentionPairBias(C, None, 5)
    for c, c_z, heads, head_dim in ((12, 10, 0, 4), (12, 10, 3, 0), (0, 10, 3, None), (12, 0, 3, None)):
        with pytest.raises(ValueError, match="AttentionPairBias: expected"):
            AttentionPairBias(c, c_z, heads, head_dim)


def test_on_meta() -> None:
    """Which has no autocast, and where weights are packed."""
    module = AttentionPairBias(C, C_Z, HEADS, device="meta", dtype=torch.bfloat16)
    s, z, mask, keys = inputs("windows", dtype=torch.float32, device="meta")
    out = module(s, z, mask, keys, residual=True)
    assert (out.shape, out.dtype, out.device.type) == (s.shape, torch.float32, "meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual(dtype: torch.dtype) -> None:
    """A new tensor of the dtype of s."""
    module = module_of(dtype=torch.bfloat16)
    s, z, mask, keys = inputs("windows", dtype=dtype)
    old = s.clone()
    out = module(s, z, mask, keys, residual=True)
    assert out.dtype == dtype
    assert torch.equal(out, s + module(s, z, mask, keys))
    assert torch.equal(s, old)
    assert out.data_ptr() != s.data_ptr()


@pytest.mark.parametrize("release", ["trunk", "diffusion", "first"])
def test_boltz(release: str) -> None:
    """Its state dict, and its result for masks that leave each row a key."""
    if find_spec("boltz") is None:
        pytest.skip("boltz is not installed")
    first = release == "first"
    file = importlib.import_module(f"boltz.model.layers.attention{'' if first else 'v2'}")
    how = {} if first else {"compute_pair_bias": release == "trunk"}
    theirs = file.AttentionPairBias(C, None if release == "diffusion" else C_Z, HEADS, **how)
    for i, p in enumerate(theirs.parameters()):
        p.data = random_like(p, i) / 2
    ours = AttentionPairBias(C, None if release == "diffusion" else C_Z, HEADS, initial_norm=first)
    ours.load_state_dict(theirs.state_dict())
    s, z, mask, _ = inputs("batch", None if release == "diffusion" else C_Z, torch.float32)
    s, z, mask = s.flatten(0, 1), z.flatten(0, 1), mask.flatten(0, 1).float()
    mask[:, 0] = 1
    expected = theirs(s, z, mask, **({} if first else {"k_in": s}))
    torch.testing.assert_close(ours(s, z, mask), expected, rtol=1e-4, atol=1e-4)


# --- errors ----------------------------------------------------------------------------------------------------------

_Q = r"q of shape \(heads \* d, c\) with heads = "
ERRORS: dict[str, tuple[type[Exception], str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "s": (
        RuntimeError,
        r"s of shape \(2, 4, 7, 12\) to match q, got \(2, 4, 7, 11\)",
        lambda a: {"s": a["s"][..., 1:]},
    ),
    "s_dims": (RuntimeError, r"s of shape \(\*batch, Q, c\) or .*, got \(12,\) and", lambda a: {"s": a["s"][0, 0, 0]}),
    "z_dims": (RuntimeError, r"s of shape .*, got \(2, 4, 7, 12\) and \(7, 10\)", lambda a: {"z": a["z"][0, 0]}),
    "z": (
        RuntimeError,
        r"z of shape \(2, 7, 7, 10\) to match s, got \(2, 7, 6, 10\)",
        lambda a: {"z": a["z"][:, :, 1:]},
    ),
    "z_batch": (RuntimeError, r"z of shape \(2, 7, 7, 10\) to match s, got \(1, 7", lambda a: {"z": a["z"][:1]}),
    "keys": (
        RuntimeError,
        r"keys of shape \(2, 4, 7, 12\) to match s, got \(2, 3, 7, 12\)",
        lambda a: {"keys": a["s"][:, 1:]},
    ),
    "keys_dims": (
        RuntimeError,
        r"keys of shape \(2, 4, K, 12\) to match s, got \(12,\)",
        lambda a: {"keys": a["s"][0, 0, 0]},
    ),
    "z_keys": (
        RuntimeError,
        r"z of shape \(2, 7, 5, 10\) to match s and keys, got \(2, 7, 7, 10\)",
        lambda a: {"keys": a["s"][:, :, 2:]},
    ),
    "mask": (
        RuntimeError,
        r"mask of shape \(2, 4, 7\) to match z, got \(2, 4, 6\)",
        lambda a: {"mask": a["mask"][..., 1:]},
    ),
    "mask_shared": (RuntimeError, r"mask of shape \(2, 7\) to match z, got \(4, 7\)", lambda a: {"mask": a["mask"][0]}),
    "mask_int": (
        RuntimeError,
        "mask of dtype bool or floating-point, got int64",
        lambda a: {"mask": a["mask"].long()},
    ),
    "heads": (RuntimeError, rf"{_Q}5, got \(12, 12\)", lambda a: {"heads": 5}),
    "no_heads": (RuntimeError, rf"{_Q}0, got", lambda a: {"heads": 0}),
    "q_dims": (RuntimeError, rf"{_Q}3, got \(12,\)", lambda a: {"q": a["q"][0]}),
    "v": (RuntimeError, r"v of shape \(12, 12\) to match q, got \(11, 12\)", lambda a: {"v": a["v"][1:]}),
    "out": (RuntimeError, r"out of shape \(12, 12\) to match q, got \(12, 11\)", lambda a: {"out": a["out"][:, 1:]}),
    "z_norm": (
        RuntimeError,
        r"z_norm_bias of shape \(10,\) to match z, got \(9,\)",
        lambda a: {"z_norm_bias": a["z_norm_bias"][1:]},
    ),
    "bias_weight": (
        RuntimeError,
        r"bias_weight of shape \(3, 10\) to match q, got \(2, 10\)",
        lambda a: {"bias_weight": a["bias_weight"][1:]},
    ),
    "given_bias": (
        RuntimeError,
        r"z of shape \(2, 7, 7, 3\) to match s, got \(2, 7, 7, 10\)",
        lambda a: {"bias_weight": None},
    ),
    "s_float64": (RuntimeError, "s of dtype float32 to match q, got float64", lambda a: {"s": a["s"].double()}),
    "k_half": (RuntimeError, "k of dtype float32 to match q, got float16", lambda a: {"k": a["k"].half()}),
    "q_int": (
        RuntimeError,
        "q of dtype float32, float64, float16 or bfloat16, got int64",
        lambda a: {"q": a["q"].long()},
    ),
    "z_elsewhere": (RuntimeError, "z on device cpu to match q, got meta", lambda a: {"z": a["z"].to("meta")}),
    "s_none": (TypeError, "s of type Tensor, got NoneType", lambda a: {"s": None}),
    "mask_list": (TypeError, "mask of type Tensor, got list", lambda a: {"mask": [1]}),
    "k_none": (TypeError, "k of type Tensor, got NoneType", lambda a: {"k": None}),
    "q_bias_number": (TypeError, "q_bias of type Tensor, got float", lambda a: {"q_bias": 1.0}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    kind, text, changed = ERRORS[name]
    s, z, mask, _ = inputs("samples", dtype=torch.float32)
    w = module_of().weights()
    given: dict[str, Any] = {"s": s, "z": z, "mask": mask, "keys": None, **w._asdict()}
    old = copy.deepcopy({n: t.detach() for n, t in given.items() if isinstance(t, Tensor)})
    wrong = given | changed(given)
    weights = PairBiasWeights(**{field: wrong[field] for field in PairBiasWeights._fields})
    with pytest.raises(kind, match=f"^attention_pair_bias: expected {text}"):
        attention_pair_bias(wrong["s"], wrong["z"], wrong["mask"], weights, wrong["keys"])
    assert all(torch.equal(given[n], t) for n, t in old.items())


def test_dtypes_beside_16_bits() -> None:
    """A norm may be float32, a product may not."""
    w = module_of(dtype=torch.bfloat16).weights()
    s, z, _, _ = inputs("samples", dtype=torch.float32)
    assert w.z_norm_weight is not None
    attention_pair_bias(s, z, None, w._replace(z_norm_weight=w.z_norm_weight.float()))
    with pytest.raises(RuntimeError, match=re.escape("expected gate of dtype bfloat16 to match q, got float32")):
        attention_pair_bias(s, z, None, w._replace(gate=w.gate.float()))
    with pytest.raises(RuntimeError, match="expected z of dtype bfloat16 or float32 to match q, got float64"):
        torchops.attention_pair_bias(s, z.double(), None, w)


# --- layers that are called instead ----------------------------------------------------------------------------------


def small(initial_norm: bool = False) -> AttentionPairBias:
    torch.manual_seed(0)
    layer = AttentionPairBias(8, 4, heads=2, initial_norm=initial_norm)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def by_layers(layer: AttentionPairBias, *args: Any, **kwargs: Any) -> Tensor:
    handle = layer.proj_q.register_forward_hook(lambda *call: None)
    try:
        out: Tensor = layer(*args, **kwargs)
    finally:
        handle.remove()
    return out


@pytest.mark.parametrize("called", [False, True], ids=["operator", "layers"])
def test_both_refuse_the_same(called: bool) -> None:
    layer = small()
    call = by_layers if called else AttentionPairBias.__call__
    z, mask = torch.randn(2, 3, 5, 5, 4), torch.ones(3, 2, 5)
    for s in (torch.randn(3, 2, 5, 8), torch.randn(6, 5, 8), torch.randn(2, 3, 5, 7)):
        with pytest.raises(RuntimeError, match="attention_pair_bias: expected"):
            call(layer, s, z)
    with pytest.raises(RuntimeError, match="attention_pair_bias: expected mask of shape"):
        call(layer, torch.randn(2, 3, 5, 8), z, mask)
    with pytest.raises(TypeError, match="expected z of type Tensor, got NoneType"):
        call(layer, torch.randn(3, 2, 5, 8), None)


def test_layers_with_other_settings() -> None:
    """Biases and an eps that the operator has no parameter for are not left out."""
    s, z = torch.randn(2, 5, 8), torch.randn(2, 5, 5, 4)
    for name, other in (("proj_g", torch.nn.Linear(8, 8)), ("norm_s", torch.nn.LayerNorm(8, eps=1.0))):
        layer = small(initial_norm=True)
        before = layer(s, z)
        setattr(layer, name, other)
        torch.testing.assert_close(layer(s, z), by_layers(layer, s, z))
        assert not torch.allclose(layer(s, z), before)
    layer = AttentionPairBias(8, 4, heads=2)
    for name, wrong in (("proj_z", torch.nn.Linear(4, 2)), ("norm_s", torch.nn.GroupNorm(2, 8))):
        with pytest.raises(TypeError, match=f"expected {name} of type"):
            setattr(layer, name, wrong)


def test_a_residual_is_contiguous() -> None:
    layer = small()
    s, z = torch.randn(2, 8, 5).mT, torch.randn(2, 5, 5, 4)
    assert layer(s, z, residual=True).is_contiguous()
    assert by_layers(layer, s, z, residual=True).is_contiguous()


def test_wrong_weights() -> None:
    s, z, w = torch.randn(2, 5, 8), torch.randn(2, 5, 5, 4), small().weights()
    for wrong in (None, tuple(w)):
        with pytest.raises(TypeError, match="expected weights of type PairBiasWeights"):
            attention_pair_bias(s, z, None, wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="expected q of layout strided"):
        attention_pair_bias(s, z, None, w._replace(q=w.q.detach().to_sparse()))
    with pytest.raises(RuntimeError, match="expected no norm_weight without normalize, got one"):
        attention_pair_bias(s, z, None, w._replace(norm_weight=torch.ones(8)))
    no_bias_weight = w._replace(bias_weight=None, z_norm_weight=None, z_norm_bias=torch.ones(2))
    with pytest.raises(RuntimeError, match="expected no z_norm_bias without bias_weight, got one"):
        attention_pair_bias(s, z[..., :2], None, no_bias_weight)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="expected s of dtype float32"):
        attention_pair_bias(s.double(), z, None, w)
