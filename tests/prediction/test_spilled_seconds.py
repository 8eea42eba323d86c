"""What a step waits for host or disk, from the bytes that its recording moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.conformance import builders

from memfit import Job, Plan
from memfit.cost.operator_times import OperatorTimes
from memfit.cost.transfers import DISK_BYTES_PER_SECOND
from memfit.devices.catalogue import load_device
from memfit.devices.spec import Device
from memfit.prediction.predict import evaluate
from memfit.prediction.recording import Recording, record
from memfit.prediction.waiting import waited_seconds
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.micro_batching import MicroBatching

SLOW = 1e3  # bytes per second, beside which computing takes no time
FAST = 1e18


def card(link_bytes_per_second: float) -> Device:
    device = load_device("a100-40gb")
    link = replace(device.facts["link_bytes_per_second"], value=link_bytes_per_second)
    return replace(device, facts={**device.facts, "link_bytes_per_second": link})


def job() -> Job:
    return builders.residual(width=64, num_blocks=4, batch_size=64)


def recorded(device: Device, *strategies) -> tuple[Recording, float]:
    """Return a recording, and what it waits."""
    recording = record(job(), Plan(strategies=strategies), device=device)
    return recording, waited_seconds(recording, device, OperatorTimes(device=device))


def moved_bytes(recording: Recording) -> int:
    return sum(recording.spill.out_bytes.values()) + sum(recording.spill.in_bytes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "a100-40gb"])
def test_a_step_that_moves_nothing_waits_for_nothing(name):
    assert recorded(load_device(name))[1] == 0


def test_the_disk_is_waited_for_whole():
    offload = ActivationOffload(to="disk", min_tensor_bytes=1)
    recording, seconds = recorded(load_device("cpu"), offload)
    assert recording.spill.file_bytes > 0
    assert seconds == recording.spill.file_bytes / DISK_BYTES_PER_SECOND


@pytest.mark.slow
@pytest.mark.parametrize("others", [(), (MicroBatching(micro_batch_size=16),)], ids=len)
def test_a_slow_link_is_waited_for_and_a_fast_one_is_not(others):
    offload = ActivationOffload(min_tensor_bytes=1)
    recording, seconds = recorded(card(SLOW), *others, offload)
    assert 0.999 < seconds / (moved_bytes(recording) / SLOW) < 1.001
    assert seconds == pytest.approx(10 * recorded(card(10 * SLOW), *others, offload)[1], rel=1e-3)
    assert recorded(card(FAST), *others, offload)[1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.slow
def test_copies_as_long_as_a_forward_are_hidden_by_it():
    """The seconds of a block's own operators decide, in its forward and twice in its backward."""
    offload = ActivationOffload(min_tensor_bytes=1)
    recording, _ = recorded(card(FAST), offload)
    times = OperatorTimes(device=card(FAST))
    blocks = [
        sum(
            map(
                times.seconds,
                recording.steady.operations[call.first_operation : call.last_operation],
            )
        )
        for call in recording.steady.calls
        if call.module in recording.spill.out_bytes and call.phase == "forward"
    ]
    most_bytes = max(recording.spill.out_bytes.values())
    hiding = 2 * most_bytes / min(blocks)
    assert waited_seconds(recording, card(hiding), times) == pytest.approx(0.0, abs=1e-12)
    assert waited_seconds(recording, card(hiding / 8), times) > 0


@pytest.mark.slow
def test_the_predicted_step_takes_its_computing_and_its_waiting():
    offload = ActivationOffload(min_tensor_bytes=1)
    device = card(SLOW)
    recording, seconds = recorded(device, offload)
    found = evaluate(job(), recording, device, Plan(strategies=(offload,)))
    computed = OperatorTimes(device=device).step_seconds(recording.steady)
    assert found.step_seconds == computed + seconds
