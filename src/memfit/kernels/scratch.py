"""What a device's kernels take besides what they return, and which tensors lie on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch._ops import OpOverload

from memfit.figures import Certainty


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Memory that one operator takes and gives back inside.

    ``blocks`` are its separate requests in bytes, at their most likely sizes; the sum lies between
    ``low_bytes`` and ``high_bytes``.
    """

    blocks: tuple[int, ...]
    low_bytes: int
    high_bytes: int
    certainty: Certainty
    source: str
    is_staging: bool = False
    """Whether a collective copies in it what it sends or receives."""

    @classmethod
    def exact(cls, source: str, blocks: Iterable[int] = ()) -> Self:
        """Make a figure that follows from the kernel's source alone."""
        return cls.between(source, blocks, certainty=Certainty.EXACT)

    @classmethod
    def between(
        cls,
        source: str,
        blocks: Iterable[int],
        *,
        low_bytes: int | None = None,
        high_bytes: int | None = None,
        certainty: Certainty = Certainty.TABLE,
    ) -> Self:
        """Make a figure with an interval, which is widened where it would leave the figure out."""
        blocks = tuple(block for block in blocks if block > 0)
        total = sum(blocks)
        return cls(
            blocks=blocks,
            low_bytes=total if low_bytes is None else min(low_bytes, total),
            high_bytes=total if high_bytes is None else max(high_bytes, total),
            certainty=certainty,
            source=source,
        )

    @property
    def num_bytes(self) -> int:
        """Add up the blocks."""
        return sum(self.blocks)

    def __add__(self, other: Scratch) -> Scratch:
        """Add up what one operator takes for two reasons."""
        return Scratch(
            blocks=self.blocks + other.blocks,
            low_bytes=self.low_bytes + other.low_bytes,
            high_bytes=self.high_bytes + other.high_bytes,
            certainty=other.certainty,
            source=f"{self.source}; {other.source}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is alive inside an operator at one time.

    ``missing_output_bytes`` are outputs that the kernel has not asked for yet: they are counted
    with the operator from its start, so they leave room at this time.
    """

    blocks: tuple[int, ...]
    missing_output_bytes: int = 0

    def extra_blocks(self) -> tuple[int, ...]:
        """Return the requests on top of all outputs; those that fit in the room are left out."""
        room = self.missing_output_bytes
        extra = []
        for block in sorted(self.blocks):
            taken = min(room, block)
            room -= taken
            if block > taken:
                extra.append(block - taken)
        return tuple(extra)


def highest(moments: Iterable[Moment]) -> tuple[int, ...]:
    """Return the requests of the moment that needs most on top of the outputs."""
    return max((moment.extra_blocks() for moment in moments), key=sum, default=())


class HiddenMemory(Protocol):
    """Tell what dispatch does not show."""

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on the device."""

    def around(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[Sequence[int], Scratch | None]:
        """Return the workspaces that an operator makes for good, in bytes, and its scratch."""
