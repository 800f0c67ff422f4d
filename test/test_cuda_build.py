"""What a CUDA build must have and can show without a GPU: the kernels, and tensors of device cuda that hold no data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from op_db import OPS, OpCase
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from torchops import _build_info

pytestmark = pytest.mark.skipif(not _build_info.cuda_version, reason="not a CUDA build")

_CMAKE = (Path(__file__).parents[1] / "CMakeLists.txt").read_text()
_STEMS = re.findall(r"set\(TORCHOPS_CUDA_OPS(.*?)\)", _CMAKE, re.DOTALL)[0].split()
CASES = [case for case in OPS if case.name.removesuffix("_") in _STEMS]


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_built_for_the_cuda_of_this_torch() -> None:
    assert _build_info.cuda_version == torch.version.cuda


def test_every_listed_operator_has_a_kernel() -> None:
    assert {case.name.removesuffix("_") for case in CASES} == set(_STEMS)
    assert [case.name for case in CASES if not _has_kernel(case.qualified, "CUDA")] == []


def test_private_operators_have_the_same_backends_as_the_public_ones() -> None:
    private = [name for name in torch._C._dispatch_get_all_op_names() if re.match(r"myops::_(?!keep|dense_path)", name)]
    assert private
    for name in private:
        public = next(stem for stem in ("dense", "layer_norm") if name.startswith(f"myops::_{stem}"))
        assert _has_kernel(name, "CUDA") == (public in _STEMS), name
        assert _has_kernel(name, "CPU")
        assert _has_kernel(name, "Meta")


@pytest.mark.parametrize("op_case", CASES, ids=lambda case: case.name)
def test_fake_tensors_on_cuda(op_case: OpCase) -> None:
    for sample in op_case.samples:
        args, kwargs = sample(torch.bfloat16, "cpu")
        expected = op_case.pure(*args, **kwargs)
        with FakeTensorMode():

            def fake(t: Tensor) -> Tensor:
                return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

            args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
            out = op_case.op(*args, **kwargs)
            out = args[op_case.mutates] if op_case.mutates is not None else out
        assert out.device.type == "cuda", sample.name
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype), sample.name
