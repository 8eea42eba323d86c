"""What NCCL takes of a card's memory outside torch: a table of readings, never exact.

NCCL does not publish how much a communicator takes. It grows with the channels, so with the links
and the card, with the ranks up to a few nodes, and with the kinds of collectives
(https://github.com/NVIDIA/nccl/issues/986). Readings are of others; where there is none for an
architecture, the nearest stands in as a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.devices.spec import Device
from memfit.figures import Certainty
from memfit.units import MIB

_READ_ON = "2026-11-23"
_A100 = "4 A100 with NVLink, an all-reduce (https://github.com/NVIDIA/nccl/issues/964)"
_H100 = "8 H100, before an all-to-all (https://github.com/NVIDIA/nccl/issues/1685)"
_MOST_BYTES = 1600 * MIB
"""The most that is reported for one communicator that reduces
(https://github.com/NVIDIA/nccl/issues/864)."""
_LEAST_FRACTION = 0.5
"""How far below a reading the low end lies, as for all that is guessed outside the allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclMemory:
    """What all communicators of a rank take, likely and within bounds."""

    num_bytes: int
    low_bytes: int
    high_bytes: int
    certainty: Certainty
    source: str


@dataclass(frozen=True, slots=True)
class _Reading:
    """One communicator of up to so many ranks, from a compute capability on."""

    capability: tuple[int, int]
    most_ranks: int | None
    num_bytes: int
    certainty: Certainty
    source: str


_READINGS = (
    _Reading((9, 0), 2, 839 * MIB, Certainty.GUESS, f"Guess: 1060 x 544 / 688 of {_H100}"),
    _Reading((9, 0), 8, 1060 * MIB, Certainty.TABLE, _H100),
    _Reading((9, 0), None, 1060 * MIB, Certainty.GUESS, f"Guess: as within one node, {_H100}"),
    _Reading((8, 0), 2, 544 * MIB, Certainty.TABLE, _A100),
    _Reading((8, 0), 4, 688 * MIB, Certainty.TABLE, _A100),
    _Reading((8, 0), None, 688 * MIB, Certainty.GUESS, f"Guess: as among four, {_A100}"),
    _Reading((0, 0), 2, 544 * MIB, Certainty.GUESS, f"Guess: as on an A100, {_A100}"),
    _Reading((0, 0), None, 688 * MIB, Certainty.GUESS, f"Guess: as on an A100, {_A100}"),
)


def nccl_memory(device: Device, group_sizes: Sequence[int]) -> NcclMemory | None:
    """Return what NCCL takes for the process groups of a rank; None where it has to talk to nobody.

    Args:
        device: the card.
        group_sizes: the numbers of ranks of the groups, the default group first. A communicator is
            made when a group is first used, so the default group of a mesh may do without.
    """
    sizes = [size for size in group_sizes if size > 1]
    if not sizes:
        return None
    readings = [_reading(device, size) for size in sizes]
    likely = sum(reading.num_bytes for reading in readings)
    unused = readings[0].num_bytes if len(readings) > 1 else 0
    is_table = all(reading.certainty is Certainty.TABLE for reading in readings)
    sources = "; ".join(sorted({reading.source for reading in readings}))
    return NcclMemory(
        num_bytes=likely,
        low_bytes=int(_LEAST_FRACTION * (likely - unused)),
        high_bytes=max(_MOST_BYTES, *(reading.num_bytes for reading in readings)) * len(sizes),
        certainty=Certainty.TABLE if is_table else Certainty.GUESS,
        source=f"{len(sizes)} communicator(s) of {sizes} ranks: {sources}, read on {_READ_ON}",
    )


def _reading(device: Device, num_ranks: int) -> _Reading:
    """Return the reading that stands for a communicator."""
    major, _, minor = (device.compute_capability or "8.0").partition(".")
    own = (int(major), int(minor or 0))
    for reading in _READINGS:
        is_alike = own >= reading.capability and (reading.capability[0] != 8 or own == (8, 0))
        if is_alike and (reading.most_ranks is None or num_ranks <= reading.most_ranks):
            return reading
    raise AssertionError("the last reading stands for all")
