"""What operators reach of a processor's rates follows from pieces of steps that were timed."""

from __future__ import annotations

from datetime import date
from types import SimpleNamespace

import pytest
import torch

from memfit.cost.operator_classes import OperatorClass, class_of
from memfit.cost.operator_times import bare_seconds, operation_seconds
from memfit.devices.calibration import facts_of_processor, with_calibration
from memfit.devices.catalogue import catalogued_device
from memfit.devices.facts import OPTIONAL_FACTS, call_fact, share_fact
from memfit.measurement.class_shares import class_shares, timed_pieces

DEVICE = catalogued_device("cpu")


def operation(name, moved_bytes, num_flops=0):
    return SimpleNamespace(
        name=name,
        moved_bytes=moved_bytes,
        num_flops=num_flops,
        dtype="float32",
        is_on_host=True,
        num_ranks=0,
    )


def timed(name, ratio, fixed_seconds, sizes):
    for size in sizes:
        each = operation(name, size)
        yield each, fixed_seconds + ratio * bare_seconds(each, DEVICE)


def test_shares_and_calls_are_those_of_the_line_that_was_timed():
    measured = [
        *timed("aten::_softmax", 4.0, 20e-6, (1e5, 1e6, 1e7)),
        *timed("aten::bernoulli_", 50.0, 1e-9, (1e5, 1e6)),
    ]
    values = class_shares(measured, DEVICE)
    assert values == pytest.approx(
        {
            "softmax_share": 0.25,
            "softmax_call_seconds": 20e-6,
            "random_share": 0.02,
            "random_call_seconds": 1e-9,
        },
        abs=1e-9,
    )
    facts = facts_of_processor(values, "2.13", 2, date(2026, 11, 27))
    calibrated = with_calibration(DEVICE, facts)
    for each, seconds in measured:
        assert operation_seconds(each, calibrated) == pytest.approx(seconds)
    other = operation("aten::add", 1e6)
    assert operation_seconds(other, calibrated) == operation_seconds(other, DEVICE)


@pytest.mark.parametrize("seconds", [(3e-3, 1e-3), (1e-3, 3e-1)])
def test_where_no_line_rises_from_above_zero_the_sum_has_to_do(seconds):
    calls = [operation("aten::_softmax", size) for size in (1e6, 1e7)]
    values = class_shares(zip(calls, seconds, strict=True), DEVICE)
    bare, launch = sum(bare_seconds(each, DEVICE) for each in calls), DEVICE.value("launch_seconds")
    assert values["softmax_share"] == pytest.approx(bare / (sum(seconds) - 2 * launch))
    assert values["softmax_call_seconds"] == launch


@pytest.mark.slow
def test_every_class_has_its_figures_and_is_timed():
    for kind in OperatorClass:
        assert {share_fact(kind), call_fact(kind)} <= set(OPTIONAL_FACTS)
    state = torch.get_rng_state()
    found = timed_pieces((1,))
    assert {class_of(each.name) for each, _ in found} == set(OperatorClass)
    assert all(seconds > 0 for _, seconds in found)
    assert torch.equal(state, torch.get_rng_state())
    assert all(value > 0 for name, value in class_shares(found, DEVICE).items() if "share" in name)
