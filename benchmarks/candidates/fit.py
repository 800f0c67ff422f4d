"""Fits the predictions to measured draws, and says how good the choice by them is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from . import model
from .table import CANDIDATES, CUBLAS, RULES, Candidate

__all__ = ["Fitted", "fitted", "regret"]

Draws = Sequence[dict[str, Any]]
_LEAST_MICROSECONDS = 1.0  # differences below this do not count
_FEWEST_DRAWS = 6
_ALL = (*CANDIDATES, CUBLAS)


@dataclass(frozen=True)
class Fitted:
    """A candidate's coefficients, the CTAs that fit a multiprocessor, and the rules that it was measured for."""

    candidate: Candidate
    predict: Callable[[model.Sizes, Any], Any]
    coefficients: Any
    ctas: int
    rules: tuple[str, ...]


def fitted(draws: Draws) -> list[Fitted]:
    """Of the candidates that enough draws have."""
    found = [_fit(candidate, [d for d in draws if candidate.name in d["seconds"]]) for candidate in _ALL]
    return [each for each in found if each is not None]


def _fit(candidate: Candidate, draws: Draws) -> Fitted | None:
    if len(draws) < _FEWEST_DRAWS:
        return None
    sizes, start = model.Sizes.of(draws), np.log(model.initial(candidate))
    seconds = np.log([1e6 * draw["seconds"][candidate.name] for draw in draws])
    rules = tuple(rule for rule in RULES if any(draw["rule"] == rule for draw in draws))
    if candidate is CUBLAS:
        models: dict[int, Any] = {1: model.cublas}
    elif candidate.way == "kFewRows":
        models = {1: model.few_rows}
    else:
        models = {ctas: model.of_tiles(candidate, ctas) for ctas in ((1, 2, 3, 4, 6) if candidate.is_sm80 else (1, 2))}

    def solve(predict: Any) -> Any:
        def residuals(x: Any) -> Any:
            # The second term holds what no draw decides.
            return np.concatenate([np.log(predict(sizes, np.exp(x))) - seconds, 0.02 * (x - start)])

        return least_squares(residuals, start, loss="soft_l1", f_scale=0.08, max_nfev=150)

    ctas, best = min(((ctas, solve(predict)) for ctas, predict in models.items()), key=lambda pair: float(pair[1].cost))
    return Fitted(candidate, models[ctas], np.exp(best.x), ctas, rules)


def regret(draws: Draws) -> str:
    """A table: the time of the candidate that is predicted to be fastest over that of the fastest one, in each half of
    the draws after a fit to the other; and the same of what the measured library chose. Layers that it copies first
    (src/cuda/gemm/ways.h) are left out: that is decided before."""
    halves = [[d for i, d in enumerate(draws) if i // 3 % 2 == half] for half in (0, 1)]
    rows: dict[str, tuple[list[float], list[float]]] = {rule: ([], []) for rule in RULES}
    for half, others in (halves, halves[::-1]):
        predictions = fitted(others)
        for draw in half:
            predicted, chosen = _ratios(draw, predictions)
            if not math.isnan(predicted):
                rows[draw["rule"]][0].append(predicted)
                rows[draw["rule"]][1].append(chosen)
    columns = "mean | above 1.05 | above 1.15 | worst"
    lines = [f"| rule | draws | predicted: {columns} | chosen: {columns} |", "|---" * 10 + "|"]
    lines += [f"| {rule} | {len(p)} | {_summary(p)} | {_summary(c)} |" for rule, (p, c) in rows.items() if p]
    return "\n".join(lines)


def _ratios(draw: dict[str, Any], predictions: Sequence[Fitted]) -> tuple[float, float]:
    seconds = {name: 1e6 * value for name, value in draw["seconds"].items()}
    chosen = seconds.pop("chosen")
    sizes = model.Sizes.of([draw])
    times = {f.candidate.name: f.predict(sizes, f.coefficients)[0] for f in predictions if f.candidate.name in seconds}
    best = min(seconds.values())
    if not times or (chosen < best - _LEAST_MICROSECONDS and chosen < 0.9 * best):
        return math.nan, math.nan  # by way of copies

    def ratio(time: float) -> float:
        return 1.0 if time - best < _LEAST_MICROSECONDS else time / best

    return ratio(seconds[min(times, key=lambda name: times[name])]), ratio(chosen)


def _summary(ratios: Sequence[float]) -> str:
    values = np.array(ratios)
    above = " | ".join(f"{100 * (values > limit).mean():.1f}%" for limit in (1.05, 1.15))
    return f"{np.exp(np.log(values).mean()):.3f} | {above} | {values.max():.2f}"
