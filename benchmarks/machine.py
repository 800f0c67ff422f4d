"""The machine on which figures are measured."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import torchops

# Libraries that are measured, too, if they are installed.
PEERS = {"quack": "quack-kernels", "liger": "liger-kernel"}


def describe(device: torch.device) -> dict[str, str]:
    """Names machine, versions and source revisions, in the order in which a report shows them.

    Triangle attention, its layer and the Inductor pass are Python in `torchops/`, which thus has a revision, too.
    """
    return {
        "machine": _machine(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "torchops": torchops.__version__,
        **{name: version for name, package in PEERS.items() if (version := _version(package))},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "revision of src": _revision("src"),
        "revision of torchops": _revision("torchops"),
    }


def described(document: Mapping[str, Any]) -> dict[str, str]:
    """What :func:`describe` has written into a document."""
    names = ("machine", "threads", "torch", "torchops", *PEERS, "python", "system", "revision of src")
    return {name: document[name] for name in (*names, "revision of torchops") if name in document}


def where(document: Mapping[str, Any]) -> str:
    """The machine and the revisions, below a table."""
    return f"{document['machine']}, torch {document['torch']}, {revisions(document)}."


def revisions(description: Mapping[str, Any]) -> str:
    """The revisions in the words of a page: older results have only that of `src`."""
    python = description.get("revision of torchops")
    return f"revision {description['revision of src']} of `src`" + (f", {python} of `torchops`" if python else "")


def slug(description: dict[str, str]) -> str:
    """The folder name for results of this machine."""
    return re.sub(r"[^a-z0-9]+", "-", description["machine"].lower()).strip("-")


def command(what: str, arguments: Sequence[str] | None = None, processes: int = 0) -> str:
    """The command line that measures the same again: without the place where results go.

    `what` is a module or a script. `arguments` are by default those of this process, and with `processes`, torchrun
    starts so many.
    """
    kept = list(sys.argv[1:] if arguments is None else arguments)
    for option in ("--json", "--output"):
        while option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
        kept = [argument for argument in kept if not argument.startswith(f"{option}=")]
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(processes)] if processes else ["python"]
    return shlex.join([*launcher, *([what] if what.endswith(".py") else ["-m", what]), *kept])


class OtherLoad:
    """The share of the machine's processor time that other processes use during its `with` blocks (Linux)."""

    def __init__(self) -> None:
        self._total = 0.0
        self._other = 0.0

    def __enter__(self) -> OtherLoad:
        self._start = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        total, busy, own = (b - a for a, b in zip(self._start, self._read(), strict=True))
        self._total += total
        self._other += max(0.0, busy - own)

    def share(self) -> float | None:
        """Between 0 and 1, or None if the system doesn't report it."""
        return self._other / self._total if self._total else None

    @staticmethod
    def _read() -> tuple[float, float, float]:
        try:
            ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return 0.0, 0.0, 0.0
        idle = ticks[3] + ticks[4]
        scale = os.sysconf("SC_CLK_TCK")
        return sum(ticks) / scale, (sum(ticks) - idle) / scale, sum(os.times()[:4])


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX-512")
    return f"{len(os.sched_getaffinity(0))}-core {_cpu_model()}, {capability}"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _revision(folder: str) -> str:
    # For sources copied to another machine without their history: `<of src>,<of torchops>`, or one for both.
    if known := os.environ.get("BENCH_REVISION"):
        src, _, torchops = known.partition(",")
        return torchops if torchops and folder == "torchops" else src
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "log", "-1", "--format=%h", "--", f"../{folder}"], check=True, capture_output=True, text=True
        )
        changed = subprocess.run([*git, "status", "--porcelain", "--", f"../{folder}"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
