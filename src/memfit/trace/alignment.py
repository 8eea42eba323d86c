"""Gives measured allocations the purpose of the recorded ones, by matching the two sequences."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.trace.events import Allocation

_LOOK_AHEAD = 24


def align(measured_bytes: Sequence[int], recorded: Sequence[Allocation]) -> list[Allocation | None]:
    """Match measured allocations with recorded ones, in order, by their bytes.

    Both come from the same code, so the sequences agree except where a kernel takes scratch that
    was not recorded (no match) or a recorded block was never asked for (passed over).
    """
    matches: list[Allocation | None] = []
    position = 0
    for num_bytes in measured_bytes:
        window = recorded[position : position + _LOOK_AHEAD]
        offset = next((i for i, block in enumerate(window) if block.num_bytes == num_bytes), None)
        if offset is None:
            matches.append(None)
        else:
            matches.append(window[offset])
            position += offset + 1
    return matches
