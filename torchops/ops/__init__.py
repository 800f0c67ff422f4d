"""Typed functions over the operators ``torch.ops.myops.*``.

The functions call the dispatcher and nothing else, so PyTorch treats them (in compile, export, vmap, hooks, subclasses)
as it treats the operators. In-place functions return their first argument, as PyTorch's do; the operators themselves
return nothing.

All tensors of a call share one device and one dtype, except that ``gate``, ``gate_`` and ``glu`` also take float32
inputs with 16-bit weights, ``layer_norm`` and ``layer_norm_`` a float32 ``weight`` and ``bias`` with a 16-bit ``x``,
and ``outer_product_mean`` a float32 ``norm``. The dtypes float32, float64, float16 and bfloat16 are supported.

Invalid arguments raise an error that names the operator, the argument, what was expected and what was passed. It is a
``TypeError`` for an argument of a wrong type, such as a number instead of a tensor. Nothing is modified then.

The same call gives the same bits in every run, for the same shapes, strides and alignment, number of threads, device
and build. A row may have other bits in a batch of another size, where another kernel is faster.

``torch.autocast`` casts as for the PyTorch functions that these replace. ``dense``, ``square_matmul`` and
``outer_product_mean`` run in its lower precision; ``softmax`` and ``layer_norm`` in float32 on a GPU, and in the dtype
of ``x`` on the CPU; ``sigmoid`` in the dtype of ``x``. For ``gate`` and ``glu``, autocast casts the weights, and inputs
unless they are float32. An in-place operator keeps the dtype of its first argument, and the others are cast to that;
those of a float32 ``gate_`` as for ``gate``.
"""

from torchops.ops.attention import AttentionWeights, triangle_attention, triangle_attention_update
from torchops.ops.gates import dense, dense_scaled, gate, gate_, gate_scaled, glu, glu_scaled, sigmoid, sigmoid_
from torchops.ops.matmul import square_matmul, square_matmul_
from torchops.ops.pair import (
    add_transition_,
    add_triangle_multiplicative_update_,
    outer_product_mean,
    transition,
    triangle_multiplicative_update,
)
from torchops.ops.pair_bias import PairBiasWeights, attention_pair_bias
from torchops.ops.rows import layer_norm, layer_norm_, softmax, softmax_

__all__ = [
    "AttentionWeights",
    "PairBiasWeights",
    "add_transition_",
    "add_triangle_multiplicative_update_",
    "attention_pair_bias",
    "dense",
    "dense_scaled",
    "gate",
    "gate_",
    "gate_scaled",
    "glu",
    "glu_scaled",
    "layer_norm",
    "layer_norm_",
    "outer_product_mean",
    "sigmoid",
    "sigmoid_",
    "softmax",
    "softmax_",
    "square_matmul",
    "square_matmul_",
    "transition",
    "triangle_attention",
    "triangle_attention_update",
    "triangle_multiplicative_update",
]
