"""The figures in the prose of pages are those of benchmarks/results. (Tables are rendered: test_docs.py.)

Each quotation is a sentence with `{}` for its figures, and how they follow from the results. If a figure was measured
anew, the failure shows the sentence that the page should have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import committed_figures as committed
import pytest
from committed_figures import BACKWARD, FORWARD, PACKED, ROOT, ROWS, case

from benchmarks import render
from benchmarks.machine import PEERS
from benchmarks.render import EPYC, H100

H100_TABLES, CPU_TABLES = (f"benchmarks/results/{machine}/README.md" for machine in (H100, EPYC))
Figures = Callable[[], list[float]]
QUOTATIONS: tuple[tuple[str, str, Figures], ...] = (
    *(
        ("README.md", f"| {sizes} | {{:.1f}} | {{:.1f}} |", partial(committed.predictions, file))
        for sizes, file in (
            ("384 tokens, 5 samples", "384-5"),
            ("768 tokens, 1 sample", "768-1"),
            ("1,536 tokens, 1 sample, 20 steps, no recycling", "1536-1"),
        )
    ),
    (
        "docs/whole_models.md",
        "| 384 tokens, 5 samples | {:.1f} | {:.1f} | {:.1f} |",
        lambda: committed.predictions("384-5", "384-5-compiled"),
    ),
    (
        "docs/whole_models.md",
        "| 768 tokens, 1 sample | {:.1f} | not measured | {:.1f} |",
        partial(committed.predictions, "768-1"),
    ),
    (
        "docs/whole_models.md",
        "| 1,536 tokens, 1 sample | {:.1f} | not measured | {:.1f} |",
        partial(committed.predictions, "1536-1"),
    ),
    (
        "docs/triangle_update.md",
        "it takes {:.1f} pair tensors of memory instead of {:.0f}, and {:.2f} ms; `torch.compile` in its default mode"
        " takes {:.2f} ms, and eager mode as papers write it {:.0f} ms",
        lambda: [
            *committed.triangle("torchops", "channels first, torch.compile", what="pair tensors"),
            *committed.triangle("torchops", "channels first, torch.compile", "as written"),
        ],
    ),
    (
        "README.md",
        "`replace` reduces inference from {:.0f} to {:.0f} ms, and training from {:.0f} to {:.0f} ms and from {:.1f} to"
        " {:.1f} GiB",
        lambda: [
            *committed.released(FORWARD, 1, "ms"),
            *committed.released("training", 1, "ms"),
            *committed.released("training", 1024, "MiB"),
        ],
    ),
    (
        "docs/benchmarks.md",
        "many rows of few features. There, `dense` is up to {:.1f} × faster than eager mode",
        lambda: [max(committed.ratios(H100, "dense", FORWARD, "eager"))],
    ),
    (
        H100_TABLES,
        "`dense` takes {:.0f} µs. Eager mode takes {:.0f} µs,"
        ' `torch.compile(mode="max-autotune-no-cudagraphs")` takes {:.0f} µs, and a short Triton kernel {:.0f} µs',
        lambda: committed.times(
            1e6, "dense", "forward (1048576, 128, 128) bfloat16", "ours", "eager", "compile-max", "triton"
        ),
    ),
    (
        H100_TABLES,
        "take {:.2f} and {:.2f} ms. Eager mode takes {:.2f} and {:.2f} ms, `torch.compile` {:.2f} and {:.2f} ms, Liger"
        " {:.2f} and {:.2f} ms, and quack, the nearest, {:.2f} and {:.2f} ms",
        lambda: [
            case(H100, op, ROWS)[way].seconds * 1e3
            for way in ("ours", "eager", "compile", "liger", "quack")
            for op in ("softmax", "layer_norm")
        ],
    ),
    (
        "docs/limits.md",
        "quack's `softmax` takes {:.2f} to {:.2f} times as long as ours, in inference and in training",
        lambda: [
            pick(ratio for task in (FORWARD, BACKWARD) for ratio in committed.ratios(H100, "softmax", task, "quack"))
            for pick in (min, max)
        ],
    ),
    (
        "docs/limits.md",
        "`torch.compile` takes {:.1f} to {:.1f} times as long for these gates, and eager mode into tensors that exist"
        " already (`out=`) {:.1f} to {:.1f} times",
        lambda: [
            pick(ratio for op in ("gate", "glu") for ratio in committed.ratios(EPYC, op, FORWARD, way))
            for way in ("compile", "preallocated")
            for pick in (min, max)
        ],
    ),
    (
        "docs/limits.md",
        "([another run](../benchmarks/results/nvidia-h100-80gb-hbm3/README.md#some-cases): {:.2f} and {:.2f} ms)",
        lambda: committed.times(1e3, "swiglu", "forward and backward (8192, 4096, 11008) bfloat16", "ours", "compile"),
    ),
    (H100_TABLES, "times of the same call differ by up to {:.0f}%", lambda: [committed.between_runs()]),
    (
        "docs/fused_epilogue.md",
        "so 537 MB take at least {:.2f} ms",
        lambda: [(1048576 * 2 * 128 + 128 * 128) * 2 / committed.copied_per_second() * 1e3],
    ),
    (
        "docs/triangle_update_stages.md",
        "The bound for stages 1 and 3, copying their bytes, is {:.2f} ms each",
        lambda: [committed.stage_bound()],
    ),
    *(
        (
            "docs/gates.md",
            f"| `{op}`, {name} | {{:.2f}} ms, {{:.0f}} MiB | {{:.2f}} ms, {{:.0f}} MiB | {{:.2f}} ms, {{:.0f}} MiB |",
            partial(committed.times_and_memory, op, task),
        )
        for op in ("gate", "glu")
        for name, task in (("inference", FORWARD), ("training", BACKWARD))
    ),
    (
        "docs/gates.md",
        "is {:.2f} × faster than with `torch.compile`, and takes more memory: {:.0f} MiB instead of {:.0f} (eager mode:"
        " {:.0f})",
        committed.of_deep_swiglu,
    ),
    (
        "docs/gates.md",
        "`gate` of 262144 rows of 128 features is {:.2f} × faster than with `torch.compile`",
        lambda: [committed.exact("gate", BACKWARD)],
    ),
    (
        "docs/gate_tables.md",
        "No call in the table takes more than {:.0f}% longer than with `torch.compile`",
        lambda: [committed.longest()],
    ),
    (
        "docs/gate_tables.md",
        "In float32, forward, `gate` is {:.2f} × faster and `glu` {:.2f} × faster than with `torch.compile`. Forward"
        " and backward, `gate` is {:.2f} × faster and `glu` {:.2f} × faster. Training gains little because the"
        " gradients compute the matmuls again. `glu` is then {:.2f} × faster than packed.",
        lambda: [
            *(committed.exact(op, task) for task in (FORWARD, BACKWARD) for op in ("gate", "glu")),
            committed.exact("glu", BACKWARD, PACKED),
        ],
    ),
    (
        "docs/gate_tables.md",
        "In these sizes, forward is {:.2f} to {:.2f} × faster than eager mode, and forward and backward are {:.2f} to"
        " {:.2f} × faster.",
        committed.odd_rows,
    ),
    (
        "docs/gate_tables.md",
        "Each call is {:.2f} to {:.2f} × faster than with `torch.compile`, packed or not",
        committed.portable_gains,
    ),
    (
        "docs/gate_tables.md",
        "In bfloat16, `dense` runs at {:.2f} to {:.2f} × the speed of `F.linear` alone",
        committed.portable_dense,
    ),
    ("docs/gate_tables.md", "| forward | {:.2f} to {:.2f} × faster | |", committed.forward_of_streams),
    (
        "docs/gate_tables.md",
        "where [one pass](gate_kernels.md#on-an-h100-or-h200) makes all gradients | {:.2f} to {:.2f} × faster | |",
        lambda: committed.training_of_streams()["one pass"],
    ),
    (
        "docs/gate_tables.md",
        "| `glu` of 256 features, forward and backward | {:.2f} × faster | |",
        lambda: committed.training_of_streams()["glu"],
    ),
    (
        "docs/gate_tables.md",
        "| other `gate`, forward and backward | {:.2f} to {:.2f} × the speed | {:.0f} to {:.0f}% less, or the same with"
        " 64 features |",
        lambda: committed.training_of_streams()["gate"],
    ),
    *(
        (
            "docs/gate_tables.md",
            f"| {name} | {{:.2f}} to {{:.2f}} × the speed | {{:.2f}} to {{:.2f}} × the speed |",
            partial(committed.by_cublas_in_both, op, against),
        )
        for name, op, against in (
            ("`gate`", "gate", "torch.compile"),
            ("`glu`", "glu", "torch.compile"),
            ("`glu`, compared with packed", "glu", PACKED),
            ("`dense`", "dense", "torch.compile"),
        )
    ),
    *(
        (
            "docs/gate_tables.md",
            f"| {rows}, {features} | {task} | {{:.2f}} | {{:.2f}} | {{:.2f}} | {{:.2f}} |",
            partial(committed.on_a_cpu_of_eager, rows, features, task),
        )
        for rows, features, task in ((4096, 1024, FORWARD), (4096, 1024, BACKWARD), (65536, 128, BACKWARD))
    ),
    (
        "docs/gate_tables.md",
        "| the same in [another run](../benchmarks/results/2-core-amd-epyc-avx-512/gate.md) | forward and backward"
        " | {:.2f} | {:.2f} | {:.2f} | {:.2f} |",
        lambda: [
            case(EPYC, op, f"forward and backward (65536, 128, 128) {dtype}")["eager"].ratio
            for dtype in ("float32", "bfloat16")
            for op in ("gate", "glu")
        ],
    ),
    (
        "docs/split_products.md",
        "`gate` is {:.2f} × faster than with `torch.compile`, and `glu` is {:.2f} × faster",
        lambda: [committed.exact(op, FORWARD) for op in ("gate", "glu")],
    ),
    (
        "docs/fused_epilogue.md",
        "`F.linear` alone is at most {:.2f} × faster",
        lambda: [committed.longest_without_sigmoid()],
    ),
    (
        "docs/limits.md",
        "a bfloat16 `gate` of 1048576 rows and 128 features takes {:.0f} µs (fused kernel: {:.0f}, `torch.compile`:"
        " {:.0f}), in training {:.0f} µs (`torch.compile`: {:.0f})",
        committed.portable,
    ),
    (
        "docs/triangle_update.md",
        "forward {:.0f}% less time; forward and backward within {:.0f}% |",
        lambda: [
            -committed.wide_triangle("float32", FORWARD),
            max(1, abs(committed.wide_triangle("float32", BACKWARD))),
        ],
    ),
    (
        "docs/triangle_update.md",
        "cuBLAS for the rest | forward within {:.0f}% |",
        lambda: [max(1, abs(committed.wide_triangle("float64", FORWARD)))],
    ),
    (
        "docs/limits.md",
        "with 8192 rows and features, `dense` gains {:.0f}%",
        lambda: [(case(H100, "dense", "forward (8192, 8192, 8192) bfloat16")["eager"].ratio - 1) * 100],
    ),
    (
        "docs/limits.md",
        "takes {:.2f} ms and {:.0f} MiB on top of its inputs, where `torch.compile` takes {:.2f} ms and {:.0f} MiB",
        committed.swiglu,
    ),
    (
        "docs/limits.md",
        "`layer_norm` of up to 16384 columns, in inference.** `torch.compile`'s take {:.2f} to {:.2f} times as long",
        lambda: [pick(committed.inference_by_compile()) for pick in (min, max)],
    ),
    (
        "docs/limits.md",
        "in the median, `dense` gains {:.0f}% over eager mode. In the forward pass, `gate` and `glu` of 65536"
        " rows of 128 features are {:.1f} to {:.1f} times as fast, and `layer_norm_` of 64 MiB {:.0f} to {:.0f} times",
        committed.on_a_cpu,
    ),
    (
        "docs/ring_allreduce.md",
        "the ring takes {:.0f} µs for 4 KiB, {:.1f} times as long as the library",
        committed.first_message,
    ),
    (
        "docs/compiler.md",
        "is {:.2f} × faster forward and {:.2f} × faster in training, with {:.2f} and {:.2f} of the memory",
        lambda: [
            *(committed.gain("GLU stack", task) for task in (FORWARD, BACKWARD)),
            *(1 / committed.gain("GLU stack", task, "peak_bytes") for task in (FORWARD, BACKWARD)),
        ],
    ),
    (
        "docs/compiler.md",
        "In training, it makes gated attention {:.0f}% slower than eager mode",
        lambda: committed.slowdown(
            *(committed.model("gated attention", BACKWARD, way) for way in ("eager", "eager + torchops.replace"))
        ),
    ),
    (
        "docs/pair_layer.md",
        "training takes {:.0f}% less time at N = 768",
        lambda: [-more for more in committed.slowdown(*committed.released("training", 1, "ms", 768, "float32"))],
    ),
    (
        CPU_TABLES,
        "The operator is {:.1f} to {:.1f} × faster than eager mode. For N = 256, it is {:.1f} to {:.1f} × faster than"
        " `torch.compile`",
        lambda: [
            *committed.triangle_on_a_cpu("as written"),
            *committed.triangle_on_a_cpu("channels first, torch.compile", 256),
        ],
    ),
    (
        "docs/eight_bits.md",
        "`dense_scaled` takes {:.0f} to {:.0f}% less time than `_scaled_mm` and `sigmoid_`",
        committed.scaled,
    ),
    (
        "docs/eight_bits.md",
        "take {:.0f} to {:.0f}% less time than `dense_scaled` in the two largest cases",
        committed.fast_accumulation,
    ),
    (
        "docs/distributed.md",
        "by {:.1f}e-7 in float32, and by {:.1f}e-3 instead of {:.1f}e-3 in bfloat16",
        committed.data_parallel,
    ),
    (
        "docs/ring_allreduce.md",
        "The formula is within {:.0f}% of the ring in every row, and the ring reaches {:.1f} of the bandwidth of the"
        " library on the largest message",
        lambda: [committed.distance_of_model(), committed.bandwidth_of_ring("ring", EPYC)],
    ),
    (
        "docs/ring_allreduce.md",
        "gets {:.2f} of the library's bandwidth on 1 GiB; with whole chunks it gets {:.2f}",
        lambda: [committed.bandwidth_of_ring("ring"), committed.bandwidth_of_ring("ring, whole chunks")],
    ),
    (
        H100_TABLES,
        "Only with 8192 rows and features does a single call of `dense` take no longer than a queued one ({:.2f} ms)",
        lambda: [case(H100, "dense", "forward (8192, 8192, 8192) bfloat16", "single")["ours"].seconds * 1e3],
    ),
    (
        H100_TABLES,
        "takes {:.0f} and {:.0f}% longer. `F.linear` alone takes {:.0f} and {:.0f}% less time than `dense` there, and"
        " {:.0f} and {:.0f}% less in queued calls",
        committed.hot,
    ),
    (
        "docs/triangle_update_stages.md",
        "At the {:.0f} W that this card may take",
        lambda: [committed.document(H100, "power")["most watts"]],
    ),
    (
        "docs/triangle_update_stages.md",
        "the 128 products take {:.0f} µs at {:.0f} MHz; of zeros, {:.0f} µs at {:.0f} MHz, {:.0f} TFLOP/s. The whole"
        " update then takes {:.2f} ms, at {:.0f} MHz",
        committed.power_of_products,
    ),
    (
        "docs/triangle_update_stages.md",
        "stage 1 takes {:.2f} ms, the products {:.2f} ms, and stage 3 {:.2f} ms",
        lambda: [committed.stage(kernel) for kernel in ("PairInKernel", "nvjet", "PairOutKernel")],
    ),
    (
        "docs/eight_bits.md",
        "off from float64 by {:.5f} of its norm; that of `_scaled_mm` was off by {:.5f}, and by {:.5f} with",
        committed.scaled_errors,
    ),
    (
        "docs/sharded_pairs.md",
        "| outgoing | forward | {:.2f} ms | {:.2f} ms | {:.2f} × faster |"
        " | outgoing | forward and backward | {:.1f} ms | {:.1f} ms | {:.2f} × faster |"
        " | incoming | forward | {:.2f} ms | {:.2f} ms | {:.2f} × faster |"
        " | incoming | forward and backward | {:.1f} ms | {:.1f} ms | {:.2f} × faster |",
        lambda: [
            x for way in ("outgoing", "incoming") for task in (FORWARD, BACKWARD) for x in committed.sharded(way, task)
        ],
    ),
    (
        "docs/sharded_pairs.md",
        "| 2048 | in place | {:.1f} ms, {:.2f} GiB | {:.1f} ms, {:.2f} GiB |",
        lambda: committed.with_memory(2048, FORWARD),
    ),
    (
        "docs/sharded_pairs.md",
        "| 1024 | forward and backward | {:.1f} ms, {:.2f} GiB | {:.1f} ms, {:.2f} GiB |",
        lambda: committed.with_memory(1024, BACKWARD),
    ),
    (
        "docs/sharded_pairs.md",
        "| 768 | forward and backward | {:.1f} ms, {:.2f} GiB | {:.1f} ms, {:.2f} GiB |",
        lambda: committed.with_memory(768, BACKWARD),
    ),
)


def test_versions_of_peers() -> None:
    """Those that the results name; results that are older name none."""
    (column,) = re.findall(r"two libraries \((.*)\)", (ROOT / "benchmarks/results/README.md").read_text())
    said = dict(part.lower().split(" ") for part in column.split(", "))
    assert set(said) == set(PEERS)
    found = [item.description for item in render.reports(H100).values()]
    for peer, version in said.items():
        assert {about[peer] for about in found if peer in about} <= {version}


@pytest.mark.parametrize(
    ("page", "sentence", "figures"), QUOTATIONS, ids=[f"{page}-{i}" for i, (page, *_) in enumerate(QUOTATIONS)]
)
def test_figures_of(page: str, sentence: str, figures: Figures) -> None:
    expected = sentence.format(*figures())
    assert expected in " ".join((ROOT / page).read_text().split()), f"{page} does not say: {expected}"
