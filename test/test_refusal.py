"""Triton kernels that cannot be compiled or launched: PyTorch's operators stand in for them.

`test_cuda_refusal.py` has the same on a GPU, and `test/cpp/refusal_test.cpp` what holds for kernels in CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchops._core.triton import refusal
from torchops._core.triton.launch import Launch
from torchops._triangle_attention.attention import backends


@pytest.fixture(autouse=True)
def nothing_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal, "_reason", None)


class Kernel:
    """In the place of one of Triton, whose launch raises `error`."""

    arg_names = ()

    def __init__(self, error: Exception) -> None:
        self.error, self.launches = error, 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launches += 1
            raise self.error

        return launch


def test_a_refused_launch_says_why() -> None:
    launch = Launch(Kernel(FileNotFoundError("no compiler\nof any kind")))
    expected = r"Triton's kernels don't run here \(FileNotFoundError: no compiler\)"
    with pytest.warns(UserWarning, match=expected), pytest.raises(refusal.RefusedError, match=expected) as raised:
        launch((1, 1, 1), torch.ones(1))
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    assert refusal.why_refused() == "Triton's kernels don't run here (FileNotFoundError: no compiler)"


def test_one_warning(recwarn: pytest.WarningsRecorder) -> None:
    for _ in range(2):
        with pytest.raises(refusal.RefusedError):
            Launch(Kernel(OSError()))((1, 1, 1), torch.ones(1))
    assert len(recwarn) == 1
    assert refusal.why_refused() == "Triton's kernels don't run here (OSError: no message)"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("out of memory"), ValueError(), KeyboardInterrupt()]
)
def test_what_is_no_refusal(error: Any) -> None:
    with pytest.raises(type(error)):
        Launch(Kernel(error))((1, 1, 1), torch.ones(1))
    assert refusal.why_refused() is None


@pytest.mark.filterwarnings("ignore:torchops. Triton")
def test_a_kernel_of_an_operator_runs_again() -> None:
    kernel = Kernel(RuntimeError("Triton Error [CUDA]: no kernel image is available"))

    @refusal.again_if_refused
    def of_operator(x: torch.Tensor) -> torch.Tensor:
        if refusal.why_refused() is None:
            Launch(kernel)((1, 1, 1), x)
        return x + 1

    assert of_operator(torch.ones(1)) == 2
    assert of_operator(torch.ones(1)) == 2
    assert kernel.launches == 1


@pytest.mark.filterwarnings("ignore:torchops. Triton")
def test_a_kernel_that_has_overwritten_its_argument_does_not_run_again() -> None:
    x = torch.zeros(1)

    def of_operator(x: torch.Tensor, launches: int) -> None:
        for _ in range(launches):
            refusal.compiled(lambda: x.add_(1))
        if refusal.why_refused() is None:
            Launch(Kernel(OSError("refused")))((1, 1, 1), x)

    kernel = refusal.again_if_refused(of_operator, overwrites=True)
    with pytest.raises(refusal.RefusedError, match="refused"):
        kernel(x, 1)
    assert x == 1
    refusal._reason = None
    kernel(x, 0)
    assert x == 1


def test_no_backend_of_triton_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_has_triton", lambda: True)
    monkeypatch.setattr(backends, "has_bfloat16", lambda device: True)

    class OnGpu:
        is_cuda, device, dtype = True, torch.device("cuda", 0), torch.bfloat16

    like: Any = OnGpu()
    assert backends.why_not_triton(like, 1, 1, 1, 32) is None
    monkeypatch.setattr(refusal, "_reason", "because")
    assert backends.why_not_triton(like, 1, 1, 1, 32) == "because"


def test_a_pretended_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOPS_PRETEND_REFUSED", "sm90,triton")
    with pytest.warns(UserWarning, match="TORCHOPS_PRETEND_REFUSED names triton"), pytest.raises(refusal.RefusedError):
        refusal.compiled(lambda: None)
