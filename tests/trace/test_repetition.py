"""Steps that are lengthened by micro-batches alike equal those in which all were recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.conformance import builders
from torch import nn

from memfit import Job, Plan
from memfit.devices.catalogue import load_device
from memfit.prediction.recording import Recording, record
from memfit.strategies import ActivationCheckpointing, BatchNormReplay, MicroBatching
from memfit.trace.abridgement import few_pieces
from memfit.trace.events import Allocation, Category, Phase, StepMark, Trace
from memfit.trace.repetition import ForwardStart, repeated

NUM_PIECES, SIZE = 7, 3


def job_with(loss, batch_size=NUM_PIECES * SIZE) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))),
        batch=lambda size: torch.randn(size, 6),
        loss=loss,
        optimizer=builders.sgd,
        batch_size=batch_size,
    )


def mean_square(model, batch):
    return model(batch).square().mean()


def recorded(job: Job, device: str, *, few: bool, others=()) -> Recording:
    plan = Plan(strategies=(*others, MicroBatching(micro_batch_size=SIZE)))
    if not few:
        return record(job, plan, device=load_device(device))
    with few_pieces(4):
        return record(job, plan, device=load_device(device))


def what_happens(trace: Trace) -> list:
    events = [
        replace(trace.allocations[event], source_line="")
        if event >= 0
        else -trace.allocations[-1 - event].num_bytes
        for event in trace.events
    ]
    operations = [(each.name, each.first_event, each.num_flops) for each in trace.operations]
    return [events, operations, trace.calls]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize("batch_size", [NUM_PIECES * SIZE, NUM_PIECES * SIZE - 1])
@pytest.mark.parametrize("others", [(), (ActivationCheckpointing(),)], ids=["plain", "recomputed"])
def test_a_lengthened_step_is_the_one_that_was_recorded_whole(device, batch_size, others):
    job = job_with(mean_square, batch_size)
    whole = recorded(job, device, few=False, others=others)
    few = recorded(job, device, few=True, others=others)
    longer = few.with_more_pieces(NUM_PIECES - 4)
    assert len(few.steady.operations) < len(longer.steady.operations)
    for name in ("history", "first", "steady"):
        assert what_happens(getattr(longer, name)) == what_happens(getattr(whole, name)), name


def normalised_job(batch_size: int) -> Job:
    return Job(
        model=lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8), nn.BatchNorm1d(8)
        ),
        batch=lambda size: torch.randn(size, 6),
        loss=mean_square,
        optimizer=builders.sgd,
        batch_size=batch_size,
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize("batch_size", [NUM_PIECES * SIZE, NUM_PIECES * SIZE - 1])
def test_every_loop_of_a_replayed_step_is_lengthened(device, batch_size):
    job = normalised_job(batch_size)
    plan = Plan(strategies=(BatchNormReplay(micro_batch_size=SIZE),))
    whole = record(job, plan, device=load_device(device))
    fewest = BatchNormReplay.fewest_pieces
    with few_pieces(fewest):
        few = record(job, plan, device=load_device(device))
    longer = few.with_more_pieces(NUM_PIECES - fewest)
    assert len(few.steady.operations) < len(longer.steady.operations)
    for name in ("history", "first", "steady"):
        assert what_happens(getattr(longer, name)) == what_happens(getattr(whole, name)), name
    assert dataflow(longer.steady) == dataflow(whole.steady)


def dataflow(trace: Trace) -> list:
    """Return for each operator how many events ago what it reads came to life."""
    born = {event: place for place, event in enumerate(trace.events) if event >= 0}
    return [
        [operation.first_event - born[index] for index in operation.reads]
        for operation in trace.operations
    ]


@pytest.mark.slow
def test_operators_of_lengthened_steps_read_what_was_made_for_them():
    job = job_with(mean_square)
    whole, few = (recorded(job, "cpu", few=few) for few in (False, True))
    assert dataflow(few.with_more_pieces(NUM_PIECES - 4).steady) == dataflow(whole.steady)


def by_hand(*pieces: list[int], sizes: list[int]) -> tuple[Trace, list, list]:
    """Put a step together from the events of its pieces."""
    allocations = [
        Allocation(size, "made", Phase.FORWARD, "", Category.TEMPORARIES) for size in sizes
    ]
    trace, starts = Trace(allocations=allocations), []
    for piece in pieces:
        starts.append(ForwardStart(len(trace.events), 0))
        trace.events += piece
    return trace, [StepMark(0, len(trace.events), 0, 0)], starts


def test_what_one_piece_leaves_to_the_next_is_followed():
    """Each piece makes something, and frees what the one before has made."""
    step = by_hand([0], [1, -1], [2, -2], [3, -3, -4], sizes=[7, 7, 7, 7])
    longer, (mark,) = repeated(*step, 2)
    assert longer.events == [0, 1, -1, 2, -2, 4, -3, 5, -5, 3, -6, -4]
    assert mark == StepMark(0, 12, 0, 0)


@pytest.mark.parametrize(
    ("pieces", "sizes"),
    [
        (([0], [1], [2], [3]), [7, 7, 7, 7]),
        (([0], [1, -2], [2, -3], [3, -4]), [7, 7, 8, 7]),
        (([0, 1], [2, -3, -1], [3, -4, -2], [4, -5]), [7, 7, 5, 5, 5]),
        (([0], [1, 2, -3, -2], [3, 4, -4, -5], [5, -6]), [7, 5, 5, 5, 5, 5]),
        (([0], [1, -2], [2, -3]), [7, 7, 7]),
    ],
    ids=["leave ever more", "other sizes", "end what was there", "another order", "too few"],
)
def test_pieces_that_are_not_the_same_again_are_not_repeated(pieces, sizes):
    assert repeated(*by_hand(*pieces, sizes=sizes), 2) is None


@pytest.mark.slow
def test_pieces_that_differ_are_not_lengthened():
    calls = []

    def every_second_twice(model, batch):
        calls.append(1)
        out = model(batch)
        return (model(out) if len(calls) % 2 else out).square().mean()

    assert recorded(job_with(every_second_twice), "cpu", few=True).with_more_pieces(2) is None


@pytest.mark.slow
def test_what_was_recorded_in_too_few_pieces_is_not_lengthened():
    job = job_with(mean_square, batch_size=3 * SIZE)
    assert recorded(job, "cpu", few=True).with_more_pieces(2) is None


def test_what_moved_bytes_is_not_lengthened():
    """Bytes that moved were counted for the recorded pieces alone."""
    few = recorded(job_with(mean_square), "cpu", few=True)
    few.spill.note_in("0.0", 1)
    assert few.with_more_pieces(NUM_PIECES - 4) is None
