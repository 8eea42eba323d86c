"""Times of operators: as measured where they were, else by the roofline and its usual ratio."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.cost.operator_times import (
    OperatorTimes,
    TimedOperators,
    operation_seconds,
    times_from_measured,
)
from memfit.devices.catalogue import catalogued_device, load_device
from memfit.trace.events import Operation, Phase, Trace

DEVICE = load_device("t4")


def operation(name: str, moved_bytes: int, signature: int) -> Operation:
    return Operation(name, Phase.FORWARD, "float32", 0, moved_bytes, signature)


SMALL, LARGE = operation("mul", 10**6, 1), operation("mul", 10**9, 2)
OTHER, NEW = operation("add", 10**6, 3), operation("tanh", 10**8, 4)


def learnt(timed, step_seconds: float) -> OperatorTimes:
    return times_from_measured(DEVICE, [TimedOperators(timed, step_seconds)])


def test_without_measurements_operators_take_the_roofline():
    times = OperatorTimes(device=DEVICE)
    assert times.seconds(SMALL) == operation_seconds(SMALL, DEVICE)
    assert times.step_seconds(Trace(operations=[SMALL, LARGE])) == sum(
        operation_seconds(o, DEVICE) for o in (SMALL, LARGE)
    )


def test_a_measured_call_takes_the_mean_of_what_was_measured():
    times = learnt([(SMALL, 1.0), (SMALL, 3.0)], 4.0)
    assert times.seconds(SMALL) == pytest.approx(2.0)


def test_another_shape_of_a_measured_operator_takes_its_usual_ratio():
    twice = 2 * operation_seconds(SMALL, DEVICE)
    times = learnt([(SMALL, twice)], twice)
    assert times.seconds(LARGE) == pytest.approx(2 * operation_seconds(LARGE, DEVICE))


def test_two_sizes_show_what_a_call_takes_whatever_its_size():
    """Each run is scaled by itself, so both sizes have to agree on the line."""
    fixed_seconds, ratio = 1e-3, 3.0

    def seconds(operation: Operation) -> float:
        return fixed_seconds + ratio * operation_seconds(operation, DEVICE)

    runs = [TimedOperators([(o, 7 * seconds(o))], seconds(o)) for o in (SMALL, LARGE)]
    times = times_from_measured(DEVICE, runs)
    between = operation("mul", 10**7, 5)
    assert times.seconds(between) == pytest.approx(seconds(between))


@pytest.mark.parametrize("seconds", [(2.0, 1.0), (1e-6, 1.0)], ids=["falling", "through below 0"])
def test_a_line_that_makes_no_sense_gives_way_to_the_usual_ratio(seconds):
    operations = (SMALL, LARGE)
    times = learnt(list(zip(operations, seconds, strict=True)), sum(seconds))
    found = sorted(
        s / operation_seconds(o, DEVICE) for o, s in zip(operations, seconds, strict=True)
    )
    expected = sum(found) / 2 * operation_seconds(operation("mul", 10**8, 6), DEVICE)
    assert times.seconds(operation("mul", 10**8, 6)) == pytest.approx(expected)


def test_an_operator_that_was_never_measured_takes_the_ratio_of_all():
    timed = [(o, 3 * operation_seconds(o, DEVICE)) for o in (SMALL, OTHER)]
    times = learnt(timed, sum(s for _, s in timed))
    assert times.seconds(NEW) == pytest.approx(3 * operation_seconds(NEW, DEVICE))


@pytest.mark.slow
@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3), st.floats(1e-5, 10.0))
def test_operators_are_scaled_to_add_up_to_the_step(found, step_seconds):
    operations = [SMALL, LARGE, OTHER]
    timed = list(zip(operations, found, strict=True))
    times = learnt(timed, step_seconds)
    assert times.step_seconds(Trace(operations=operations)) == pytest.approx(step_seconds)


def test_what_the_host_computes_beside_a_gpu_takes_the_rates_of_a_processor():
    card, host = load_device("a100-40gb"), catalogued_device("cpu")
    large = Operation("mm", Phase.FORWARD, "float32", 10**12, 0, 7)
    there = replace(large, is_on_host=True)
    times = OperatorTimes(device=card, measured_seconds={7: 1.0})
    assert times.seconds(large) == 1.0
    expected = operation_seconds(large, host) - host.value("launch_seconds")
    assert times.seconds(there) == pytest.approx(expected + card.value("launch_seconds"))
    assert OperatorTimes(device=host).seconds(there) == OperatorTimes(device=host).seconds(large)
