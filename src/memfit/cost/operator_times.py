"""How long operators take: by the roofline, corrected by what was measured on the device."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memfit.cost.roofline import operation_seconds
from memfit.devices.spec import Device
from memfit.trace.events import Operation, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """Give the seconds of operators on a device.

    A call that was measured with the same shapes takes what was measured; another call of a
    measured operator takes its roofline time times the operator's usual ratio of the two.
    """

    device: Device
    measured_seconds: Mapping[int, float] = field(default_factory=dict)
    """By the signature of the call."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """Measured over roofline seconds, by operator."""
    usual_ratio: float = 1.0

    def seconds(self, operation: Operation) -> float:
        """Give the seconds of one call."""
        measured = self.measured_seconds.get(operation.signature)
        if measured is not None:
            return measured
        ratio = self.ratios.get(operation.name, self.usual_ratio)
        return operation_seconds(operation, self.device) * ratio

    def step_seconds(self, trace: Trace) -> float:
        """Add up the operators of a step."""
        return sum(self.seconds(operation) for operation in trace.operations)


def times_from_measured(
    device: Device, timed: Iterable[tuple[Operation, float]], step_seconds: float
) -> OperatorTimes:
    """Learn from operators that were timed one by one, and a step that was timed as a whole.

    Timing operators adds to each of them and leaves out what happens between them, so all are
    scaled to add up to the step.
    """
    timed = list(timed)
    scale = step_seconds / sum(seconds for _, seconds in timed)
    by_signature: dict[int, list[float]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(list)
    for operation, seconds in timed:
        by_signature[operation.signature].append(seconds * scale)
        by_name[operation.name].append(seconds * scale / operation_seconds(operation, device))
    return OperatorTimes(
        device=device,
        measured_seconds={key: statistics.fmean(found) for key, found in by_signature.items()},
        ratios={name: statistics.median(found) for name, found in by_name.items()},
        usual_ratio=statistics.median(ratio for found in by_name.values() for ratio in found),
    )
