"""OpenFold, OpenFold-3, ESMFold in transformers, and Protenix, whose modules descend from OpenFold's.

The forwards differ in keywords. `inplace_safe=True` of an update overwrites ``z`` with the update, or with
``_add_with_inplace=True`` adds the update to it, and returns it; ``_inplace_chunk_size`` is the number of pieces in
which that is done and changes no value; here there are no pieces. `inplace_safe` of attention doesn't overwrite any
argument. Flags that choose other kernels are ignored here, except that ``use_cueq_triangle_kernels`` turns
``inplace_safe`` of an update off, as it does there.

For a bfloat16 ``z``, they compute in bfloat16, whatever the dtype of the parameters, with or without autocast. In
float16, they divide ``a`` and ``b`` by their standard deviation, which the layer norm cancels up to its ``eps``. The
operator scales ``a`` by about ``1 / sqrt(N)`` instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from torchops.convert import attention, transition
from torchops.convert.adapter import Adapter
from torchops.convert.attention import TriangleAttention
from torchops.convert.signature import CHUNKS, KERNELS
from torchops.convert.triangle import FUSED, SEPARATE, TriangleUpdate

_UPDATE = {
    "z": "x",
    "mask": "mask",
    "inplace_safe": "inplace",
    "_add_with_inplace": "add",
    "_inplace_chunk_size": CHUNKS,
    "use_cueq_triangle_kernels": "out_of_place",
    "use_triton_triangle_kernels": KERNELS,
    "triangle_multiplicative": KERNELS,
}
_ATTENTION = {
    "x": "x",
    "mask": "mask",
    "transpose_bias": "transposed",  # OpenFold-3's layers transpose the pair tensor for the ending node
    "chunk_size": CHUNKS,
    "inplace_safe": KERNELS,
    "triangle_attention": KERNELS,
    "use_memory_efficient_kernel": KERNELS,
    "use_deepspeed_evo_attention": KERNELS,
    "use_cueq_triangle_kernels": KERNELS,
    "use_triton_triangle_kernels": KERNELS,
    "use_lma": KERNELS,
}
# Chunks and their checkpoints save memory that is not needed here.
_TRANSITION = {"x": "x", "mask": "mask", "chunk_size": CHUNKS, "ckpt_chunk_size": "checkpointed_chunks"}

_OPENFOLD, _OPENFOLD3 = "openfold.model", "openfold3.core.model.layers"
_ESMFOLD, _PROTENIX = "transformers.models.esm.modeling_esmfold", "protenix.model"

_ROLES = {"norm": "LayerNorm", "linear": "Linear", "attention": "Attention", "swiglu": "SwiGLU"}
_ESMFOLD_ROLES = {"norm": "LayerNorm", "linear": "EsmFoldLinear", "attention": "EsmFoldAttention"}
# Its norm is a kernel that it compiles, or, if LAYERNORM_TYPE says so, PyTorch's.
_PROTENIX_KERNEL = f"{_PROTENIX}.layer_norm.layer_norm:FusedLayerNorm"
_PROTENIX_ROLES = {
    "norm": f"{_PROTENIX}.triangular.layers:OpenFoldLayerNorm|{_PROTENIX_KERNEL}",
    "linear": "OpenfoldLinear",
    "attention": "Attention",
}
_SWIGLU = transition.Names(
    "layer_norm", "swiglu.linear_a", "swiglu.linear_b", "linear_out", {"swiglu": "swiglu", "swiglu.swish": "silu"}
)


def _update(module: nn.Module) -> dict[str, Any]:
    return {"direction": "outgoing" if module._outgoing else "incoming", "follows": True}


def _updates(file: str, roles: Mapping[str, str] = _ROLES) -> Iterator[Adapter]:
    """Those with separate weights, and with fused ones, which return a new tensor unless they add."""
    names = ("TriangleMultiplicationOutgoing", "TriangleMultiplicationIncoming")
    yield Adapter(file, (*names, "TriangleMultiplicativeUpdate"), TriangleUpdate, SEPARATE, _UPDATE, roles, _update)
    fused = (*(f"Fused{name}" for name in names), "FusedTriangleMultiplicativeUpdate")
    options = lambda module: {**_update(module), "overwrites": False}  # noqa: E731
    yield Adapter(file, fused, TriangleUpdate, FUSED, _UPDATE, roles, options)


def _attention(file: str, bias: str = "linear", roles: Mapping[str, str] = _ROLES, prefix: str = "") -> Adapter:
    classes = (f"{prefix}TriangleAttention", f"{prefix}TriangleAttentionEndingNode")
    return Adapter(file, classes, TriangleAttention, attention.Names(bias=bias), _ATTENTION, roles)


MODULES = (
    *_updates(f"{_OPENFOLD}.triangular_multiplicative_update"),
    _attention(f"{_OPENFOLD}.triangular_attention"),
    *_updates(f"{_OPENFOLD3}.triangular_multiplicative_update"),
    _attention(f"{_OPENFOLD3}.triangular_attention", bias="linear_z"),
    Adapter(
        f"{_OPENFOLD3}.transition",
        ("SwiGLUTransition",),
        transition.Transition,
        _SWIGLU,
        _TRANSITION,
        _ROLES,
        lambda module: {"follows": True, "result": "mask"},
    ),
    Adapter(
        _ESMFOLD,
        ("EsmFoldTriangleMultiplicativeUpdate",),
        TriangleUpdate,
        SEPARATE,
        _UPDATE,
        _ESMFOLD_ROLES,
        _update,
    ),
    _attention(_ESMFOLD, roles=_ESMFOLD_ROLES, prefix="EsmFold"),
    *(
        replace(adapter, gpu_norms=_PROTENIX_KERNEL)
        for adapter in (
            next(_updates(f"{_PROTENIX}.triangular.triangular", _PROTENIX_ROLES)),
            _attention(f"{_PROTENIX}.triangular.triangular", roles=_PROTENIX_ROLES),
        )
    ),
    Adapter(
        f"{_PROTENIX}.modules.primitives",
        ("Transition",),
        transition.Transition,
        transition.Names("layernorm1", "linear_no_bias_a", "linear_no_bias_b", "linear_no_bias", {}),
        {"x": "x"},
        _PROTENIX_ROLES | {"linear": "Linear"},
        lambda module: {"result": "x in evaluation"},
        _PROTENIX_KERNEL,
    ),
)
LAYERS: tuple[Adapter, ...] = ()
UNFIT = (
    (f"{_OPENFOLD}.pair_transition", "PairTransition", transition.HAS_RELU),
    (f"{_OPENFOLD3}.transition", "ReLUTransition", transition.HAS_RELU),
    (_ESMFOLD, "EsmFoldResidueMLP", transition.HAS_RELU),
)
