"""Memory that is taken on streams of their own, on the virtual card."""

from __future__ import annotations

import torch

from memfit.allocator.replay import simulate_events, smallest_capacity_bytes
from memfit.devices.catalogue import load_device
from memfit.prediction.recording import record_steps
from memfit.units import MIB

SIZE = 12 * MIB


def recorded(step):
    return record_steps(lambda: step, load_device("a100-40gb"), num_steps=1)


def streams_of(step) -> list[int]:
    return recorded(step).history.streams()


def buffer() -> torch.Tensor:
    return torch.empty(SIZE, dtype=torch.uint8, device="cuda")


def test_memory_is_taken_on_the_stream_that_code_works_on():
    def step():
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        kept = [buffer()]
        with torch.cuda.stream(side):
            kept.append(buffer())
            with torch.cuda.stream(other), torch.cuda.stream(side), torch.cuda.stream(None):
                kept.append(buffer())
            kept.append(buffer())
        kept.append(buffer())
        torch.cuda.set_stream(other)
        kept.append(buffer())

    default, first, nested, after, outside, was_set = streams_of(step)
    assert default == outside == 0
    assert first == nested == after != 0
    assert was_set not in (default, first)


def test_the_next_recording_begins_on_the_default_stream():
    def step():
        torch.cuda.set_stream(torch.cuda.Stream())
        kept = buffer()
        del kept

    assert streams_of(step) == streams_of(step) == [1]


def test_streams_are_told_apart_by_what_they_are():
    def step():
        kept = buffer()
        del kept
        side = torch.cuda.Stream(priority=-1)
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            assert torch.cuda.current_stream() != torch.cuda.default_stream()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert isinstance(side, torch.cuda.Stream)
        assert side in {side}

    recorded(step)


def test_what_one_stream_has_given_back_does_not_serve_another():
    events, sizes = [0, -1, 1, -2, 2, -3], [SIZE, SIZE, SIZE]
    shared = simulate_events(events, sizes)
    apart = simulate_events(events, sizes, streams=[0, 7, 0])
    assert shared.peak_allocated_bytes == apart.peak_allocated_bytes == SIZE
    assert shared.peak_reserved_bytes == SIZE
    assert apart.peak_reserved_bytes == 2 * SIZE


def test_where_memory_ends_the_other_streams_give_back_what_they_have():
    assert smallest_capacity_bytes([0, -1, 1, -2], [SIZE, SIZE], streams=[0, 7]) == SIZE
