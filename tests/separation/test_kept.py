"""What a step leaves in attributes: harmless where no step reads it, and only there."""

from __future__ import annotations

import pytest
import torch
from tests.separation.linear_jobs import found_in, job_with, separation_of
from torch import nn

import memfit


class Keeping(nn.Module):
    def __init__(self, last=None):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.last = last
        self.before = None if last is None else last.clone()
        self.all = []


def kept_job(loss, last=None):
    return job_with(loss, model=lambda: Keeping(last))


def error_of(model, batch):
    return (model.linear(batch[0]) - batch[1]).square().mean()


def noted(model, batch):
    model.last = model.linear(batch[0]).detach()
    return error_of(model, batch)


def noted_and_used(model, batch):
    model.last = model.linear(batch[0]).tanh()
    return error_of(model, batch) + model.last.square().mean()


def part_of_the_loss(model, batch):
    model.last = model.linear(batch[0]).square().mean()
    return error_of(model, batch) + model.last


def looks_back(model, batch):
    error = error_of(model, batch)
    if model.last is not None:
        error = error + (model.linear(batch[0]) * model.last.mean(0)).mean()
    model.last = batch[0].clone()
    return error


def moving_mean(model, batch):
    model.last = 0.9 * model.last + 0.1 * batch[0].mean(0)
    return error_of(model, batch)


def counts_the_last_batch(model, batch):
    count = len(batch[0]) if model.last is None else len(model.last)
    model.last = batch[0].clone()
    return error_of(model, batch) * len(batch[0]) / count


def looks_two_steps_back(model, batch):
    error = error_of(model, batch)
    if model.before is not None:
        error = error + (model.linear(batch[0]) * model.before).mean()
    model.before = model.last
    model.last = batch[0].mean(0)
    return error


def keeps_all(model, batch):
    model.all.append(batch[0].mean(0))
    model.last = batch[0].mean(0)
    return error_of(model, batch)


def reads_it_first(model, batch):
    error = error_of(model, batch) + (model.linear(model.last).square().mean())
    model.last = batch[0].mean(0)
    return error


@pytest.mark.slow
@pytest.mark.parametrize("loss", [noted, noted_and_used, part_of_the_loss])
@pytest.mark.parametrize("last", [None, torch.zeros(6)])
def test_what_is_kept_and_never_read_keeps_a_step_separable(loss, last):
    found = found_in(kept_job(loss, last))
    assert found.is_proved, found.sentence
    assert found.overwritten == ("model.last",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (looks_back, None),
        (moving_mean, torch.zeros(6)),
        (counts_the_last_batch, None),
        (looks_two_steps_back, None),
        (looks_two_steps_back, torch.zeros(6)),
        (keeps_all, None),
        (reads_it_first, torch.zeros(6)),
    ],
)
def test_what_a_later_step_reads_is_not_proved(loss, last):
    assert not found_in(kept_job(loss, last)).is_proved


@pytest.mark.slow
def test_a_plan_says_what_is_left_in_attributes():
    plan = memfit.plan(kept_job(noted), budget="1GiB", require=["micro-batching"])
    assert plan.reasons[0].endswith(
        "; model.last will hold what one piece leaves there, which no step reads."
    )


def distances(model, batch):
    hidden = model.linear(batch[0])
    return (hidden[0::2] - hidden[1::2]).square().mean()


def neighbours_on_top(model, batch):
    hidden = model.linear(batch[0]).view(-1, 2, 6)
    return (hidden[:, 0] * hidden[:, 1]).mean()


def neighbours_of_neighbours(model, batch):
    hidden = model.linear(batch[0])
    return (hidden[1:-1:2] - hidden[2::2]).square().sum() / len(hidden)


def halves(model, batch):
    first, second = model.linear(batch[0]).chunk(2)
    return (first - second).square().mean()


def fours(model, batch):
    hidden = model.linear(batch[0]).view(-1, 4, 6)
    return (hidden[:, 0] * hidden[:, 3]).mean()


def pairs_against_pairs(model, batch):
    hidden = model.linear(batch[0])
    return torch.logsumexp(hidden[0::2] @ hidden[1::2].T, 1).mean()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [distances, neighbours_on_top])
def test_pairs_of_neighbours_stay_together_in_pieces_of_even_size_alone(loss):
    job = kept_job(loss)
    separation = separation_of(job)
    assert separation.of(2).is_proved
    assert separation.of(4).is_proved
    assert not separation.of(1).is_proved
    assert not separation.of(3).is_proved
    assert not separation.at_batch_size(7).of(2).is_proved


@pytest.mark.parametrize("loss", [neighbours_of_neighbours, halves, fours, pairs_against_pairs])
def test_other_neighbours_are_not_proved(loss):
    job = kept_job(loss)
    separation = separation_of(job)
    assert not separation.of(2).is_proved
    assert not separation.of(4).is_proved
