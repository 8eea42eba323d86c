"""Times follow the roofline: arithmetic or traffic, whichever takes longer, and a launch each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.cost.operator_classes import OperatorClass
from memfit.cost.operator_times import OperatorRates, OperatorTimes, operation_seconds
from memfit.devices.catalogue import load_device
from memfit.devices.spec import Device, Fact
from memfit.trace.events import Operation, Phase, Trace

FLOPS_PER_SECOND = 1e12
BYTES_PER_SECOND = 1e10
LAUNCH_SECONDS = 1e-6
SHARE = OperatorRates.of("cpu").classes[OperatorClass.PRODUCT].value


def device_of(**values: float) -> Device:
    facts = {
        "matrix_float32_flops_per_second": FLOPS_PER_SECOND,
        "memory_bandwidth_bytes_per_second": BYTES_PER_SECOND,
        "launch_seconds": LAUNCH_SECONDS,
        **values,
    }
    return Device(
        name="fake",
        title="A fake device",
        kind="cpu",
        compute_capability=None,
        facts={
            name: Fact(value=value, source="made up", read_on="2026-01-01", certainty="exact")
            for name, value in facts.items()
        },
    )


def operation(num_flops: int = 0, moved_bytes: int = 0, dtype: str = "float32") -> Operation:
    return Operation("mm", Phase.FORWARD, dtype, num_flops, moved_bytes)


@pytest.mark.parametrize(
    ("num_flops", "moved_bytes", "bound_seconds"),
    [(3 * 10**12, 10**6, 3.0), (10**6, 2 * 10**10, 2.0), (0, 0, 0.0)],
    ids=["arithmetic", "traffic", "nothing"],
)
def test_an_operator_takes_its_launch_and_what_bounds_it(num_flops, moved_bytes, bound_seconds):
    seconds = operation_seconds(operation(num_flops, moved_bytes), device_of())
    assert seconds == pytest.approx(bound_seconds / SHARE + LAUNCH_SECONDS)


def test_each_dtype_has_its_own_rate_and_float32_stands_in_for_the_unknown():
    device = device_of(matrix_bfloat16_flops_per_second=4 * FLOPS_PER_SECOND)
    times = {
        dtype: operation_seconds(operation(num_flops=10**12, dtype=dtype), device)
        for dtype in ("float32", "bfloat16", "int8")
    }
    assert times["bfloat16"] == pytest.approx(times["float32"] / 4, rel=1e-4)
    assert times["int8"] == times["float32"]


def test_what_fits_into_the_cache_moves_at_its_rate_and_the_rest_at_that_of_memory():
    device = device_of(cache_bytes=10**6, cache_bandwidth_bytes_per_second=4 * BYTES_PER_SECOND)
    assert device.traffic_seconds(10**6) == pytest.approx(10**6 / (4 * BYTES_PER_SECOND))
    more = device.traffic_seconds(3 * 10**6) - device.traffic_seconds(10**6)
    assert more == pytest.approx(2 * 10**6 / BYTES_PER_SECOND)
    slow = device_of(cache_bytes=10**6, cache_bandwidth_bytes_per_second=BYTES_PER_SECOND / 2)
    assert slow.traffic_seconds(10**6) == device_of().traffic_seconds(10**6)


def test_cudnn_multiplies_float32_as_tf32_where_the_card_has_it():
    device = replace(device_of(matrix_tf32_flops_per_second=8 * FLOPS_PER_SECOND), kind="cuda")
    convolved = replace(operation(num_flops=10**12), name="convolution")
    slow = operation_seconds(convolved, replace(device_of(), kind="cuda"))
    assert operation_seconds(convolved, device) == pytest.approx(slow / 8, rel=1e-4)
    product = operation(num_flops=10**12)
    assert operation_seconds(product, device) > operation_seconds(convolved, device)


def test_a_step_takes_the_sum_of_its_operators():
    trace = Trace(operations=[operation(num_flops=10**12), operation(moved_bytes=10**10)])
    assert OperatorTimes(device=device_of()).step_seconds(trace) == pytest.approx(
        2.0 / SHARE + 2 * LAUNCH_SECONDS
    )
    assert OperatorTimes(device=device_of()).step_seconds(Trace()) == 0.0


@pytest.mark.parametrize("name", ["cpu", "a100-40gb", "rtx-3060-12gb", "t4"])
def test_more_work_never_takes_less_time_on_a_known_device(name):
    device = load_device(name)
    seconds = [operation_seconds(operation(10**n, 10**n), device) for n in range(4, 13)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


WORK = st.integers(0, 10**15)


@pytest.mark.slow
@given(WORK, WORK, WORK, WORK)
def test_time_is_monotone_in_both_kinds_of_work(num_flops, moved_bytes, more_flops, more_bytes):
    device = device_of()
    less = operation_seconds(operation(num_flops, moved_bytes), device)
    more = operation_seconds(operation(num_flops + more_flops, moved_bytes + more_bytes), device)
    assert LAUNCH_SECONDS <= less <= more
