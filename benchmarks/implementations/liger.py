"""Mode `liger`: operators of Liger Kernel (https://github.com/linkedin/Liger-Kernel), which are written in Triton."""

from __future__ import annotations

import torch.nn.functional as F
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor


def swiglu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return LigerSiLUMulFunction.apply(F.linear(x, wg, bg), F.linear(x, w, b))


def softmax(x: Tensor) -> Tensor:
    return LigerSoftmaxFunction.apply(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


FUNCTIONS = {"swiglu": swiglu, "softmax": softmax, "layer_norm": layer_norm}
