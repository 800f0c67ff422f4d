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
    (
        "docs/gates.md",
        "Forward, the calls take {:.0f} to {:.0f}% less time than with `torch.compile`",
        committed.forward_of_streams,
    ),
    (
        "docs/gates.md",
        "With backward, they take {:.0f} to {:.0f}% less where the [one pass](#how-the-kernels-work) makes all"
        " gradients: with up to 128 features, unless `v` is float32. `glu` of 256 features takes {:.0f}% less. The"
        " other calls of `gate` take from {:.0f}% less to {:.0f}% more, with {:.0f} to {:.0f}% less memory or, with 64",
        committed.training_of_streams,
    ),
    (
        "docs/limits.md",
        "a bfloat16 `gate` of 1048576 rows and 128 features takes {:.0f} µs (fused kernel: {:.0f}, `torch.compile`:"
        " {:.0f}), in training {:.0f} µs (`torch.compile`: {:.0f})",
        committed.portable,
    ),
    (
        "docs/gates.md",
        "Each call takes {:.0f} to {:.0f}% less time than with `torch.compile`, with value and gate packed",
        committed.portable_gains,
    ),
    (
        "docs/fused_epilogue.md",
        "In bfloat16, these take {:.2f} to {:.2f} of the time of `F.linear` alone",
        committed.portable_dense,
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
        "docs/gates.md",
        "{:.0f} MiB on top of the inputs, where `torch.compile` takes {:.0f} and eager mode {:.0f}",
        committed.kept,
    ),
    (
        "docs/gates.md",
        "`gate` takes {:.2f} to {:.2f} of the time of `torch.compile` in the forward pass. In training it takes {:.2f}"
        " to {:.2f}, because",
        lambda: [ratio for task in (FORWARD, BACKWARD) for ratio in committed.by_cublas("gate", task)],
    ),
    (
        "docs/gates.md",
        "`glu` takes {:.2f} to {:.2f} of that time forward and {:.2f} to {:.2f} in training. It works",
        lambda: [ratio for task in (FORWARD, BACKWARD) for ratio in committed.by_cublas("glu", task)],
    ),
    (
        "docs/gates.md",
        "then `glu` takes {:.2f} to {:.2f} forward and {:.2f} to {:.2f} in training.",
        lambda: [ratio for task in (FORWARD, BACKWARD) for ratio in committed.by_cublas("glu", task, PACKED)],
    ),
    (
        "docs/gates.md",
        "`dense` takes {:.2f} to {:.2f} forward and {:.2f} to {:.2f} in training.",
        lambda: [ratio for task in (FORWARD, BACKWARD) for ratio in committed.by_cublas("dense", task)],
    ),
    (
        "docs/gates.md",
        "In these sizes, forward takes {:.0f} to {:.0f}% less time than eager mode, and forward and backward {:.0f} to"
        " {:.0f}%.",
        committed.odd_rows,
    ),
    (
        "docs/gates.md",
        "`gate` and `glu` take {:.2f} to {:.2f} of the time of eager mode forward and backward",
        lambda: [pick(committed.on_a_cpu_of_eager(4096, 1024)) for pick in (min, max)],
    ),
    (
        "docs/gates.md",
        "Forward alone, they take {:.2f} and {:.2f} of it in float32, and {:.2f} and {:.2f} in bfloat16",
        lambda: committed.on_a_cpu_of_eager(4096, 1024, FORWARD),
    ),
    (
        "docs/gates.md",
        "they take {:.0f} and {:.0f}% less time in float32, and {:.0f} and {:.0f}% in bfloat16, forward and backward",
        lambda: [(1 - part) * 100 for part in committed.on_a_cpu_of_eager(65536, 128)],
    ),
    (
        "docs/gates.md",
        "In [another run](benchmarks.md#on-a-cpu), these were {:.0f} and {:.0f}%, and {:.0f} and {:.0f}%",
        lambda: [
            (1 - 1 / case(EPYC, op, f"forward and backward (65536, 128, 128) {dtype}")["eager"].ratio) * 100
            for dtype in ("float32", "bfloat16")
            for op in ("gate", "glu")
        ],
    ),
    (
        "docs/ring_allreduce.md",
        "the ring takes {:.0f} µs for 4 KiB, {:.1f} times as long as the library",
        committed.first_message,
    ),
    (
        "docs/gates.md",
        "No call in the table takes more than {:.0f}% longer than with `torch.compile`",
        lambda: [committed.longest()],
    ),
    (
        "docs/gates.md",
        "In float32, `gate` and `glu` take {:.0f} and {:.0f}% less time forward. Forward and backward, they take only"
        " {:.0f} and {:.0f}% less, because the gradients compute the products again, and `glu` takes {:.0f}% less than"
        " with value and gate packed",
        lambda: [
            *(-committed.exact(op, task) for task in (FORWARD, BACKWARD) for op in ("gate", "glu")),
            -committed.exact("glu", BACKWARD, PACKED),
        ],
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
        "docs/fused_epilogue.md",
        "`F.linear` alone takes at most {:.0f}% less time",
        lambda: [committed.longest_without_sigmoid()],
    ),
    (
        "docs/fused_epilogue.md",
        "`gate` takes {:.0f} µs, and `torch.compile` {:.0f} µs; `glu` takes {:.0f} µs, and `torch.compile` {:.0f} µs",
        lambda: [
            committed.gates("gates", op, [262144, 128, 128], FORWARD, "float32")[way]
            for op in ("gate", "glu")
            for way in ("torchops", "torch.compile")
        ],
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
