"""Measurements of compiled code. Compilation takes nearly all of the time, so several processes compile at once; they
then measure one after another.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from . import timing
from .progress import Progress

C = TypeVar("C")
R = TypeVar("R")


def jobs(device_type: str) -> int:
    """How many processes compile. On the CPU they would disturb each other's caches."""
    return min(14, os.cpu_count() or 1) if device_type == "cuda" else 1


def _work(connection: Connection, prepare: Callable[[Any], Callable[[], Any]], cases: Sequence[Any]) -> None:
    """A process: prepares its cases, reports each, and measures one when told to."""
    torch._inductor.config.compile_threads = 1  # there are already as many processes as cores
    measure = {}
    for number, case in enumerate(cases):
        # The recompile limit counts all functions from the same line of code together.
        torch._dynamo.config.recompile_limit = 1000
        try:
            measure[number] = prepare(case)
            connection.send((number, None))
        except Exception as error:
            connection.send((number, timing.first_line(error)))
        _give_back()
    while (number := connection.recv()) is not None:
        try:
            connection.send((measure[number](), None))
        except Exception as error:
            connection.send((None, timing.first_line(error)))
        _give_back()


def _give_back() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(
    prepare: Callable[[C], Callable[[], R]],
    cases: Sequence[C],
    processes: int,
    seconds: float,
    progress: Progress | None = None,
) -> Iterator[tuple[C, R]]:
    """`prepare(case)` compiles and returns a function that measures. Both run in the same one of the processes.

    Yields results in the order of the cases. Cases that fail or are not prepared after `seconds` are skipped, with a
    line on stderr that says why. Whoever takes a result ends its case in the progress.
    """
    progress = progress or Progress(len(cases))
    progress.case("compiling")
    spawn = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + seconds
    workers = []
    for shard in (range(i, len(cases), processes) for i in range(min(processes, len(cases)))):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_work, args=(theirs, prepare, [cases[n] for n in shard]), daemon=True)
        process.start()
        workers.append((process, ours, shard))
    failures: dict[int, str] = {}
    pending = [set(range(len(shard))) for _, _, shard in workers]
    while any(pending) and time.monotonic() < deadline:
        for (_, connection, shard), numbers in zip(workers, pending, strict=True):
            if numbers and connection.poll(0.01):
                try:
                    number, error = connection.recv()
                except EOFError:
                    failures |= dict.fromkeys(shard, "its process ended")
                    numbers.clear()
                    continue
                numbers.remove(number)
                if error:
                    failures[shard[number]] = error
    for (process, _, shard), numbers in zip(workers, pending, strict=True):
        failures |= {shard[number]: "not compiled in time" for number in numbers}
        # A process that is still compiling would disturb the measurements of the others.
        if numbers:
            process.terminate()
            failures = {shard[n]: "compiled, and not measured" for n in range(len(shard))} | failures
    for index, case in enumerate(cases):
        _, connection, shard = workers[index % len(workers)]
        name = str(getattr(case, "name", case))
        progress.case(name)
        if index not in failures:
            try:
                connection.send(shard.index(index))
                result, error = connection.recv()
            except (EOFError, OSError):
                result, error = None, "its process ended"
                failures |= dict.fromkeys(shard, error)
            if not error:
                yield case, result
                continue
            failures[index] = error
        progress.finished()
        print(f"{name}: {failures[index]}", file=sys.stderr)
    for (process, connection, _), numbers in zip(workers, pending, strict=True):
        if not numbers:
            with suppress(OSError):  # the process has ended
                connection.send(None)
        process.join()
