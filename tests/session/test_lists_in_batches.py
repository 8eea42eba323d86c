"""Lists of lengths, texts and the like in a batch: predicted, and cut with the samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import BatchSizeIgnoredError, JobFunctionError
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout

LENGTH, WIDTH, ROWS = 6, 8, 8


def with_lengths(size):
    lengths = [number * number * 7 % LENGTH + 1 for number in range(size)]
    return {"x": torch.randn(size, LENGTH, WIDTH), "lengths": lengths, "scale": (2, 3)}


def with_texts(size):
    tags = [["tag"] * (number % 3) for number in range(size)]
    return {"x": torch.randn(size, LENGTH, WIDTH), "tags": tags, "name": "set", "rest": None}


def over_lengths(model, batch):
    y, lengths = model(batch["x"]), batch["lengths"]
    rows = [y[row, :length].square().sum() for row, length in enumerate(lengths)]
    return torch.stack(rows).sum() / sum(lengths)


def job_of(batch, loss=lambda model, batch: model(batch["x"]).square().mean()):
    return memfit.Job(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=ROWS,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [job_of(with_lengths, over_lengths), job_of(with_texts)], ids=["lengths", "texts"]
)
def test_a_step_is_predicted_to_the_byte(job):
    found = memfit.predict(job)
    assert found.peak_allocated_bytes == memfit.measure(job).peak_allocated_bytes


@pytest.mark.parametrize("make", [with_lengths, with_texts])
def test_a_list_of_the_samples_is_cut_with_them(make):
    job, batch = job_of(make), make(ROWS)
    pieces = list(find_layout(job).split(batch, 3))
    name = "lengths" if make is with_lengths else "tags"
    assert [count for _, count in pieces] == [3, 3, 2]
    assert [each for piece, _ in pieces for each in piece[name]] == batch[name]
    others = "scale" if make is with_lengths else "name"
    assert all(piece[others] == batch[others] for piece, _ in pieces)


def test_numbers_of_samples_are_not_taken_for_followed():
    """The mean over all lengths is not the mean of the pieces' means."""
    job = job_of(with_lengths, over_lengths)
    found = Separation(job, find_layout(job)).of(4)
    assert found.is_refuted
    assert "batch['lengths'] is a list of numbers" in found.sentence
    job = job_of(with_texts)
    assert Separation(job, find_layout(job)).of(4).is_proved


def test_tensors_of_single_samples_are_refused_with_what_to_do():
    job = job_of(lambda size: [torch.randn(row + 1, WIDTH) for row in range(size)])
    with pytest.raises(JobFunctionError, match=r"batch\(8\) has 8 parts and batch\(7\) has 7"):
        memfit.predict(job)


def test_a_batch_without_tensors_is_called_by_its_class():
    class Own:
        pass

    with pytest.raises(BatchSizeIgnoredError, match="both give a Own in which no tensor is found"):
        memfit.predict(job_of(lambda _size: Own()))
