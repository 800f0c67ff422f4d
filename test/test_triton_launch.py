"""Launches of kernels in Triton: when a compilation is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchops._core.triton import launch as _triton_launch
from torchops._core.triton.launch import Launch


class Parameter:
    def __init__(self, num: int, fixed: bool, constant: bool = False) -> None:
        self.num, self.do_not_specialize, self.annotation_type = num, fixed, "i32" if fixed else ""
        self.is_constexpr = constant


class Kernel:
    """Has the parameters (x, stride, count: int32, BLOCK: constexpr), and notes how it is launched."""

    arg_names = ("x", "stride", "count", "BLOCK")
    params = (Parameter(0, False), Parameter(1, False), Parameter(2, True), Parameter(3, False, True))

    def __init__(self) -> None:
        self.compiled, self.fails = 0, False
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self.fails:
                raise RuntimeError("does not compile")
            self.compiled += 1
            assert options == {"BLOCK": 16, "num_warps": 4, "enable_fp_fusion": True}
            return Compiled(self)

        return call


class Compiled:
    function, packed_metadata = 7, "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: str, *rest: Any) -> None:
        assert (stream, function, metadata, rest[:3]) == (5, 7, "metadata", (None, None, None))
        self.kernel.launched.append(((x, y, z), rest[3:]))


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton_launch, "stream_of", lambda device: 5)
    monkeypatch.setattr(_triton_launch, "is_watched", lambda: False)


def test_one_compilation_serves_all_that_triton_does_not_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch = Launch(kernel, BLOCK=16, num_warps=4)
    launch((1, 1, 1), x, 8, 3)
    assert (kernel.compiled, kernel.launched) == (1, [])  # Triton compiles, and launches
    launch((2, 1, 1), x, 8, 5)
    assert kernel.compiled == 1
    assert kernel.launched == [((2, 1, 1), (x.data_ptr(), 8, 5, 16))]
    for other in ((x, 1, 5), (x[1:], 8, 5), (x.half(), 8, 5)):
        before = kernel.compiled
        launch((1, 1, 1), *other)
        assert kernel.compiled == before + 1
    monkeypatch.setattr(_triton_launch, "is_watched", lambda: True)
    launch((1, 1, 1), x, 8, 3)
    assert len(kernel.launched) == 1


def test_no_failure_is_kept() -> None:
    kernel = Kernel()
    launch = Launch(kernel, BLOCK=16, num_warps=4)
    kernel.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not compile"):
            launch((1, 1, 1), torch.zeros(4), 8, 3)
    kernel.fails = False
    launch((1, 1, 1), torch.zeros(4), 8, 3)
    assert kernel.compiled == 1
