"""Values against float64, for every dtype and layout; and where the outputs live in memory."""

from __future__ import annotations

import pytest
import torch
from checks import assert_as_good_as_aten, tensors, to_float64
from op_db import OpCase
from samples import Sample

import torchops


def test_values(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    exact_args, exact_kwargs = to_float64(sample(dtype, device))
    exact = case.reference(*exact_args, **exact_kwargs)
    args, kwargs = sample(dtype, device)
    aten = case.reference(*args, **kwargs)

    returned = case.op(*args, **kwargs)

    out = returned if case.mutates is None else case.mutated(args)
    assert_as_good_as_aten(case, out, aten, exact)
    if case.mutates is not None:
        assert returned is None


@pytest.mark.ops(mutating=False)
def test_output_is_new_and_contiguous(case: OpCase, device: str, sample: Sample) -> None:
    args, kwargs = sample(torch.float32, device)
    before = [t.clone() for t in tensors((args, kwargs))]

    out = case.op(*args, **kwargs)

    assert out.is_contiguous()
    assert out.storage_offset() == 0
    storages = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))} - {0}
    assert out.untyped_storage().data_ptr() not in storages
    for now, then in zip(tensors((args, kwargs)), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.ops(mutating=False)
def test_meta_agrees(case: OpCase, dtype: torch.dtype, sample: Sample) -> None:
    args, kwargs = sample(dtype, "cpu")
    out = case.op(*args, **kwargs)
    meta_args, meta_kwargs = sample(dtype, "meta")
    meta = case.op(*meta_args, **meta_kwargs)
    assert meta.is_meta
    assert (meta.shape, meta.stride(), meta.dtype) == (out.shape, out.stride(), out.dtype)


@pytest.mark.ops(mutating=False)
def test_every_element_is_written(
    case: OpCase, device: str, dtype: torch.dtype, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory is filled with NaN, so an element that no kernel writes shows."""
    args, kwargs = sample(dtype, device)
    expected = case.reference(*args, **kwargs)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, dtype=dtype, device=device).isnan().all()
        out = case.op(*args, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.ops(mutating=True)
def test_only_the_view_is_written(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    """The result is in the argument's own memory, and what lies around and between its elements stays."""
    args, kwargs = sample(dtype, device)
    a = case.mutated(args)
    whole = a._base if a._base is not None else a
    before = whole.clone()
    pointer, strides, expected = a.data_ptr(), a.stride(), case.pure(*args, **kwargs)

    case.op(*args, **kwargs)

    assert (a.data_ptr(), a.stride()) == (pointer, strides)
    torch.testing.assert_close(a, expected, equal_nan=True)
    inside = torch.zeros_like(whole, dtype=torch.bool)
    inside.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    assert torch.equal(whole[~inside], before[~inside])


# Where `leaves` is false, the other argument is part of the one that is overwritten.
@pytest.mark.ops(
    mutating=True,
    leaves=True,
    dtypes=[torch.float32],
    where=lambda sample, **_: len(tensors(sample(torch.float32, "meta"))) > 1,
)
def test_other_arguments_are_only_read(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    args, kwargs = sample(dtype, device)
    others = [t for t in tensors((args, kwargs)) if t is not case.mutated(args)]
    before = [(t.clone(), t._version) for t in others]
    case.op(*args, **kwargs)
    for now, (then, version) in zip(others, before, strict=True):
        assert torch.equal(now, then)
        assert now._version == version


@pytest.mark.ops(mutating=True, dtypes=[torch.float32])
def test_version_moves_once(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    for requires_grad in (False, True):
        args, kwargs = sample(dtype, device, requires_grad and sample.leaves)
        if requires_grad:
            args = [a * 1 if a is case.mutated(args) else a for a in args]
        a = case.mutated(args)
        version = a._version
        case.op(*args, **kwargs)
        assert a._version == version + 1


# Sums in tensor cores have fewer digits.
@pytest.mark.ops(where=lambda case, device, **_: case.differentiable or device == "cpu")
def test_wrapper(case: OpCase, device: str, sample: Sample) -> None:
    """The Python wrapper takes the same arguments; one that mutates returns its argument."""
    args, kwargs = sample(torch.float32, device)
    expected = case.reference(*args, **kwargs)
    out = case.wrapper(*args, **kwargs)
    torch.testing.assert_close(out, expected, equal_nan=True, atol=2e-5, rtol=1e-5)
    if case.mutates is not None:
        assert out is case.mutated(args)


def test_dense_of_no_features_and_long_rows() -> None:
    """Rows of more than 1 MiB, 32 for each thread."""
    rows = 32 * torch.get_num_threads()
    y = torchops.dense(torch.empty(rows, 0), torch.empty(2**18 + 1, 0))
    assert y.shape == (rows, 2**18 + 1)
    assert (y == 0.5).all()
