"""What operators of each class reach of a processor's rates, timed in pieces of training steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from memfit.cost.operator_classes import OperatorClass, class_of
from memfit.cost.operator_times import Line, bare_seconds
from memfit.devices.facts import call_fact, share_fact
from memfit.devices.spec import CPU, Device
from memfit.measurement.step_pieces import Piece, step_pieces
from memfit.measurement.timing import OperatorTimer
from memfit.trace.events import Operation

Timed = tuple[Operation, float]

_BATCH_SIZES = (1, 4, 16)
_NUM_ROUNDS = 3
_LEAST_OWN_SHARE = 0.1
"""Of a call's seconds, so much at least is its own work, however long a launch is said to take."""


def measure_class_shares(device: Device) -> dict[str, float]:
    """Time pieces of training steps here; takes a few seconds.

    Args:
        device: this machine's processor, with the rates that were measured of it.
    """
    return class_shares(timed_pieces(_BATCH_SIZES), device)


def class_shares(timed: Iterable[Timed], device: Device) -> dict[str, float]:
    """Return what timed operators reach of a device's roofline, and what a call takes, by class."""
    points: dict[OperatorClass, list[tuple[float, float]]] = defaultdict(list)
    for operation, seconds in timed:
        points[class_of(operation.name)].append((bare_seconds(operation, device), seconds))
    found: dict[str, float] = {}
    for kind, of_kind in points.items():
        line = _line_through(of_kind, device.value("launch_seconds"))
        found[share_fact(kind)] = 1.0 / line.ratio
        found[call_fact(kind)] = line.fixed_seconds
    return found


def _line_through(points: Sequence[tuple[float, float]], launch_seconds: float) -> Line:
    """Fit seconds to roofline seconds by least squares, so that the largest calls say most.

    Where no line rises from above zero, a call takes a launch and its share of all the rest.
    """
    rooflines, seconds = zip(*points, strict=True)
    if len(set(rooflines)) > 1:
        ratio, fixed_seconds = statistics.linear_regression(rooflines, seconds)
        if ratio > 0 and fixed_seconds > 0:
            return Line(ratio, fixed_seconds)
    own_seconds = sum(max(each - launch_seconds, _LEAST_OWN_SHARE * each) for each in seconds)
    return Line(own_seconds / sum(rooflines), launch_seconds)


def timed_pieces(batch_sizes: Iterable[int]) -> list[Timed]:
    """Time the operators of pieces: of each the least of a few rounds, which is least disturbed.

    Rounds go through all pieces, so that each finds its tensors out of the caches, as a step does.
    """
    with torch.random.fork_rng(devices=()):
        pieces = [piece for size in batch_sizes for piece in step_pieces(size)]
        for piece in pieces:
            piece()
        rounds = [[each for piece in pieces for each in _timed(piece)] for _ in range(_NUM_ROUNDS)]
    return [
        (calls[0][0], min(seconds for _, seconds in calls)) for calls in zip(*rounds, strict=True)
    ]


def _timed(piece: Piece) -> list[Timed]:
    timer = OperatorTimer(CPU)
    with timer:
        piece()
    return timer.timed
