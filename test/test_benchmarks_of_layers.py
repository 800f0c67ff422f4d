"""The benchmarks of gates and of the pair layer, beside `run`."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checks import assert_all_close

from benchmarks import (
    eight_bits,
    gate_lines,
    gates,
    pair_layer,
    pair_plots,
    parallel,
    plots,
    power,
    render,
    timing,
    triangle_attention,
)
from benchmarks.__main__ import main
from benchmarks.case import BACKWARD, FORWARD, OVERHEAD, Task

CPU = torch.device("cpu")
LINES = (gate_lines.portable_lines, gate_lines.cublas_lines, gate_lines.stream_lines)
GATES = [*gate_lines.lines("cuda"), *(line for lines in LINES for line in lines())]


@pytest.mark.parametrize(("op", "stream"), dict.fromkeys((line.op, line.stream) for line in GATES))
def test_contenders_of_gates(op: str, stream: str) -> None:
    """They compute the same of the same inputs, the packed weight included."""
    for line in {line.task: line for line in GATES if (line.op, line.stream) == (op, stream)}.values():
        shape, dtype = (2, 3, 5) if op == "square_matmul_" else (3, 7, 5), "bfloat16" if stream else "float64"
        small = replace(line, shape=shape, dtype=dtype, tf32=False, compiled=line.task == FORWARD)
        tensors, values = gates.inputs(small, CPU), {}
        with timing.context(line.task), torch.compiler.set_stance("force_eager"):
            for name, way in gates.contenders(small, CPU).items():
                copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
                values[name] = way(*copies)
        for product, columns in ((gates.PRODUCT, 10), (gates.LINEAR, 5)):
            assert values.pop(product, torch.empty(3, columns)).shape == (3, columns)
        assert len(values) > 1
        exactness = {"atol": 0.05, "rtol": 0.05} if stream else {}
        assert_all_close(list(values.values()), [values[gates.OURS]] * len(values), **exactness)


def test_bounds_of_gates() -> None:
    """One pass over each tensor, or the products, of forward and of backward, with the products made again there."""
    bounds = {line.name: gate_lines.bound(line) for line in GATES}
    for op in ("gate", "gate_"):
        line = gate_lines.Line(op, (1048576, 128, 128), BACKWARD)
        assert bounds[line.name] == pytest.approx(8 * 2**28 / gate_lines.BANDWIDTH * 1e6, rel=1e-3)
    wide = gate_lines.Line("glu", (1048576, 256, 256), BACKWARD)
    products = 6 * 2 * 1048576 * 256 * 256 / gate_lines.RATE
    float32 = gate_lines.Line("gate", (1048576, 128, 128), stream="x, v")
    assert bounds[float32.name] == pytest.approx(3 * 2**29 / gate_lines.BANDWIDTH * 1e6, rel=1e-3)
    assert bounds[wide.name] == pytest.approx((2 * 2**29 / gate_lines.BANDWIDTH + products) * 1e6, rel=1e-3)
    assert bounds[gate_lines.Line("gate", (16, 64, 64), OVERHEAD).name] is None


def test_gates_measured_and_shown() -> None:
    line = gate_lines.Line("gate", (3, 7, 5), most=1.0, dtype="float32", compiled=False)
    result = gates.prepared(line, CPU, "auto", 0.0)()
    assert result.errors == {}
    assert all(us > 0 for us in result.microseconds.values())
    about = {"machine": "M", "torch": "2", "revision of src": "abc", "title": "Gates", "command": "python; pip"}
    results = [json.loads(json.dumps(asdict(result)))]
    results[0]["peak_bytes"][gates.OURS] = 3 << 20
    document = {**about, "contenders": [*result.microseconds], "results": results}
    _, _, row, _, where = gates.to_markdown(document, full=True).splitlines()
    assert row.startswith("| `gate` (3, 7, 5) float32, forward |  | 1 | ")
    assert " (3) | " in row
    assert where == "M, torch 2, revision abc of `src`."
    assert "    python\n    pip\n" in gates.page(document)
    assert len(gates.to_markdown(document, [gates.EAGER], lambda line: False).splitlines()) == 4


def _prepared(case: int) -> Callable[[], int]:
    if case == 2:
        raise ValueError("no luck")
    if case == 5:
        return lambda: os._exit(1)
    return lambda: case // (case - 3)


def test_cases_are_prepared_in_processes_and_measured_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    # 1, 3, 5 and 6 in one process, and 2, 4, 7 in the other.
    assert list(parallel.measured(_prepared, [1, 2, 3, 4, 5, 7, 6], 2, 600)) == [(1, -1), (4, 4), (7, 1)]
    assert capsys.readouterr().err.splitlines() == [
        "2: ValueError: no luck",
        "3: ZeroDivisionError: integer division or modulo by zero",
        "5: its process ended",
        "6: its process ended",
    ]


def test_medians_of_clock_and_power() -> None:
    complete = "1410, 700.5, 700.00, 1980\n1380, 690.0, 700.00, 1980\n1440, 710.0, 700.00, 1980\n"
    assert power.medians(complete + "1200, 10") == [1410, 700.5, 700, 1980]


def test_eight_bits_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["eight_bits", "--device", "cpu", "--quick", "--shape", "64,32,48", "--json", str(tmp_path / "r.json")]
    assert main(command) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["command"] == "python -m benchmarks eight_bits --device cpu --quick --shape 64,32,48"
    (result,) = document["results"]
    for scales in eight_bits.SCALES:
        assert all(us > 0 for us in result["microseconds"][scales].values())
        assert set(result["relative errors"][scales]) == set(eight_bits.WAYS)
    # What is wrong is not timed, and what is missing is a dash.
    monkeypatch.setitem(eight_bits.WAYS, "`dense_scaled`", lambda x, w, *rest: torch.zeros(len(x), len(w)))
    assert main(command) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["results"][0]["errors"]["`dense_scaled`, per row"] == "AssertionError: relative error 1.0e+00"
    assert "| 64, 32, 48 | - / - | " in eight_bits.to_markdown(document)


def test_pair_layer_checks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        "pair_layer",
        "--device",
        "cpu",
        "--sizes",
        "7",
        "--rounds",
        "1",
        "--check",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(command) == 0
    forward, training = json.loads((tmp_path / "r.json").read_text())["results"]
    assert set(forward["microseconds"]) == {"torchops"}
    assert len(forward["deviations"]) == 5
    assert "deviations" not in training
    # With parameters that the exact values do not have, it fails.
    monkeypatch.setattr(torch.nn.functional, "silu", torch.sigmoid)
    with pytest.raises(AssertionError, match="too far from float64"):
        main(command)


def test_pair_layer_as_an_expert_assembles_it() -> None:
    expert = importlib.import_module("benchmarks.expert_pair_layer")
    layer = pair_layer.parameters_(importlib.import_module("alphafold3_pair_layer").PairLayer(16, 2, 16))
    x, mask = torch.randn(2, 7, 7, 16), (torch.rand(2, 7, 7) > 0.1).float()
    with torch.no_grad():
        torch.testing.assert_close(expert.assembled(layer)(x, mask), layer(x, mask))


def test_pair_layer_sharded_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks hold where one rank has all rows; distributed_triangle_worker.py has several."""
    sharded = importlib.import_module("benchmarks.pair_layer_sharded")
    one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in one.items():
        monkeypatch.setenv(name, value)
    small = [
        "pair_layer_sharded",
        "--device",
        "cpu",
        "--features",
        "32",
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main([*small, "--sizes", "7", "--training", "5", "--data-parallel", "4"]) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert [row["task"] for row in results["rows"]] == [FORWARD, BACKWARD]
    (found,) = results["data parallel"]
    assert max(found[name]["worst"] for name in sharded.WRAPPERS) < 1e-12


def test_pictures_of_pairs(tmp_path: Path) -> None:
    """Drawn of the results on disk; every kernel of ours and every product belongs to a stage."""
    results = render.RESULTS / render.H100
    for kernels in json.loads((results / "stages.json").read_text())["microseconds"].items():
        if kernels[0].startswith("kernels"):
            stages = pair_plots.by_stage(kernels[1])
            assert sum(stages.values()) == pytest.approx(sum(kernels[1].values()))
            assert stages.get(pair_plots.REST, 0) < 0.03 * sum(stages.values())
    if plots.missing():
        pytest.skip(plots.missing())
    assert pair_plots.draw(tmp_path) == "pictures: none of pairs"
    for name in ("stages", "pair_layer"):
        (tmp_path / f"{name}.json").write_text((results / f"{name}.json").read_text())
    assert pair_plots.draw(tmp_path) == "pictures: stages.png, pair_layer.png"
    assert all((tmp_path / f"{name}.png").stat().st_size < 150_000 for name in ("stages", "pair_layer"))


@pytest.mark.parametrize("task", [FORWARD, BACKWARD])
def test_ways_to_attend(task: Task) -> None:
    """With all keys kept, where SDPA computes the same; in float64, and FlexAttention eagerly."""
    *given, mask, last = triangle_attention.tensors(9, torch.float64, CPU, BACKWARD)
    ways = triangle_attention.contenders(9, "cuda")
    assert triangle_attention.OURS in ways
    for masks in (mask, torch.ones_like(mask)):
        values = {}
        with timing.context(task), torch.compiler.set_stance("force_eager"):
            for name, way in ways.items():
                if masks is mask and name == triangle_attention.SDPA:
                    continue
                if task == BACKWARD and name == triangle_attention.FLEX:  # it has no gradients on the CPU
                    continue
                inputs = [t.detach().clone().requires_grad_(task == BACKWARD) for t in given]
                out = way(*inputs, masks)
                values[name] = [out] if task == FORWARD else [*torch.autograd.grad(out, inputs, last)]
        for made in values.values():
            assert_all_close(made, values[triangle_attention.WRITTEN])
    measured = triangle_attention.measure(5, task, torch.float32, CPU)
    assert measured["errors"] == {}
    on_gpus = {triangle_attention.FLEX, triangle_attention.PORTABLE}
    assert set(measured["microseconds"]) == set(measured["first call, s"]) == set(ways) - on_gpus
