"""Templates of steps, polynomials of lengths, and the replay of a sequence of shapes."""

from __future__ import annotations

import numpy as np
import pytest

from memfit.allocator.caching import CachingAllocator
from memfit.allocator.settings import AllocatorSettings
from memfit.script.scanned_data import RecordedBatch, ScannedData
from memfit.script.shapes_replay import StepSequence, replay_sequence
from memfit.script.step_sizes import StepSizes, varying_lengths
from memfit.script.step_templates import BORN, templates
from memfit.trace.events import Allocation, Category, Phase, StepMark, Trace
from memfit.units import MIB


class History:
    """Writes a history by hand: a weight, and steps that hand a gradient on to the next."""

    def __init__(self):
        self.trace = Trace()
        self.marks = []
        self._gradient = None
        self.take(MIB, "weight")

    def take(self, num_bytes, operator):
        self.trace.allocations.append(
            Allocation(num_bytes, operator, Phase.FORWARD, "", Category.TEMPORARIES)
        )
        self.trace.events.append(len(self.trace.allocations) - 1)
        return len(self.trace.allocations) - 1

    def free(self, index):
        self.trace.events.append(-1 - index)

    def step(self, length, scratch=0):
        first = len(self.trace.events)
        hidden = self.take(1000 * length, "mm")
        scores = self.take(7 * length * length, "bmm")
        if scratch:
            self.free(self.take(scratch, "bmm"))
        if self._gradient is not None:
            self.free(self._gradient)
        self._gradient = self.take(4 * MIB, "gradient")
        self.free(scores)
        self.free(hidden)
        self.marks.append(StepMark(first, len(self.trace.events), 0, 0))


def _scanned(lengths, recorded, first):
    shapes = [(((8, length), "int64"),) for length in lengths]
    return ScannedData(
        shapes=shapes,
        order=list(range(len(lengths))),
        num_steps_before=first,
        recorded=[
            RecordedBatch(
                position=lengths.index(length),
                shape=lengths.index(length),
                step=first + number,
                is_confirmed=True,
            )
            for number, length in enumerate(recorded)
        ],
    )


def _history(recorded, scratch=lambda _length: 0):
    history = History()
    for length in (10, 10, *recorded, recorded[-1], recorded[-1]):
        history.step(length, scratch(length))
    return history


def test_templates_name_blocks_by_their_place_and_what_is_handed_on():
    history = _history([100, 50])
    found = templates(history.trace, history.marks)
    assert found[2].has_order_of(found[3])
    assert found[2].events == ((BORN, 0), (BORN, 1), (1, 0), (BORN, 2), (0, 1), (0, 0))
    assert found[2].handed_on == (2,)
    assert found[2].deaths == (0, 0, 1)


def test_scratch_of_some_shapes_alone_leaves_their_order_the_same():
    history = _history([100, 50], lambda length: 3000 if length > 60 else 0)
    found = templates(history.trace, history.marks)
    assert found[2].has_order_of(found[3])
    assert [len(each.passing) for each in found[2:4]] == [1, 0]
    assert found[2].sizes[-1] == 3000


def test_sizes_of_other_lengths_are_polynomials_to_the_byte():
    recorded = [500, 20, 90, 300, 170]
    history = _history(recorded)
    data = _scanned([*recorded, 123, 444], recorded, 2)
    sizes = StepSizes(data, templates(history.trace, history.marks))
    for shape, length in ((5, 123), (6, 444)):
        step = sizes.of(shape)
        assert step.method == "fitted"
        assert list(step.sizes) == [1000 * length, 7 * length**2, 4 * MIB]
    assert sizes.of(0).method == "recorded"


def test_too_few_recorded_steps_are_not_fitted_and_larger_batches_are_called_larger():
    recorded = [300, 20, 90]
    history = _history(recorded)
    data = _scanned([*recorded, 123, 444], recorded, 2)
    sizes = StepSizes(data, templates(history.trace, history.marks))
    assert sizes.of(3).method == "nearest larger"
    assert sizes.of(3).sizes[0] == 300_000
    assert sizes.of(4).method == "larger than recorded"


def test_what_is_no_polynomial_takes_the_bytes_of_a_larger_batch():
    recorded = [500, 20, 90, 300, 170]
    history = _history(recorded, lambda length: 2 ** (length // 50))
    data = _scanned([*recorded, 123], recorded, 2)
    step = StepSizes(data, templates(history.trace, history.marks)).of(5)
    assert list(step.sizes) == [123_000, 7 * 123**2, 4 * MIB, 2 ** (170 // 50)]


def test_lengths_on_one_line_are_one_length():
    shapes = [
        (((8, n), "int64"), ((8, 2 * n + 1), "int64"), ((8, n * n), "bool")) for n in (3, 5, 9)
    ]
    assert varying_lengths(shapes).tolist() == [[3, 9], [5, 25], [9, 81]]
    assert varying_lengths([*shapes, (((8,), "int64"),)]).shape == (4, 0)


@pytest.mark.parametrize("capacity_bytes", [None, 64 * MIB])
def test_a_replayed_sequence_is_the_recorded_one_block_for_block(capacity_bytes):
    recorded = [500, 20, 90, 300, 170]
    history = _history(recorded)
    data = _scanned(recorded, recorded, 2)
    found = templates(history.trace, history.marks)
    sizes = StepSizes(data, found)

    def begin(allocator):
        return StepSequence(history.trace, history.marks[1], found[:2], allocator)

    outcome = replay_sequence(
        begin,
        [sizes.of(shape) for shape in range(5)],
        settings=AllocatorSettings(),
        capacity_bytes=capacity_bytes,
        most_seconds=10.0,
    )
    direct = CachingAllocator(AllocatorSettings(), capacity_bytes)
    alive = {}
    for event in history.trace.events[: history.marks[6].last_event]:
        if event >= 0:
            alive[event] = direct.allocate(history.trace.allocations[event].num_bytes)
        else:
            direct.free(alive.pop(-1 - event))
    assert outcome.survived
    assert outcome.num_steps == 5
    assert outcome.peak_reserved_bytes == direct.device.highest_reserved_bytes
    assert outcome.peak_allocated_bytes == direct.peak_allocated_bytes
    assert outcome.end_allocated_bytes == direct.allocated_bytes


def test_a_card_that_is_too_small_names_the_step():
    recorded = [20, 2000]
    history = _history(recorded)
    found = templates(history.trace, history.marks)
    sizes = StepSizes(_scanned(recorded, recorded, 2), found)
    outcome = replay_sequence(
        lambda allocator: StepSequence(history.trace, history.marks[1], found[:2], allocator),
        [sizes.of(0), sizes.of(1)],
        settings=AllocatorSettings(),
        capacity_bytes=26 * MIB,
        most_seconds=10.0,
    )
    assert (outcome.survived, outcome.failed_step, outcome.num_steps) == (False, 1, 1)


def test_a_step_of_another_order_leaves_nothing_behind():
    history = History()
    for number in range(9):
        history.step(20)
        if number % 2:  # the gradient is let go between the steps
            history.free(history._gradient)
            history._gradient = None
    found = templates(history.trace, history.marks)
    data = _scanned([20, 21], [20, 21], 2)
    sizes = StepSizes(data, found)
    allocator = CachingAllocator(AllocatorSettings(), None)
    sequence = StepSequence(history.trace, history.marks[1], found[:2], allocator)
    for shape in np.random.default_rng(0).integers(0, 2, 50):
        sequence.step(sizes.of(int(shape)))
    assert allocator.allocated_bytes <= MIB + 2 * 4 * MIB
