"""The predictions of src/cuda/gemm/times.cpp, for arrays of sizes, with coefficients that a fit moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .table import RULES, Candidate

__all__ = ["MULTIPROCESSORS", "Sizes", "cublas", "few_rows", "initial", "of_tiles"]

Array = Any
MULTIPROCESSORS, BYTES_PER_US = 132, 4e6
_TILES = ((128, 256, 1), (128, 128, 1), (128, 64, 2), (64, 64, 4))
_FACTOR = np.array([1.0, 2.0, 1.0])  # tensors that a kernel reads and writes, by rule
_PASS = np.array([2.0, 3.0, 3.0])


@dataclass(frozen=True)
class Sizes:
    """Of layers: m rows, n features out of each product, k in; rules by number; whether cuBLAS has one product."""

    m: Array
    n: Array
    k: Array
    rule: Array
    one_product: Array

    @classmethod
    def of(cls, draws: Sequence[dict[str, Any]]) -> Sizes:
        def array(name: str) -> Array:
            return np.array([draw["sizes"][name] for draw in draws], float)

        m, n, k = array("rows"), array("out"), array("in")
        rule = np.array([RULES.index(draw["rule"]) for draw in draws])
        packed = np.array([bool(draw["sizes"].get("packed")) for draw in draws])
        few_tiles = 2 * np.ceil(m / 128) * np.ceil(n / 64) <= MULTIPROCESSORS
        return cls(m, n, k, rule, (rule == 2) & packed & few_tiles)

    @property
    def products(self) -> Array:
        return np.where(self.rule == 2, 2.0, 1.0)


def alignment(features: Array) -> Array:
    """0 for rows of whole pieces of 16 bytes, to 3 for 2 bytes."""
    return np.select([features % 8 == 0, features % 4 == 0, features % 2 == 0], [0, 1, 2], 3)


def longer(a: Array, b: Array) -> Array:
    return (a**4 + b**4) ** 0.25


def _with_one(values: Array) -> Array:
    return np.concatenate([[1.0], values])


def of_tiles(candidate: Candidate, ctas: int) -> Callable[[Sizes, Array], Array]:
    """Coefficients: launch, latency, throughput, epilogues of the rules, memory, second; of steps, epilogue, memory."""

    def time(s: Sizes, x: Array) -> Array:
        load, store = alignment(s.k), alignment(s.n)
        tiles = np.ceil(s.m / candidate.rows) * np.ceil(s.n / candidate.columns)
        waves, most = np.ceil(tiles / (MULTIPROCESSORS * ctas)), np.ceil(tiles / MULTIPROCESSORS)
        of_steps, of_epilogue, of_memory = (_with_one(x[i : i + 3]) for i in (8, 11, 14))
        if not candidate.is_sm80:  # these read no other rows
            of_steps = of_epilogue = of_memory = np.ones(4)
        of_step = of_steps[load] * np.where(s.rule == 2, x[7], 1.0)
        steps = np.ceil(s.k / (32 if candidate.is_sm80 else 64)) * of_step * longer(x[1] * waves, x[2] * most)
        bytes_ = 2 * (s.m * s.k + s.products * s.n * s.k + s.m * s.n * _FACTOR[s.rule])
        memory = bytes_ / BYTES_PER_US * x[6] * of_memory[np.maximum(load, store)]
        return x[0] + longer(x[3:6][s.rule] * of_epilogue[store] * waves + steps, memory)

    return time


def few_rows(s: Sizes, x: Array) -> Array:
    """Coefficients: launch, memory, chunk, of more rows."""
    chunks = np.ceil(s.k / 1024) * np.ceil(s.n / (16 * 8 * MULTIPROCESSORS)) * np.where(s.m > 8, x[3], 1.0)
    bytes_ = 2 * (s.m * s.k + s.n * s.k + s.m * s.n)
    return x[0] + longer(bytes_ / BYTES_PER_US * x[1], x[2] * chunks)


def _product(s: Sizes, n: Array, x: Array) -> Array:
    load, store = alignment(s.k), alignment(s.n)
    of_steps, of_results = _with_one(x[0:3])[load], _with_one(x[3:6])[store]
    best = np.full(len(s.m), np.inf)
    for i, (rows, columns, ctas) in enumerate(_TILES):
        for parts in (1, 2, 4, 8, 16):
            whole = np.ceil(s.m / rows) * np.ceil(n / columns) * parts
            waves, most = np.ceil(whole / (MULTIPROCESSORS * ctas)), np.ceil(whole / MULTIPROCESSORS)
            steps = np.ceil(s.k / (64 * parts))
            latency, throughput = x[7] * np.sqrt(of_steps) * waves, x[8 + i] * most * of_steps * of_results
            time = waves * x[6] + steps * longer(latency, throughput)
            if parts > 1:
                time = time + x[12] + s.m * n * 4 * parts * x[13] / BYTES_PER_US
            best = np.where((parts == 1) | (s.k >= 128 * parts), np.minimum(best, time), best)
    bytes_ = 2 * (s.m * s.k + n * s.k + s.m * n)
    return x[18] + longer(best, bytes_ / BYTES_PER_US * x[14] * _with_one(x[15:18])[np.maximum(load, store)])


def cublas(s: Sizes, x: Array) -> Array:
    """Coefficients in the order of CublasTime in times.h, without the ones of whole pieces."""
    products = np.where(s.one_product, _product(s, 2 * s.n, x), s.products * _product(s, s.n, x))
    bytes_ = 2 * s.m * s.n * _PASS[s.rule]
    return products + x[19:22][s.rule] + bytes_ / BYTES_PER_US * x[22] * _with_one(x[23:26])[alignment(s.n)]


def initial(candidate: Candidate) -> Array:
    """Where a fit begins, and what it returns to where draws tell nothing."""
    if candidate.way == "cuBLAS":
        alignments = [1.5, 2, 3, 1.1, 1.3, 1.5]
        tiles = [1, 0.1, 0.35, 0.2, 0.12, 0.1, 2, 1]
        return np.array([*alignments, *tiles, 1.2, 1, 1.2, 1.5, 2, 1.5, 1.5, 1.5, 1.2, 1.1, 1.3, 1.5])
    if candidate.way == "kFewRows":
        return np.array([2, 1.2, 0.5, 1.5])
    return np.array([2, 0.1, 0.1, 0.5, 0.5, 0.5, 1.2, 1.5, 1.2, 1.6, 2.5, 1.1, 1.3, 1.5, 1, 1.1, 1.3])
