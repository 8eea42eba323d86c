"""The chain of blocks in a recorded step, as data: what each block could keep, at what price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a block: store everything, or recompute all but some kept results."""

    recomputes: bool
    keep: tuple[str, ...]
    """Calls of operators whose results are kept, such as ``addmm.1``."""
    saved_bytes: int
    """What lives from the block's forward to its backward because of it; negative where it moves
    away what others left."""
    unneeded_bytes: int
    """The part of it that backward has no use for, only the recomputation."""
    seconds: float
    """What it adds to the step."""
    moved_bytes: int = 0
    """What is moved off the device of the block's inputs, unless no later block's are."""
    follows_recomputed: bool = False
    """Whether the block before has to be computed again, as it would keep the inputs otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBlock:
    """A block of the chain. Its first option stores everything.

    Totals are given less what blocks before it have saved, so that they hold whatever is chosen
    there.
    """

    name: str
    options: tuple[Option, ...]
    forward_bytes: int
    """Highest total in its forward."""
    backward_bytes: int
    """Highest total in its backward."""
    recompute_bytes: int
    """Highest total while it is computed again."""
    gap_bytes: int
    """Highest total, less its own savings as well, between it and the next block."""

    def peak_bytes(self, option: Option, saved_before_bytes: int) -> int:
        """Get the highest total while the block or what follows it runs, without later blocks."""
        inside = [self.forward_bytes, self.backward_bytes + option.unneeded_bytes]
        if option.recomputes:
            inside.append(self.recompute_bytes + option.unneeded_bytes)
        return saved_before_bytes + max(*inside, self.gap_bytes + option.saved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Blocks in the order of forward; what no block's choice changes stands beside them."""

    blocks: tuple[ChainBlock, ...]
    elsewhere_bytes: int
    """Highest total where no block has anything saved, such as in the optimizer's step."""

    def peak_bytes(self, options: Sequence[Option]) -> int:
        """Return the highest total of the step under one option for each block."""
        options = _with_last_inputs(options)
        saved = accumulate((option.saved_bytes for option in options), initial=0)
        inside = (
            block.peak_bytes(option, saved_before_bytes)
            for block, option, saved_before_bytes in zip(self.blocks, options, saved, strict=False)
        )
        return max([self.elsewhere_bytes, *inside])


def _with_last_inputs(options: Sequence[Option]) -> Sequence[Option]:
    """Leave the inputs on the device that would be moved last, as activation-offload does."""
    last = max((n for n, option in enumerate(options) if option.moved_bytes), default=None)
    if last is None:
        return options
    moved_bytes = options[last].moved_bytes
    stays = replace(
        options[last],
        saved_bytes=options[last].saved_bytes + moved_bytes,
        unneeded_bytes=options[last].unneeded_bytes - moved_bytes,
    )
    return [*options[:last], stays, *options[last + 1 :]]
