"""The documents are true: their Python runs and prints what they show; links, commands and generated tables are right.

Conventions of docs/*.md, README.md, and the pages of tables, which are the README.md files in benchmarks/results:

- All ``python`` blocks of a page run from top to bottom in one namespace, in an empty folder. In a block with comments
  ``# -> text``, these are all that the block prints, line by line.
- ``python no-run`` blocks are only parsed: those of `NO_RUN`, which docs/README.md lists with what else does not run.
- Tables between ``<!-- dispatch table -->`` or ``<!-- benchmarks NAME -->`` and ``<!-- end -->`` are generated: with
  EXPECTTEST_ACCEPT=1 the tests write them anew.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import gc
import importlib
import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_schema import full_name, operators

import torchops
from benchmarks import options, render, run

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RUN = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(run.RESULTS.rglob("README.md"))]
READ = [ROOT / "CONTRIBUTING.md", *RUN]

# By page, their first words.
NO_RUN = {
    "docs/serving.md": ["torch._inductor.aoti_compile_and_package"],
    "docs/whole_models.md": ["import", "from", "from", "torchops.replace"],
}

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
EXPECTED = re.compile(r"#\s->\s?(.*)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *infos: str) -> Iterator[tuple[int, str]]:
    """The line number and the text of every code block whose info string is one of `infos`."""
    text = page.read_text()
    for fence in FENCE.finditer(text):
        if fence["info"].strip() in infos:
            yield text[: fence.start("body")].count("\n"), fence["body"]


# --- Python ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _own_process_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a page may change is put back: folder, import path, defaults of torch, process groups."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with torch.enable_grad():
        yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_default_device(None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_own_process_state")
@pytest.mark.parametrize("page", [p for p in RUN if next(blocks(p, "python"), None)], ids=name)
def test_python_of(page: Path) -> None:
    kernels = [torch._C._dispatch_dump(full_name(schema)) for schema in operators()]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks(page, "python"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # The empty lines give tracebacks the line numbers of the page.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        expected = EXPECTED.findall(code)
        if expected:
            got = printed.getvalue().splitlines()
            assert [s.strip() for s in got] == [s.strip() for s in expected], f"{name(page)}:{line}"
    # Kernels that the page registered go with the `Library` that holds them, for the sake of the tests that follow.
    for key in [k for k, value in namespace.items() if isinstance(value, torch.library.Library)]:
        del namespace[key]
    gc.collect()
    assert [torch._C._dispatch_dump(full_name(schema)) for schema in operators()] == kernels


@pytest.mark.usefixtures("_own_process_state")
def test_the_readme_shows_an_update() -> None:
    """The triangle update of a new layer is 0, and so would be the effect of what the reader runs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for _, code in blocks(ROOT / "README.md", "python"):
        exec(code, namespace)
    assert namespace["update"](namespace["pairs"]).abs().max() > 0.1


@pytest.mark.parametrize("page", RUN, ids=name)
def test_other_blocks_of(page: Path) -> None:
    known = {"python", "python no-run", "cpp", "cuda", "cmake", "bash", "mermaid", "text", "ptx", "diff", "make"}
    infos = {fence["info"].strip() for fence in FENCE.finditer(page.read_text())}
    assert infos <= known, "a block without a known language is neither run nor checked"
    skipped = list(blocks(page, "python no-run"))
    assert [re.split(r"[ (\n]", code)[0] for _, code in skipped] == NO_RUN.get(name(page), [])
    for line, code in skipped:
        compile("\n" * line + code, str(page), "exec", ast.PyCF_ONLY_AST)


# By page, the sources that ctest builds and that its C++ and CMake quote.
QUOTED = {
    "docs/guarantees_integration.md": ["test/cpp/downstream/CMakeLists.txt", "test/cpp/downstream/main.cpp"],
    "docs/ladder.md": ["examples/ladder/dense_loops.cpp"],
    "docs/serving.md": ["examples/serving/serve.cpp"],
    "docs/adding_an_operator.md": ["src/cuda/gemm/table.def"],  # test_cuda_build.py compiles what it adds to it
}


def words(code: str) -> set[str]:
    return set(re.findall(r"[\w/]+(?:::\w+)*", re.sub(r"//[^\n]*", "", code)))


@pytest.mark.parametrize("page", [p for p in RUN if next(blocks(p, "cpp", "cmake"), None)], ids=name)
def test_quotations_of(page: Path) -> None:
    """What C++ and CMake call and include is what a program calls and includes that is built and run."""
    built = words("\n".join((ROOT / source).read_text() for source in QUOTED[name(page)]))
    for _, code in blocks(page, "cpp", "cmake"):
        used = {word for word in words(code) if "::" in word or "/" in word or word.startswith(("find_", "target_"))}
        assert {word for word in used if not word.startswith(("/path", "std::"))} <= built


# --- commands --------------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each shell command in `bash` blocks, and in code spans that begin like one."""
    text = FENCE.sub("", page.read_text())
    spans = [s for s in re.findall(r"`([^`]+)`", text) if re.match(r"make [a-z-]|(\.venv/bin/)?python |torchrun ", s)]
    for source in (*(code for _, code in blocks(page, "bash")), *spans):
        for line in source.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in (*lexer, ";"):
                if set(word) <= set(";&|"):
                    if words:
                        yield words
                    words = []
                elif words or not re.match(r"[A-Z_]+=", word):
                    words.append(word)


def check_make(arguments: list[str]) -> None:
    folder = ROOT
    if arguments[:1] == ["-C"]:
        folder, arguments = ROOT / arguments[1], arguments[2:]
    text = (folder / "Makefile").read_text()
    for argument in arguments:
        if (variable := argument.partition("=")[0]) != argument:
            assert re.search(rf"^{variable}\s*\??[:?]?=", text, re.MULTILINE), f"make has no variable {variable}"
        else:
            rule = rf"^([\w-]+ )*{re.escape(argument)}( [\w-]+)*:(?!=)"
            assert re.search(rule, text, re.MULTILINE), f"make has no target {argument}"


def literals(files: list[Path]) -> set[str]:
    trees = [ast.parse(file.read_text()) for file in files]
    return {n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def check_program(files: list[Path], arguments: list[str]) -> None:
    """Options and the first word, if there are subcommands, are spelled in the program's source."""
    known = literals(files) | {"-h", "--help"}
    if files[0].parent.name == "benchmarks":
        known |= {f"--{name}" for name in options.SHARED}
    if arguments and arguments[0][0].isalpha() and any("add_subparsers" in file.read_text() for file in files):
        assert arguments[0] in known, f"{files[0]} has no command {arguments[0]}"
    for option in (a.partition("=")[0] for a in arguments if re.match(r"--?[a-zA-Z]", a)):
        assert option in known, f"{files[0]} has no option {option}"


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        path = ROOT / Path(*arguments[1].split("."))
        if arguments[1] == "pytest":
            for file in (a.partition("::")[0] for a in arguments[2:] if a.startswith("test")):
                assert (ROOT / file).exists(), f"no {file}"
        elif (ROOT / path.relative_to(ROOT).parts[0]).is_dir():
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
            assert not path.is_dir() or path / "__main__.py" in files, f"no {path}/__main__.py"
            check_program(files, arguments[2:])
    elif script := next((i for i, a in enumerate(arguments) if a.startswith("examples/")), None):
        check_program([ROOT / arguments[script]], arguments[script + 1 :])
    elif arguments[0].startswith("examples/"):
        check_program([ROOT / arguments[0]], arguments[1:])


def checked(page: Path) -> bool:
    return any(words[0] == "make" or re.search(r"python|torchrun|^\.", words[0]) for words in commands(page))


@pytest.mark.parametrize("page", [p for p in READ if checked(p)], ids=name)
def test_commands_of(page: Path) -> None:
    for program, *arguments in commands(page):
        if program == "make":
            check_make(arguments)
        elif arguments and re.fullmatch(r"(.*/)?(python3?|torchrun)", program):
            check_python(arguments)
        elif program.startswith("."):
            assert (ROOT / program).exists() or program.startswith(".venv/"), f"no {program}"


# --- links -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = next(i for i in range(len(found) + 1) if (f"{slug}-{i}" if i else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "code", FENCE.sub("", page.read_text()))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]


@pytest.mark.parametrize("page", READ, ids=name)
def test_links_of(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            broken.append(link)
    assert not broken


def test_index_has_every_page() -> None:
    assert {p.name for p in DOCS.glob("*.md")} - {"README.md"} <= set(links(DOCS / "README.md"))


# --- docstrings ------------------------------------------------------------------------------------------------------

FUNCTIONS = [f for f in map(torchops.ops.__dict__.get, torchops.ops.__all__) if inspect.isfunction(f)]
MODULES = [*(getattr(torchops.nn, module) for module in torchops.nn.__all__), torchops.replace]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_shapes_and_dtypes_of(function: Any) -> None:
    """Or the function that has the same ones."""
    assert re.search(r"\bShapes?\b|\bshape\b|``\(\.\.\.", function.__doc__)
    assert re.search(r"^ *Dtypes: |dtypes are those of :func:", function.__doc__, re.MULTILINE)


@pytest.mark.parametrize("public", [*FUNCTIONS, *filter(inspect.isclass, MODULES)], ids=lambda f: f.__name__)
def test_memory_of(public: Any) -> None:
    assert re.search(r"^ *Memory: ", public.__doc__, re.MULTILINE)


@pytest.mark.parametrize("public", [*FUNCTIONS, *MODULES], ids=lambda f: f.__name__)
def test_docstring_of(public: Any) -> None:
    """Says what is raised where something can be, and its example prints what it shows."""
    assert re.search(r"^ *Raises:\n +\w+Error: ", public.__doc__, re.MULTILINE)
    scope = {"torch": torch, "torchops": torchops, "nn": torch.nn}
    (found,) = doctest.DocTestFinder(recurse=False).find(public, globs=scope)
    assert found.examples
    printed: list[str] = []
    assert doctest.DocTestRunner().run(found, out=printed.append).failed == 0, "".join(printed)


def test_reference_has_every_name() -> None:
    """The list of functions in docs/site/reference.rst. What it includes as a whole module is complete by itself."""
    listed = re.findall(
        r"^\.\. autofunction:: torchops\.(\w+)$", (DOCS / "site" / "reference.rst").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(["info", "replace", *(function.__name__ for function in FUNCTIONS)])


def test_table_of_the_public_api() -> None:
    """Has each public name once, with its module."""
    rows = re.findall(r"^\| (`.*?) \| `([\w.]+)` \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    listed = sorted((module, name) for names, module in rows for name in re.findall(r"`(\w+)`", names))
    modules = [torchops, *(m for m in map(torchops.__dict__.get, torchops.__all__) if inspect.ismodule(m))]
    modules += [importlib.import_module(f"torchops.{name}") for name in ("convert", "distributed", "inductor", "onnx")]
    public = {(module.__name__, name) for module in modules for name in module.__all__}
    public -= {("torchops", module.__name__.rpartition(".")[2]) for module in modules}
    public -= {(f"torchops.{module}", name) for module in ("ops", "convert") for name in torchops.__all__}
    assert listed == sorted(public)


# --- measurements ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", render.PAGES, ids=name)
def test_tables_of_results_in(page: Path) -> None:
    assert render.BLOCK.search(page.read_text())
    if os.environ.get("EXPECTTEST_ACCEPT"):
        page.write_text(render.rendered(page.read_text()))
    assert page.read_text() == render.rendered(page.read_text()), "python -m benchmarks render writes it anew"


@pytest.mark.parametrize(
    "folder",
    sorted(p for p in run.RESULTS.iterdir() if p.is_dir() and any(True for _ in render.documents(p))),
    ids=lambda p: p.name,
)
def test_tables_of(folder: Path) -> None:
    for path, document in render.documents(folder):
        expected = render.markdown(document)
        assert path.with_suffix(".md").read_text() == expected, "python -m benchmarks render writes it anew"


# --- the table of kernels --------------------------------------------------------------------------------------------

TABLE = re.compile(r"(?<=<!-- dispatch table -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
# As the dispatcher asks: from the top of the stack to the backends.
ORDER = ("FuncTorchBatched", "AutocastCPU", "AutocastCUDA", "Tracer", "Autograd", "ADInplaceOrView", "CPU", "Meta")


def dispatch_table() -> str:
    """One row for each operator, one column for each key that has a kernel of any of them.

    CUDA has no column: whether it has kernels is a question of the build, and `test_schema.py` holds that in a build
    with CUDA it has those of the column CPU.
    """
    kernels: dict[str, set[str]] = {}
    for schema in operators():
        lines = torch._C._dispatch_dump(full_name(schema)).splitlines()
        keys = [line.partition(":")[0].partition("[")[0] for line in lines if ": registered at" in line]
        kernels[full_name(schema).removeprefix("myops::")] = set(keys) - {"debug", "CUDA"}
    found = set().union(*kernels.values())
    columns = [k for k in ORDER if k in found] + sorted(found.difference(ORDER))
    rows = [["operator", *columns], ["---", *(":-:" for _ in columns)]]
    rows += [[f"`{op}`", *("x" if k in keys else "" for k in columns)] for op, keys in kernels.items()]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def test_dispatch_table() -> None:
    page = DOCS / "dispatch_table.md"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        page.write_text(TABLE.sub(lambda _: dispatch_table(), page.read_text()))
    assert TABLE.findall(page.read_text()) == [dispatch_table()], "EXPECTTEST_ACCEPT=1 writes it anew"
