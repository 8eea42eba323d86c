"""Turns moved bytes into seconds: copies on a link run beside the computation, block by block.

The rules are those of activation offload. The bytes of a block go out while the next block's
forward runs, and the block after that waits until they have gone. In backward, the bytes of a block
are asked for when the block after it begins, and the block waits until they are there. The last
block's bytes stay, as backward needs them first. One copy runs at a time, in the order of asking.
"""

from __future__ import annotations

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


def added_seconds(blocks: Sequence[BlockWork], link_bytes_per_second: float) -> float:
    """Say for how long a forward and backward over blocks, in order, stand still for the copies.

    Does not account for the time that starting a copy takes, nor for memory traffic that copies
    take from the computation.
    """
    timeline = _Timeline(link_bytes_per_second)
    timeline.forward(blocks)
    timeline.backward(blocks)
    return timeline.now - sum(block.forward_seconds + block.backward_seconds for block in blocks)


class _Timeline:
    """The clock of the computation, and the end of the last copy that was asked for."""

    def __init__(self, link_bytes_per_second: float) -> None:
        self.now = 0.0
        self._link_bytes_per_second = link_bytes_per_second
        self._link_free_at = 0.0

    def forward(self, blocks: Sequence[BlockWork]) -> None:
        """Compute each block while the one before it goes out."""
        leaving_bytes = 0
        for block in blocks:
            gone_at = self._ask(leaving_bytes)
            self.now = max(self.now + block.forward_seconds, gone_at)
            leaving_bytes = block.out_bytes

    def backward(self, blocks: Sequence[BlockWork]) -> None:
        """Compute each block, last one first, once its bytes are there."""
        arrival = 0.0
        for index in reversed(range(len(blocks))):
            next_arrival = self._ask(blocks[index - 1].in_bytes) if index else 0.0
            self.now = max(self.now, arrival) + blocks[index].backward_seconds
            arrival = next_arrival

    def _ask(self, num_bytes: int) -> float:
        """Ask for a copy now; return the time at which it ends, 0 where nothing is copied."""
        if not num_bytes:
            return 0.0
        self._link_free_at = max(self._link_free_at, self.now)
        self._link_free_at += num_bytes / self._link_bytes_per_second
        return self._link_free_at
