"""How long operators take: by the roofline, corrected by what was measured on the device.

By the roofline each operator is bound by arithmetic or by memory traffic: Williams, Waterman,
Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009. Each also pays a
fixed launch time.
"""

from __future__ import annotations

import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Self

from memfit.cost.collectives import seconds_among_ranks
from memfit.cost.operator_classes import OperatorClass, class_of
from memfit.devices.catalogue import catalogued_device
from memfit.devices.facts import call_fact, read_fact, share_fact
from memfit.devices.spec import CPU, CUDA, ROCM, Device, Fact
from memfit.figures import Certainty
from memfit.trace.events import Operation, Trace

_TF32_RATE = "matrix_tf32_flops_per_second"
_AS_TF32 = (OperatorClass.CONVOLUTION, OperatorClass.RECURRENT)
_SAME = 1e-6
"""Roofline times that differ by less than this share of them, squared, are one."""

_NOTICEABLE_FRACTION = 0.1
_TABLE = "operator_rates.toml"


@dataclass(frozen=True, slots=True)
class Line:
    """How long an operator takes, from its roofline time."""

    ratio: float
    fixed_seconds: float = 0.0
    """What a call takes whatever its size."""

    def seconds(self, roofline_seconds: float) -> float:
        """Return the seconds of one call."""
        return self.fixed_seconds + self.ratio * roofline_seconds


@dataclass(frozen=True, slots=True)
class TimedOperators:
    """Operators that were timed one by one, in steps that were timed as a whole besides."""

    timed: Sequence[tuple[Operation, float]]
    steps_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """Give the seconds of operators on a device.

    A call that was measured with the same shapes takes what was measured; another call of a
    measured operator takes what a line through its measurements says of its roofline time.
    """

    device: Device
    measured_seconds: Mapping[int, float] = field(default_factory=dict)
    """By the signature of the call."""
    lines: Mapping[str, Line] = field(default_factory=dict)
    """By operator."""
    usual: Line = Line(ratio=1.0)

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of one call; of the host's beside a GPU nothing was measured."""
        if _is_beside(operation, self.device):
            return operation_seconds(operation, self.device)
        measured = self.measured_seconds.get(operation.signature)
        if measured is not None:
            return measured
        line = self.lines.get(operation.name, self.usual)
        return line.seconds(operation_seconds(operation, self.device))

    def step_seconds(self, trace: Trace) -> float:
        """Add up the operators of a step; collectives run beside them, where they do."""
        if any(operation.num_ranks for operation in trace.operations):
            return seconds_among_ranks(trace, self.device, self.seconds)
        return sum(self.seconds(operation) for operation in trace.operations)


def operation_seconds(operation: Operation, device: Device) -> float:
    """Return what one operator takes: its roofline time, by what its class reaches of the roofline.

    What the host computes beside a GPU takes the arithmetic and traffic of a processor of the
    catalogue, a guess; whoever launches operators is the same for both.

    Does not account for overlap between operators, nor for what the shapes of a call decide.
    """
    place = catalogued_device(CPU) if _is_beside(operation, device) else device
    kind = class_of(operation.name)
    share = place.facts.get(share_fact(kind)) or OperatorRates.of(place.kind).classes[kind]
    call = device.facts.get(call_fact(kind)) or device.facts["launch_seconds"]
    return bare_seconds(operation, place) / share.value + call.value


def bare_seconds(operation: Operation, place: Device) -> float:
    """Return the roofline time of an operator, as if its class reached all of a device's rates."""
    kind, rates = class_of(operation.name), OperatorRates.of(place.kind)
    matrix = place.matrix_rate(_rate_of(operation, kind, place))
    arithmetic = operation.num_flops / (matrix.value * _reach(matrix, rates.product_share))
    memory = place.facts["memory_bandwidth_bytes_per_second"]
    num_bytes = operation.moved_bytes * _half_types_cost(operation, kind, place)
    return max(arithmetic, place.traffic_seconds(num_bytes) / _reach(memory, rates.copy_share))


def _half_types_cost(operation: Operation, kind: OperatorClass, device: Device) -> int:
    """Return 2 where half the bytes gain nothing: a GPU's norms take as long in 16 bits as in 32.

    Measured on an H200: benchmarks/recorded_operators/h200.json.
    """
    by_element = device.kind == CUDA and kind in (OperatorClass.NORM, OperatorClass.CHANNEL_NORM)
    return 2 if by_element and operation.dtype in ("bfloat16", "float16") else 1


def _rate_of(operation: Operation, kind: OperatorClass, device: Device) -> str:
    """Name the rate of an operator: cuDNN multiplies float32 as TF32 unless it is told not to."""
    if kind in _AS_TF32 and operation.dtype == "float32" and _TF32_RATE in device.facts:
        return "tf32"
    return operation.dtype


def time_certainty(trace: Trace, device: Device) -> Certainty:
    """Say whether the roofline times of a step rest on figures that are guesses."""
    guessed_seconds = sum(_guessed_seconds(each, device) for each in trace.operations)
    whole_seconds = sum(operation_seconds(each, device) for each in trace.operations)
    is_guess = guessed_seconds > _NOTICEABLE_FRACTION * whole_seconds
    return Certainty.GUESS if is_guess or device.platform == ROCM else Certainty.TABLE


def _guessed_seconds(operation: Operation, device: Device) -> float:
    """Return how much of an operator's time comes from guesses."""
    whole_seconds = operation_seconds(operation, device)
    if _is_beside(operation, device):
        return whole_seconds
    launch = device.facts["launch_seconds"]
    bandwidth = device.facts["memory_bandwidth_bytes_per_second"]
    matrix = device.facts.get(f"matrix_{operation.dtype}_flops_per_second")
    rate = matrix or device.facts["matrix_float32_flops_per_second"]
    is_arithmetic = operation.num_flops / rate.value > operation.moved_bytes / bandwidth.value
    guessed_seconds = 0.0
    if launch.certainty == Certainty.GUESS:
        guessed_seconds += launch.value
    if (rate if is_arithmetic else bandwidth).certainty == Certainty.GUESS:
        guessed_seconds += whole_seconds - launch.value
    return guessed_seconds


def _is_beside(operation: Operation, device: Device) -> bool:
    """Return whether the host computes it, beside a GPU."""
    return operation.is_on_host and device.kind == CUDA


def times_from_measured(device: Device, runs: Iterable[TimedOperators]) -> OperatorTimes:
    """Learn from steps of one batch size or several.

    Timing operators adds to each of them and leaves out what happens between them, so those of a
    run are scaled to add up to its steps. Several sizes show what a call takes whatever its size,
    which micro-batches pay more often.
    """
    measured_seconds: dict[int, float] = {}
    by_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        scale = run.steps_seconds / sum(seconds for _, seconds in run.timed)
        by_signature: dict[int, list[float]] = defaultdict(list)
        for operation, seconds in run.timed:
            by_signature[operation.signature].append(seconds * scale)
            point = (operation_seconds(operation, device), seconds * scale)
            by_name[operation.name].append(point)
        means = {key: statistics.fmean(found) for key, found in by_signature.items()}
        measured_seconds = means | measured_seconds  # the first run's add up to its own step
    points = [point for found in by_name.values() for point in found]
    return OperatorTimes(
        device=device,
        measured_seconds=measured_seconds,
        lines={name: _line_through(found) for name, found in by_name.items()},
        usual=Line(_usual_ratio(points)),
    )


def _line_through(points: Sequence[tuple[float, float]]) -> Line:
    """Fit seconds to roofline seconds with the least squares of relative errors.

    Where the points don't rise, or all have one roofline time, their usual ratio has to do.
    """
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_roofline = sum(w * r for w, (r, _) in zip(weights, points, strict=True)) / total
    mean_seconds = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = rise = 0.0
    for weight, (roofline, seconds) in zip(weights, points, strict=True):
        spread += weight * (roofline - mean_roofline) ** 2
        rise += weight * (roofline - mean_roofline) * (seconds - mean_seconds)
    if spread <= _SAME * total * mean_roofline**2 or rise <= 0:
        return Line(_usual_ratio(points))
    ratio = rise / spread
    fixed_seconds = mean_seconds - ratio * mean_roofline
    if fixed_seconds < 0:
        return Line(_usual_ratio(points))
    return Line(ratio, fixed_seconds)


def _usual_ratio(points: Sequence[tuple[float, float]]) -> float:
    return statistics.median(seconds / roofline for roofline, seconds in points)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRates:
    """What operators reach on one kind of device.

    A rate that was measured, by ``memfit calibrate``, is what a large matrix product or a copy
    reaches. One of a data sheet is more than that; ``_reach`` says by how much.
    """

    product_share: Fact
    """The share of a data sheet's matrix rate that a large product reaches."""
    copy_share: Fact
    """The share of a data sheet's bandwidth that a large copy reaches."""
    classes: Mapping[OperatorClass, Fact]
    """The share of what a large product or copy reaches, whichever binds, by class."""

    @classmethod
    @cache
    def of(cls, kind: str) -> Self:
        """Read the rates on a ``cpu`` or ``cuda`` device."""
        text = (resources.files(__package__) / _TABLE).read_text(encoding="utf-8")
        table = tomllib.loads(text)[CPU if kind == CPU else CUDA]

        def fact(name: str) -> Fact:
            return read_fact(_TABLE, name, table[name])

        classes = {each: fact(each.value) for each in OperatorClass}
        return cls(product_share=fact("matrix"), copy_share=fact("memory"), classes=classes)


def _reach(rate: Fact, of_data_sheet: Fact) -> float:
    """Return what can be reached of a rate: all of one that was measured."""
    return 1.0 if rate.certainty == Certainty.EXACT else of_data_sheet.value
