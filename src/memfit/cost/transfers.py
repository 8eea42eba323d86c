"""Turns moved bytes into seconds: copies on a link run beside the computation, block by block.

The rules are those of activation offload. The bytes of a block go out while the next block's
forward runs, and the block after that waits until they have gone. In backward, the bytes of a block
are asked for when a later block begins, and the block waits until they are there. The last block's
bytes stay, as backward needs them first. One copy runs at a time, in the order of asking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DISK_BYTES_PER_SECOND = 0.5e9
"""What a disk writes and reads, a guess: a SATA SSD's rate. Nothing is computed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What one block computes, and what it moves out after forward and back before backward."""

    forward_seconds: float
    backward_seconds: float
    out_bytes: int = 0
    in_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How computation and copies of a step lie beside each other."""

    step_seconds: float
    waited_seconds: float
    """What the copies add: the computation stands still for so long."""
    peak_in_flight_bytes: int
    """The most that was on the device only because it was on its way."""


def overlapped(
    blocks: Sequence[BlockWork],
    link_bytes_per_second: float,
    *,
    between_seconds: float = 0.0,
    blocks_ahead: int = 1,
) -> Overlap:
    """Lay out one forward and backward over blocks whose saved tensors are moved away.

    Does not account for the time that starting a copy takes, nor for memory traffic that copies
    take from the computation.

    Args:
        blocks: in the order of the forward.
        link_bytes_per_second: between the device and where the bytes are kept.
        between_seconds: from the last block's forward to its backward: head, loss, and theirs.
        blocks_ahead: how many blocks early the bytes are asked for in backward.
    """
    timeline = _Timeline(link_bytes_per_second)
    timeline.forward(blocks)
    timeline.now += between_seconds
    timeline.backward(blocks, blocks_ahead)
    computed = sum(block.forward_seconds + block.backward_seconds for block in blocks)
    return Overlap(
        step_seconds=timeline.now,
        waited_seconds=timeline.now - computed - between_seconds,
        peak_in_flight_bytes=timeline.peak_in_flight_bytes,
    )


def is_hidden(num_bytes: int, compute_seconds: float, link_bytes_per_second: float) -> bool:
    """Say by the rule of thumb whether a copy costs no time: it ends before the computation does.

    Example:
        >>> is_hidden(50_000_000, compute_seconds=0.002, link_bytes_per_second=25e9)
        True
    """
    return num_bytes / link_bytes_per_second <= compute_seconds


class _Timeline:
    """The clock of the computation, and the end of the last copy that was asked for."""

    def __init__(self, link_bytes_per_second: float) -> None:
        self.now = 0.0
        self.peak_in_flight_bytes = 0
        self._link_bytes_per_second = link_bytes_per_second
        self._link_free_at = 0.0
        self._in_flight_bytes = 0

    def forward(self, blocks: Sequence[BlockWork]) -> None:
        """Compute each block while the one before it goes out."""
        leaving = 0
        for block in blocks:
            gone_at = self._ask(leaving)
            self.now = max(self.now + block.forward_seconds, gone_at)
            self._in_flight_bytes -= leaving
            leaving = block.out_bytes

    def backward(self, blocks: Sequence[BlockWork], blocks_ahead: int) -> None:
        """Compute each block, last one first, once its bytes are there."""
        last = len(blocks) - 1
        arrivals = {last: 0.0}
        for index in range(last, -1, -1):
            num_bytes = 0 if index == last else blocks[index].in_bytes
            has_come = arrivals.get(index, math.inf) <= self.now
            self._in_flight_bytes -= num_bytes if has_come else 0
            for wanted in range(index, max(index - blocks_ahead, 0) - 1, -1):
                if wanted not in arrivals:
                    arrivals[wanted] = self._ask(blocks[wanted].in_bytes)
            self._in_flight_bytes -= 0 if has_come else num_bytes
            self.now = max(self.now, arrivals[index]) + blocks[index].backward_seconds

    def _ask(self, num_bytes: int) -> float:
        """Ask for a copy now; give the time at which it ends, 0 where there is nothing to copy."""
        self._in_flight_bytes += num_bytes
        self.peak_in_flight_bytes = max(self.peak_in_flight_bytes, self._in_flight_bytes)
        if not num_bytes:
            return 0.0
        self._link_free_at = max(self._link_free_at, self.now)
        self._link_free_at += num_bytes / self._link_bytes_per_second
        return self._link_free_at
