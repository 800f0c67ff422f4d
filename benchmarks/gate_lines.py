"""What `python -m benchmarks gates` measures: operators at sizes, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD, Shape, Task

BANDWIDTH, RATE = 2.98e12, 800e12
GLUS = ("glu", "swiglu")


@dataclass(frozen=True)
class Line:
    """One operator at one size. `most` is the time in microseconds that we want to stay below, if any. What `stream`
    names, x or v, is float32, and dtype is that of the weights."""

    op: str
    shape: Shape
    task: Task = FORWARD
    most: float | None = None
    dtype: str = "bfloat16"
    tf32: bool = False
    compiled: bool = True
    stream: str = ""

    @property
    def name(self) -> str:
        suffix = " (TF32)" * self.tf32 + (f" float32 {self.stream}" if self.stream else "")
        return f"{self.op} {self.shape} {self.task} {self.dtype}{suffix}"


def bound(line: Line) -> float | None:
    """Microseconds, for 16-bit dtypes."""
    if line.dtype not in ("bfloat16", "float16") or line.task in (OVERHEAD, OVERHEAD_GRAD):
        return None
    if line.op == "square_matmul_":
        batch, rows, n = line.shape
        stages = [(2 * (2 * batch * rows * n + batch * n * n), 2 * batch * rows * n * n)]
    else:
        rows, n_in, n_out = line.shape
        products = 2 if line.op in GLUS else 1
        of_x, of_v = (4 if name in line.stream else 2 for name in "xv")  # bytes of an element
        x, w, product = of_x * rows * n_in, 2 * products * n_in * n_out, 2 * rows * n_in * n_out
        v = 0 if line.op in (*GLUS, "dense") else of_v * rows * n_out
        y = v or 2 * rows * n_out
        stages = [(x + w + v + y, products * product)]
        if line.task == BACKWARD:
            # Reads g, x and v, writes dx and dv. dense reads its result instead of recomputing the product.
            again = 0 if line.op == "dense" else products
            stages.append(
                (y + 2 * x + 2 * v + (y if line.op == "dense" else 0) + 2 * w, (2 * products + again) * product)
            )
    return sum(max(bytes_ / BANDWIDTH, flops / RATE) for bytes_, flops in stages) * 1e6


def lines(device_type: str) -> list[Line]:
    """What is measured by default."""
    if device_type == "cpu":
        return [
            Line(op, shape, task, dtype=dtype)
            for op in ("gate", "glu")
            for shape in ((65536, 128, 128), (4096, 1024, 1024))
            for dtype in ("float32", "bfloat16")
            for task in (FORWARD, BACKWARD)
        ]
    million, eager = 1048576, partial(Line, compiled=False)
    return [
        Line("gate", (million, 128, 128), most=290),
        Line("gate_", (million, 128, 128), most=290),
        Line("gate", (million, 128, 128), BACKWARD, 860),
        Line("gate_", (million, 128, 128), BACKWARD, 860),
        Line("glu", (million, 128, 128), most=205),
        Line("glu", (262144, 128, 128), most=54),
        Line("glu", (65536, 128, 128), most=17),
        Line("glu", (million, 64, 64), most=104),
        Line("glu", (million, 256, 256), most=470),
        Line("glu", (million, 128, 128), BACKWARD, 660),
        Line("glu", (million, 64, 64), BACKWARD, 300),
        Line("glu", (million, 256, 256), BACKWARD, 2000),
        Line("swiglu", (8192, 4096, 11008)),
        Line("swiglu", (4096, 1024, 4096)),
        Line("swiglu", (8192, 4096, 11008), BACKWARD),
        Line("swiglu", (4096, 1024, 4096), BACKWARD),
        Line("square_matmul_", (128, 1024, 1024), most=400, compiled=False),
        *(
            eager("glu", (million // (1 + n // 200), n, n), task)
            for n in (48, 96, 192, 384, 512)
            for task in (FORWARD, BACKWARD)
        ),
        *(eager("gate", (million // (1 + n // 200), n, n)) for n in (48, 96, 192, 256, 384, 512)),
        *(
            eager(op, (million, 128, 128), task, dtype="float16")
            for op in ("gate", "glu")
            for task in (FORWARD, BACKWARD)
        ),
        *(
            Line(op, (262144, 128, 128), task, dtype="float32")
            for op in ("gate", "glu")
            for task in (FORWARD, BACKWARD)
        ),
        *_unaligned_lines(),
        *(eager(op, (16, 64, 64), OVERHEAD) for op in ("gate", "gate_", "glu")),
        *(eager(op, (16, 64, 64), OVERHEAD_GRAD) for op in ("gate", "glu")),
    ]


# Rows that are whole pieces of 8, 4 or 2 bytes, and not of 16: many of them, and few.
UNALIGNED_SIZES = [
    *[(262144, 100, 100), (262144, 130, 130), (262143, 129, 127), (131072, 449, 384), (4097, 1001, 1003)],
    *[(16383, 50, 50), (16383, 257, 255), (4095, 129, 127)],
]


def _unaligned_lines() -> list[Line]:
    return [
        Line(op, shape, task, compiled=False)
        for shape in UNALIGNED_SIZES
        for op in ("gate", "glu")
        for task in (FORWARD, BACKWARD)
    ]


def cublas_lines() -> list[Line]:
    """What has no kernel of its own: other dtypes, unaligned rows, and gates for comparison."""
    tasks, eager = (FORWARD, BACKWARD), partial(Line, compiled=False)
    return [
        *(
            Line(op, (rows, n, n), task)
            for op in ("gate", "glu", "dense")
            for task in tasks
            for n, all_rows in ((128, (65536, 262144, 1048576)), (64, (65536, 1048576)), (256, (65536, 1048576)))
            for rows in all_rows
        ),
        *(
            eager(op, (262144, 128, 128), task, dtype=dtype, tf32=tf32)
            for op in ("gate", "glu")
            for dtype, tf32 in (("float32", True), ("float64", False))
            for task in tasks
        ),
        *_unaligned_lines(),
    ]


def portable_lines() -> list[Line]:
    """What has a goal, and dense of few features, beside its product."""
    return [
        *(line for line in lines("cuda") if line.most),
        *(
            Line("dense", (rows, n_in, n_out), compiled=False)
            for rows in (65536, 1048576)
            for n_in in (64, 128, 256)
            for n_out in (64, 128, 256)
        ),
        *(Line("dense", (rows, 256, 256), dtype="float16", compiled=False) for rows in (65536, 1048576)),
    ]


def stream_lines() -> list[Line]:
    """A float32 x, or x and v, beside 16-bit weights."""
    wide, both = partial(Line, stream="x"), partial(Line, stream="x, v")
    return [
        *(
            of_stream(op, (1048576 // (n // 128 or 1), n, n), task)
            for op, of_stream in (("glu", wide), ("gate", wide), ("gate", both))
            for n in (64, 128, 256)
            for task in (FORWARD, BACKWARD)
        ),
        *(both("gate_", (1048576, n, n)) for n in (64, 128)),
        *(
            of_stream(op, (rows, n, n), compiled=False)
            for op, of_stream in (("glu", wide), ("gate", both))
            for rows, n in ((256, 128), (4096, 128), (65536, 128), (262144, 384), (262144, 512), (262144, 768))
        ),
        *(wide(op, (16, 64, 64), OVERHEAD, compiled=False) for op in ("gate", "glu")),
    ]
