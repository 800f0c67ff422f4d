"""The folders of the package are rooms: imports between them go down one way, and no modules import one another in a
circle."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torchops"

# What each room may import besides itself, from the lowest up. `torchops/__init__.py` puts them together.
ROOMS: dict[str, set[str]] = {
    "_core": set(),
    "onnx": set(),
    "flops": set(),
    "_triangle_attention": {"_core"},
    "cuda": {"_triangle_attention"},
    "ops": {"_core", "_triangle_attention"},
    "nn": {"_core", "_triangle_attention", "ops"},
    "distributed": {"_core", "_triangle_attention", "nn"},
    "inductor": {"_core"},
    "quantization": {"nn"},
    "convert": {"_core", "_triangle_attention", "ops", "nn"},
    "__main__": {"_core", "ops"},
}


@cache
def modules() -> dict[str, Path]:
    """The files by the dotted names of their modules; _build_info, which the build writes, by its stub."""
    found = {}
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]:
        parts = ("torchops", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path) -> Iterator[str]:
    """The modules of the package that a file imports anywhere, also for types alone or when called."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [each if (each := f"{base}.{alias.name}") in modules() else base for alias in node.names]
        else:
            continue
        yield from (each for each in names if each in modules() and each != name)


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imported(name, path)) for name, path in modules().items()}


def test_no_circles() -> None:
    try:
        order = [*TopologicalSorter(graph()).static_order()]
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert len(order) == len(modules())


def test_imports_go_down() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if name != "torchops"
        and (room := name.split(".")[1]) != (below := [*other.split("."), ""][1])
        and below not in ROOMS[room]
    ]
    assert not wrong
    TopologicalSorter(ROOMS).prepare()  # the table itself has no circle


def test_top_level() -> None:
    """Nothing stands in the package that has no line above."""
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert {entry.removesuffix(".py") for entry in entries} - {"__init__", "py.typed"} == ROOMS.keys()
    assert len(entries) <= 14


@pytest.mark.parametrize(
    "name", sorted(name for name, path in modules().items() if path.name == "__init__.py" and name != "torchops")
)
def test_public_names_are_no_modules(name: str) -> None:
    """Importing a module puts it in the place of what its package calls the same."""
    below = {module.rpartition(".")[2] for module in modules() if module.rpartition(".")[0] == name}
    assert not below & set(getattr(importlib.import_module(name), "__all__", ()))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_length(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
