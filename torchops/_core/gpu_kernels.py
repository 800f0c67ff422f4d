"""What computes each operator on a GPU, in words, and what it would take to have more."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Gpu", "code_for"]


def code_for(capability: tuple[int, int], architectures: list[str]) -> str | None:
    """Which of the architectures in the library a GPU runs: machine code of its own kind, or else PTX.

    Machine code of 8.0 runs on 8.0 to 8.9, that of 9.0a on 9.0 alone, that of 10.0f on 10.0 to 10.9. PTX (of 8.0+PTX)
    is compiled by the driver, for any later GPU.
    """
    runs, compiles = [], []
    for entry in architectures:
        number, _, ptx = entry.partition("+")
        exact, family = number.endswith("a"), number.endswith("f")
        major, minor = (int(part) for part in number.rstrip("af").split("."))
        if capability == (major, minor) or (not exact and capability[0] == major and capability[1] > minor):
            runs.append((major, minor, exact or family, f"machine code of {number}"))
        if ptx and not exact and not family and capability >= (major, minor):
            compiles.append((major, minor, False, f"PTX of {number}"))
    return max(runs or compiles)[-1] if runs or compiles else None


class Gpu(NamedTuple):
    """A compute capability, and the architectures that a build has: of all its CUDA code, and of its GEMM kernels for a
    single architecture. Triton's kernels are compiled where they run, for any of them."""

    capability: tuple[int, int]
    architectures: list[str]
    gemm_architectures: list[str]
    has_triton: bool

    @property
    def number(self) -> str:
        return ".".join(map(str, self.capability))

    @property
    def code(self) -> str | None:
        return code_for(self.capability, self.architectures)

    @property
    def has_own_gemm(self) -> bool:
        return code_for(self.capability, self.gemm_architectures) is not None

    @property
    def facts(self) -> dict[str, str]:
        """The code that it runs, what computes each operator, and what it would take to have more."""
        needs = {"more with": "; ".join(self.needs)} if self.needs else {}
        return {"code": self.code or "none", **self.kernels, **needs}

    @property
    def kernels(self) -> dict[str, str]:
        """What computes each operator."""
        attention = {"triangle_attention": self._attention()}
        if self.code is None:
            return {"all but triangle_attention": "none"} | attention
        own = self.has_own_gemm
        products = "fused kernels in 16 bits and float32 " + ("(TF32: dense alone)" if own else "without TF32")
        in_panels = "panels: layer_norm, glu, a matmul"
        copies = "panels of rows: a copy, then a matmul"
        steps = "fused steps in 16 bits and TF32 up to 128 features and channels"
        return {
            "dense, gate, glu": f"{products}, else cuBLAS, then one pass",
            "*_scaled": self._scaled(),
            "transition": "one kernel in 16 bits up to 128 features and 512 hidden, else " * own + in_panels,
            "triangle update": steps + ", in 16 bits beyond" * own + ", else panels",
            **attention,
            "square_matmul_": "in place with no scratch in 16 bits unless small, else " * own + copies,
            "softmax": "one kernel along the last dimension or in place, else PyTorch's",
            "layer_norm": "one kernel",
            "sigmoid": "one kernel for contiguous tensors, else PyTorch's",
        }

    def _attention(self) -> str:
        if not self.has_triton or self.capability < (8, 0):
            return "PyTorch's operators, in panels of rows"
        if self.has_own_gemm:
            return "one forward kernel in 16 bits up to 64 features a head; else Triton's to 128, not in float64"
        return "Triton kernels up to 128 features a head, not in float64; else PyTorch's, in panels of rows"

    def _scaled(self) -> str:
        if self.capability < (8, 9):
            return "none: they need compute capability 8.9"
        return (
            "fused kernels with a bfloat16 result, else cuBLAS, then one pass"
            if self.has_own_gemm
            else ("cuBLAS, then one pass")
        )

    @property
    def needs(self) -> list[str]:
        """What to change for more; empty where this is all that there is."""
        needs = []
        if not self.architectures:
            needs.append("a build with CUDA: see docs/install.md")
        elif self.capability < (8, 0):
            needs.append("a GPU of compute capability 8.0 or newer")
        elif self.code is None or (self.capability == (9, 0) and not self.has_own_gemm):
            needs.append(f"a build with {self.number} in TORCH_CUDA_ARCH_LIST")
        if not self.has_triton and self.capability >= (8, 0):
            needs.append("Triton, for triangle_attention")
        return needs
