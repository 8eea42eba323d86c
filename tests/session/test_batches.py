"""A batch's layout is found from two sizes, and batches are cut along it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit import Job
from memfit.errors import JobFunctionError
from memfit.session.batches import BatchDim, find_layout, real_batch, shapes_of


def job_with(batch, batch_size: int = 6) -> Job:
    return Job(
        model=lambda: torch.nn.Linear(1, 1),
        batch=batch,
        loss=lambda model, batch: batch.sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
    )


class Named(NamedTuple):
    inputs: torch.Tensor
    mask: torch.Tensor


LAYOUTS = {
    "first": (lambda size: torch.zeros(size, 3), (BatchDim(0, 1),)),
    "second": (lambda size: torch.zeros(5, size), (BatchDim(1, 1),)),
    "last": (lambda size: torch.zeros(2, 3, size), (BatchDim(2, 1),)),
    "several rows to a sample": (lambda size: torch.zeros(4 * size, 3), (BatchDim(0, 4),)),
    "scalar beside it": (
        lambda size: (torch.zeros(()), torch.zeros(size)),
        (None, BatchDim(0, 1)),
    ),
    "fixed beside it": (
        lambda size: {"mask": torch.zeros(7, 7), "x": torch.zeros(size, 7)},
        (None, BatchDim(0, 1)),
    ),
    "number beside it": (
        lambda size: [torch.zeros(size), size, "text"],
        (BatchDim(0, 1), None, None),
    ),
    "same extent by chance": (
        lambda size: (torch.zeros(6, size), torch.zeros(6, 6)),
        (BatchDim(1, 1), None),
    ),
    "named tuple": (
        lambda size: Named(torch.zeros(size, 2), torch.zeros(2 * size)),
        (BatchDim(0, 1), BatchDim(0, 2)),
    ),
    "nested": (
        lambda size: {"a": [torch.zeros(3, size)], "b": (torch.zeros(size),)},
        (BatchDim(1, 1), BatchDim(0, 1)),
    ),
    "nearly follows": (
        lambda size: (torch.zeros(size), torch.zeros(size + 1)),
        (BatchDim(0, 1), None),
    ),
    "square": (lambda size: torch.zeros(size, size), (BatchDim(0, 1),)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("batch_size", [6, 2])
def test_the_dimension_that_counts_samples_is_found(name, batch_size):
    batch, dims = LAYOUTS[name]
    assert find_layout(job_with(batch, batch_size)).dims == dims


def test_a_batch_of_one_sample_is_compared_with_one_of_two():
    job = job_with(lambda size: torch.zeros(1, size, 3), batch_size=1)
    assert find_layout(job).dims == (BatchDim(1, 1),)


def test_samples_are_counted_whatever_the_dimension_and_the_rows_to_a_sample():
    layout = find_layout(job_with(lambda size: (torch.zeros(()), torch.zeros(5, 3 * size))))
    assert layout.num_samples((torch.zeros(()), torch.zeros(5, 12))) == 4


@pytest.mark.parametrize(
    ("num_samples", "micro_batch_size", "counts"),
    [
        (6, 3, [3, 3]),
        (6, 4, [4, 2]),
        (7, 3, [3, 3, 1]),
        (6, 1, [1] * 6),
        (6, 6, [6]),
        (4, 9, [4]),
    ],
)
def test_pieces_are_as_large_as_asked_and_the_last_holds_the_rest(
    num_samples, micro_batch_size, counts
):
    layout = find_layout(job_with(lambda size: torch.zeros(size, 3)))
    pieces = list(layout.split(torch.zeros(num_samples, 3), micro_batch_size))
    assert [count for _, count in pieces] == counts
    assert [piece.shape[0] for piece, _ in pieces] == counts


def test_what_has_no_samples_comes_whole_with_every_piece():
    layout = find_layout(job_with(lambda size: (torch.zeros(size), torch.zeros(3), "name")))
    fixed = torch.arange(3)
    for piece, _ in layout.split((torch.zeros(6), fixed, "name"), 4):
        assert piece[1] is fixed
        assert piece[2] == "name"


def test_pieces_keep_the_structure_and_take_no_memory():
    layout = find_layout(job_with(lambda size: Named(torch.zeros(size, 2), torch.zeros(2 * size))))
    batch = Named(torch.randn(6, 2), torch.randn(12))
    for piece, _ in layout.split(batch, 4):
        assert isinstance(piece, Named)
        assert (
            piece.inputs.untyped_storage().data_ptr() == batch.inputs.untyped_storage().data_ptr()
        )


@pytest.mark.slow
@given(
    num_samples=st.integers(1, 30),
    micro_batch_size=st.integers(1, 35),
    per_sample=st.integers(1, 3),
    dim=st.integers(0, 2),
)
def test_pieces_put_together_are_the_batch(num_samples, micro_batch_size, per_sample, dim):
    def build(size):
        shape = [2, 2, 2]
        shape[dim] = size * per_sample
        return torch.arange(8 // 2 * size * per_sample).reshape(shape)

    layout = find_layout(job_with(build, batch_size=5))
    batch = build(num_samples)
    assert layout.num_samples(batch) == num_samples
    pieces = list(layout.split(batch, micro_batch_size))
    assert torch.equal(torch.cat([piece for piece, _ in pieces], layout.dims[0].dim), batch)
    assert sum(count for _, count in pieces) == num_samples
    assert all(0 < count <= micro_batch_size for _, count in pieces)


def test_a_training_batch_with_other_parts_is_refused_with_both():
    layout = find_layout(job_with(lambda size: (torch.zeros(size), torch.zeros(size))))
    with pytest.raises(JobFunctionError, match="a training batch has 3 parts"):
        layout.num_samples((torch.zeros(4), torch.zeros(4), torch.zeros(4)))


def test_a_batch_function_that_fails_is_named_with_its_argument():
    def batch(size):
        raise ValueError("no data")

    with pytest.raises(JobFunctionError, match=r"batch\(6\) raised ValueError: no data"):
        find_layout(job_with(batch))
    with pytest.raises(JobFunctionError, match=r"batch\(2\) raised ValueError: no data"):
        real_batch(job_with(batch), 2)


def test_a_batch_function_that_looks_at_values_is_run_for_real():
    def batch(size):
        lengths = torch.arange(1, size + 1)
        return torch.zeros(size, int(lengths.max()) * 0 + 4)

    layout = find_layout(job_with(batch))
    assert layout.dims == (BatchDim(0, 1),)


def test_shapes_take_no_memory():
    job = job_with(lambda size: torch.zeros(size, 10**6, 10**3))
    assert shapes_of(job, 1000).shape == (1000, 10**6, 10**3)
    assert find_layout(replace(job, batch_size=1000)).dims == (BatchDim(0, 1),)


@pytest.mark.parametrize("is_nested", [False, True])
def test_parts_are_told_apart_by_their_keys_whatever_the_order(is_nested):
    def batch(size):
        parts = {"event": torch.zeros(size), "severe": torch.ones(size), "x": torch.zeros(2, size)}
        return {"all": parts, "mask": torch.zeros(3)} if is_nested else parts

    layout = find_layout(job_with(batch))
    given = batch(4)
    turned = {key: given[key] for key in reversed(given)}
    if is_nested:
        turned["all"] = {key: given["all"][key] for key in reversed(given["all"])}
    assert layout.num_samples(turned) == 4
    for piece, count in layout.split(turned, 3):
        parts = piece["all"] if is_nested else piece
        assert torch.equal(parts["event"], torch.zeros(count))
        assert torch.equal(parts["severe"], torch.ones(count))
        assert parts["x"].shape == (2, count)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_training_batch_with_as_many_parts_of_other_names_is_refused_with_both(is_nested):
    def wrap(parts):
        return {"inner": parts, "z": torch.zeros(4)} if is_nested else parts

    def batch(size):
        parts = {"a": torch.zeros(size), "b": torch.zeros(size)}
        return {"inner": parts, "z": torch.zeros(size)} if is_nested else parts

    layout = find_layout(job_with(batch))
    other = wrap({"a": torch.zeros(4), "c": torch.zeros(4)})
    with pytest.raises(JobFunctionError, match=r"'c'.*'b'"):
        list(layout.split(other, 2))
