"""The benchmarks: every implementation computes the right thing, and the command line does what it says."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import compare, gradcheck, implementations, plots, progress, report, run, workload
from benchmarks.__main__ import COMMANDS, main, parser
from benchmarks.case import BACKWARD, FORWARD, OVERHEAD, STEP, Case, Cost, Shape
from benchmarks.operators import OPERATORS
from benchmarks.report import Report, Result
from benchmarks.roofline import Roofline
from benchmarks.timing import Timing

CPU = torch.device("cpu")
# Compiling takes seconds and is tested elsewhere.
MODES = ("cpp", "eager", "eager-in-place", "py")
DESCRIPTION = {"machine": "a machine", "torch": "2"}


def _timing(seconds: float, ratio: float = 1.0) -> Timing:
    return Timing(seconds, seconds, seconds, ratio)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPERATORS)
def test_derivatives(op: str, mode: str) -> None:
    outcomes = gradcheck.checks(OPERATORS[op], mode, CPU)
    if not outcomes and mode != "cpp":
        pytest.skip(f"mode {mode} has no {op} with a gradient")
    assert outcomes
    assert {name: problem for name, problem in outcomes.items() if problem} == {}
    if op == "dense" or (op == "softmax" and mode != "eager-in-place"):
        assert len(outcomes) == 5


# Odd sizes, and sizes on both sides of what a kernel takes at once.
PRODUCTS_ON_CUDA: tuple[Shape, ...] = (131, 67, 35), (1, 100, 300)
ROWS_ON_CUDA: tuple[Shape, ...] = (131, 67), (3, 100_003)
SQUARES_ON_CUDA: tuple[Shape, ...] = (131, 67), (40_001, 128), (777, 192), (20_001, 256), (1, 300), (20_001, 1024)
TRANSITIONS_ON_CUDA: tuple[Shape, ...] = (131, 67, 35), (40_001, 128, 512), (1, 16, 64), (333, 136, 200)
ON_CUDA = {
    **dict.fromkeys(("dense", "gate", "gate_", "glu", "swiglu"), PRODUCTS_ON_CUDA),
    **dict.fromkeys(("layer_norm", "layer_norm_", "sigmoid", "sigmoid_", "softmax", "softmax_"), ROWS_ON_CUDA),
    **dict.fromkeys(("square_matmul", "square_matmul_"), SQUARES_ON_CUDA),
    **dict.fromkeys(("transition", "add_transition_"), TRANSITIONS_ON_CUDA),
}


@pytest.mark.parametrize("op", ON_CUDA)
def test_triton_on_cuda(op: str) -> None:
    if reason := implementations.unavailable("triton", "cuda" if torch.cuda.is_available() else "cpu"):
        pytest.skip(reason)
    device = torch.device("cuda")
    outcomes = gradcheck.checks(OPERATORS[op], "triton", device)
    assert bool(outcomes) == (("triton", op) not in gradcheck.NO_GRADIENT)
    assert {name: problem for name, problem in outcomes.items() if problem} == {}
    for shape in ON_CUDA[op]:
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for task in (FORWARD,) if op.endswith("_") else (FORWARD, BACKWARD):
                work = workload.build(Case(op, shape, dtype, task), ["triton"], device, references=False, rotated=False)
                assert workload.check(work)[1] == {}, (shape, dtype, task)
            if op.endswith("_"):
                x, *others = work.inputs[0]
                expected = work.contenders["triton"](x.clone(), *others)
                assert work.contenders["triton"](x, *others) is x
                assert torch.equal(x, expected)


def test_gradcheck_finds_what_slow_mode_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        """Right wherever the cotangent has a single entry."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.sigmoid(x))
            return torch.sigmoid(x)

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Tensor:
            (g,), (y,) = cotangents, ctx.saved_tensors
            several = (g != 0).sum() > 1
            return torch.where(several, torch.zeros_like(g), g * y * (1 - y))

    find = implementations.find
    monkeypatch.setattr(implementations, "find", lambda op, mode: Wrong.apply if mode == "py" else find(op, mode))
    outcomes = gradcheck.checks(OPERATORS["sigmoid"], "py", CPU)
    assert outcomes["gradcheck, slow"] == ""
    assert outcomes["random cotangents"] != ""
    assert main(["gradcheck", "-o", "sigmoid", "-m", "py", "--device", "cpu"]) == 1


def test_ours_failing_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = implementations.find
    monkeypatch.setattr(implementations, "find", lambda op, mode: torch.tanh if mode == "cpp" else find(op, mode))
    run = ["run", "-o", "sigmoid", "-m", "cpp,eager", "--shape", "9,9", "--quick", "--device", "cpu"]
    assert main([*run, "--output", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "FAILED  sigmoid: forward (9, 9) float32: wrong result" in output
    assert "eager" in output


def test_a_missed_target_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("sigmoid", (9, 9), targets={"eager": 1e9})
    monkeypatch.setattr(run, "selected", lambda options, device_type: [case])
    command = ["run", "-o", "sigmoid", "-m", "cpp,eager", "--quick", "--device", "cpu", "--output", str(tmp_path)]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "| missed target | contender | is | target |" in output
    assert "| sigmoid forward (9, 9) float32 | eager |" in output


@pytest.mark.parametrize(("mode", "module"), [("quack", "quack"), ("liger", "liger_kernel")])
def test_a_peer_that_is_missing_or_broken_is_left_out(mode: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    for spec, reason in ((None, "is not installed"), (object(), "does not load: ")):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, spec=spec: spec if name == module else find_spec(name),
        )
        for name in [name for name in sys.modules if name.startswith((f"{module}.", f"{implementations.__name__}."))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)  # what makes `import` fail
        implementations._broken.cache_clear()
        assert reason in implementations.unavailable(mode, "cuda")
        assert mode not in workload.default_modes(Case("softmax", (9, 9)), "cuda")
    implementations._broken.cache_clear()


def test_compiled_ours() -> None:
    x = torch.randn(9, 9)
    function = implementations.find("softmax_", "compile-ours")
    assert function is not None
    expected = torch.softmax(x, -1)
    torch.testing.assert_close(function(x), expected)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("op", [op for op in OPERATORS if op.endswith("_")])
def test_in_place_contenders_overwrite(op: str) -> None:
    for mode in MODES:
        function = implementations.find(op, mode)
        if function is not None:
            args = OPERATORS[op].make(OPERATORS[op].small, torch.float32, CPU)
            pointer = args[0].data_ptr()
            with torch.no_grad():
                out = function(*args)
            assert (out.data_ptr(), out.tolist()) == (pointer, args[0].tolist()), mode


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_cases_are_consistent(op: str, device_type: str) -> None:
    operator = OPERATORS[op]
    cases = operator.cases(device_type)
    assert cases
    assert len({case.name for case in cases}) == len(cases)
    for case in [*cases, *operator.memory(device_type)]:
        assert case.op == op
        assert len(case.shape) == len(operator.dims)
        assert not case.sweep or case.sweep in operator.dims
        assert set(case.targets) <= {*implementations.MODES, *operator.references}
        # Every output element is written, and at least one input element read for it.
        assert operator.cost(case.shape, case.task).elements >= math.prod(case.shape[:1])


def test_dense_brings_the_network_that_is_made_of_it() -> None:
    def operators(*command: str) -> set[str]:
        return {case.op for case in run.selected(parser("run").parse_args(["run", *command]), "cpu")}

    assert operators("-o", "dense") == {"dense", "mlp"}
    assert operators("-o", "mlp") == {"mlp"}
    assert operators("-o", "dense", "--shape", "5,7,3") == {"dense"}
    assert operators() == set(OPERATORS)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m benchmarks {command} " in capsys.readouterr().out


def test_cost_and_floor_of_dense() -> None:
    cost = OPERATORS["dense"].cost((10, 20, 30), FORWARD)
    assert cost == Cost(10 * 20 + 20 * 30 + 30 + 10 * 30, 2 * 10 * 20 * 30)
    assert OPERATORS["dense"].cost((10, 20, 30), BACKWARD).flops == 3 * cost.flops
    roofline = Roofline(CPU)
    roofline._rates.update({"copy": 1e9, "float32": 1e12})
    assert roofline.floor(Case("dense", (10, 20, 30)), cost) == pytest.approx(cost.elements * 4 / 1e9)
    assert roofline.floor(Case("dense", (10, 20, 30)), Cost(1, 10**12)) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", MODES)
def test_tasks_compute_gradients(mode: str) -> None:
    work = workload.build(Case("dense", (5, 7, 3), task=BACKWARD), [mode], CPU, rotated=False)
    dx, dw, db = work.contenders[mode](*work.inputs[0])
    assert (dx.shape, dw.shape, db.shape) == ((5, 7), (3, 7), (3,))
    step = workload.build(Case("mlp", (4,), task=STEP), [mode], CPU, rotated=False)
    assert len(step.contenders[mode](*step.inputs[0])) == 6


def _report(*results: Result) -> Report:
    return Report("dense", DESCRIPTION, "a command", {"copy": 2e9, "float32": 3e12}, list(results))


def test_report_shows_ratios_targets_and_errors() -> None:
    case = Case("dense", (1, 2, 3), targets={"eager": 1.5, "linear": 0.9})
    timings = {"cpp": _timing(1e-3), "eager": _timing(1.2e-3, 1.2), "linear": _timing(9e-4, 0.9)}
    result = Result(case, Cost(10, 20), 5e-4, timings, {"compile": "KeyError: 'buf1'"}, "clock")
    assert result.misses() == [("dense forward (1, 2, 3) float32", "eager", 1.2, 1.5)]
    assert report.missed_table(result.misses())[2:] == ["| dense forward (1, 2, 3) float32 | eager | 1.20x | 1.50x |"]
    text = report.to_markdown(_report(result))
    row = "| forward (1, 2, 3) float32 | 1.00 ms | 1.20 ms (1.20x) | 900 µs (0.90x) | 50% |"
    assert f"{row} **MISSED** eager 1.50, linear 0.90 | clock, warm |" in text
    assert "- forward (1, 2, 3) float32, compile: KeyError: 'buf1'" in text
    assert "copy 2.00 GB/s, float32 product 3.00 TFLOP/s" in text
    document = report.to_document(_report(result))
    assert document["cases"][0]["bytes"] == 40
    assert document["cases"][0]["timings"]["eager"]["ratio"] == 1.2


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.50 s"), (0.0291, "29.1 ms"), (123e-6, "123 µs"), (1.5e-6, "1.50 µs")]
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert report.format_seconds(seconds) == text


def test_overhead_has_no_share_of_the_roofline() -> None:
    assert (
        Result(Case("dense", (1, 1, 1), task=OVERHEAD), Cost(4, 2), 1e-9, {"cpp": _timing(1e-6)}).share("cpp") is None
    )


def test_run_then_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "-o", "dense", "-m", "py,cpp,eager", "--shape", "33,17,9", "--quick", "--device", "cpu"]
    assert main([*run, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.rglob("dense.json")
    assert file.with_suffix(".md").read_text().startswith("# dense")
    document = json.loads(file.read_text())
    (case,) = document["cases"]
    assert list(case["timings"]) == ["cpp", "eager", "py", "preallocated", "linear"]
    assert document["command"] == shlex.join(["python", "-m", "benchmarks", *run])
    assert case["relative_errors"]["cpp"] < 1e-6

    assert main(["compare", str(file), str(file)]) == 0
    slower = json.loads(file.read_text())
    slower["cases"][0]["timings"]["cpp"]["seconds"] *= 1.5
    other = tmp_path / "slower.json"
    other.write_text(json.dumps(slower))
    capsys.readouterr()
    assert main(["compare", str(file), str(other)]) == 1
    assert "| 1.500 | **slower** |" in capsys.readouterr().out
    assert main(["compare", str(file), str(other), "--tolerance", "0.6"]) == 0
    capsys.readouterr()
    assert main(["compare", str(file), str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"python -m benchmarks compare: there is no {tmp_path / 'none'}\n"
    # Measured now, whatever the time: the ratio to itself is 1.
    assert main(["compare", str(file), "run", "--quick", "--against", "cpp", "--device", "cpu"]) == 0


@pytest.mark.parametrize("path", sorted(run.RESULTS.glob("*/dense.json")), ids=lambda path: path.parent.name)
def test_results_are_read_as_they_were_written(path: Path) -> None:
    document = json.loads(path.read_text())
    assert json.loads(json.dumps(report.to_document(report.from_document(document)))) == document


def test_compare_reports_what_was_not_measured() -> None:
    entry: dict[str, Any] = {
        "name": "forward (1, 2, 3) float32",
        "timings": {"cpp": {"seconds": 1.0}, "eager": {"seconds": 2.0}},
    }
    old = [{"op": "dense", "cases": [entry, {**entry, "name": "another"}]}]
    rows, missing = compare.rows_of(old, [{"op": "dense", "cases": [entry]}], ["cpp"], "eager")
    assert [(row.old, row.new) for row in rows] == [(0.5, 0.5)]
    assert missing == ["dense another"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-m", "cuda", "--device", "cpu"], "mode cuda runs on cuda, not on cpu"),
        (["run", "-o", "dense", "--case", "no such case", "--device", "cpu"], "no case matches"),
        (["memory", "-o", "dense", "--device", "cpu"], "no case matches"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_forced_path_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHOPS_KERNEL_PATH", "cublas")
    assert main(["run", "-o", "dense", "--device", "cpu"]) == 2
    assert "TORCHOPS_KERNEL_PATH=cublas" in capsys.readouterr().err


def test_pictures(tmp_path: Path) -> None:
    results = [
        Result(
            Case("dense", (rows, 2, 3), sweep="rows", targets={"eager": 1.0, "linear": 1.0}),
            Cost(rows, rows),
            1e-6 * rows,
            {"cpp": _timing(2e-6 * rows), "eager": _timing(3e-6 * rows, 1.5)},
        )
        for rows in (1, 10, 100)
    ]
    memory = [{"op": "softmax_", "name": "a case", "tensor_bytes": 2**20, "peak_bytes": {"cpp": 0, "eager": 2**20}}]
    if plots.missing():
        pytest.skip(plots.missing())
    assert plots.draw(tmp_path, [_report(*results)], "cpp") == "pictures: dense-rows-float32.png, dense-shapes.png"
    plots.draw_memory(tmp_path, memory, DESCRIPTION, "cpp")
    for name in ("dense-rows-float32", "dense-shapes", "memory"):
        assert (tmp_path / f"{name}.png").stat().st_size < 150_000


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "missing", lambda: "no pictures: for this test")
    assert plots.draw(tmp_path, [_report()], "cpp") == "no pictures: for this test"
    assert list(tmp_path.iterdir()) == []


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress.Progress(1)
    bar.case("a case")
    bar.state("at work")
    bar.finished()
    assert capsys.readouterr().err == ""
