"""Chooses an option for every block of a chain: the fastest assignment under a budget, exactly.

Blocks are taken in the order of forward. What counts for later blocks is only how many bytes the
blocks before them have saved, so of all choices with at most so many bytes the fastest is enough
(dynamic programming over the chain, as in Beaumont et al. 2019, https://arxiv.org/abs/1911.13214,
with options per block as in Zhao et al. 2023, https://arxiv.org/abs/2307.01236). Every peak on the
way is checked while choosing, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.planner.recompute.chain import Chain, ChainBlock, Option

_NUM_BUDGETS = 12
_MOST_STATES = 512
"""Beyond so many choices, those with about the same saved bytes are thinned out to the fastest."""
_CLOSE_ENOUGH = 1 / 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One option for each block, with what the step takes under them."""

    options: tuple[Option, ...]
    peak_bytes: int
    seconds: float
    """What the options add to the step."""


_Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The choices up to a block, those that save least first."""

    saved_bytes: _Values
    seconds: _Values
    options: _Values
    """The place of the block's option."""
    before: _Values
    """The place of the choice before it."""

    def at(self, places: _Values) -> _Stage:
        """Return some of the choices."""
        return _Stage(
            saved_bytes=self.saved_bytes[places],
            seconds=self.seconds[places],
            options=self.options[places],
            before=self.before[places],
        )


def fastest(chain: Chain, budget_bytes: int) -> Assignment | None:
    """Return the fastest assignment whose peak stays within a budget; None if none is found.

    It is the fastest of all where no block can move its inputs away. Where some can, all of them
    count as moved while options are chosen, though the last ones stay. If that turns out too much,
    it is the faster of the fastest with so much to spare and the fastest with nothing moved.
    """
    found = _fastest(chain, budget_bytes)
    if found is None or found.peak_bytes <= budget_bytes:
        return found
    over_bytes = found.peak_bytes - budget_bytes
    others = (_fastest(chain, budget_bytes - over_bytes), _fastest(_unmoved(chain), budget_bytes))
    fitting = [each for each in others if each is not None and each.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda each: (each.seconds, each.peak_bytes), default=None)


def _unmoved(chain: Chain) -> Chain:
    """Leave out the options that move inputs away."""
    blocks = (
        replace(block, options=tuple(o for o in block.options if not o.moved_bytes))
        for block in chain.blocks
    )
    return replace(chain, blocks=tuple(blocks))


def _fastest(chain: Chain, budget_bytes: int) -> Assignment | None:
    if chain.elsewhere_bytes > budget_bytes:
        return None
    none = np.zeros(1, np.int64)
    stages = [_Stage(saved_bytes=none, seconds=np.zeros(1), options=none, before=none)]
    blocks: list[ChainBlock | None] = [None, *chain.blocks, None]
    for before, block, later in zip(blocks, chain.blocks, blocks[2:], strict=False):
        extended = _extended(stages[-1], before, block, budget_bytes)
        stages.append(_undominated(extended, block, later))
        if not stages[-1].seconds.size:
            return None
    return _assignment(chain, stages)


Known = dict[int, Assignment | None]
"""The fastest assignments of a chain that were found already, by their budgets."""


def _fastest_once(chain: Chain, budget_bytes: int, known: Known) -> Assignment | None:
    if budget_bytes not in known:
        known[budget_bytes] = fastest(chain, budget_bytes)
    return known[budget_bytes]


def smallest(chain: Chain, known: Known | None = None) -> Assignment:
    """Return the assignment with the smallest peak, and among those the fastest found.

    Found by halving the budget's interval, so it is exact to one part in five hundred.

    Args:
        chain: the blocks.
        known: what was found of this chain before; what is found now is added.
    """
    known = {} if known is None else known
    high = store_all(chain)
    low_bytes = chain.elsewhere_bytes - 1
    while high.peak_bytes - low_bytes > max(1, int(high.peak_bytes * _CLOSE_ENOUGH)):
        middle_bytes = (low_bytes + high.peak_bytes) // 2
        found = _fastest_once(chain, middle_bytes, known)
        if found is None:
            low_bytes = middle_bytes
        else:
            high = found
    return high


def store_all(chain: Chain) -> Assignment:
    """Return the assignment that recomputes nothing."""
    return _given(chain, tuple(block.options[0] for block in chain.blocks))


def frontier(
    chain: Chain,
    num_budgets: int = _NUM_BUDGETS,
    budgets_bytes: Iterable[int] = (),
    known: Known | None = None,
) -> list[Assignment]:
    """Return the fastest assignments for some budgets, from storing all to the smallest.

    Args:
        chain: the blocks.
        num_budgets: evenly spaced budgets between the two.
        budgets_bytes: further budgets, of which those in between count.
        known: what was found of this chain before; what is found now is added.
    """
    known = {} if known is None else known
    store, least = store_all(chain), smallest(chain, known)
    span_bytes = store.peak_bytes - least.peak_bytes
    budgets = {
        store.peak_bytes - span_bytes * part // num_budgets for part in range(1, num_budgets)
    }
    budgets |= {b for b in budgets_bytes if least.peak_bytes < b < store.peak_bytes}
    found = [store]
    for budget_bytes in sorted(budgets, reverse=True):
        assignment = _fastest_once(chain, budget_bytes, known)
        if assignment is not None:
            _add(found, assignment)
    _add(found, least)
    return found


def _add(found: list[Assignment], smaller: Assignment) -> None:
    """Add an assignment that is smaller than the others, and drop those that are slower as well."""
    if smaller.peak_bytes < found[-1].peak_bytes:
        while len(found) > 1 and found[-1].seconds >= smaller.seconds:
            found.pop()
        found.append(smaller)


def _extended(
    choices: _Stage, before: ChainBlock | None, block: ChainBlock, budget_bytes: int
) -> _Stage:
    """Extend every choice by every option of a block that keeps within the budget."""
    least_bytes = np.array([[block.peak_bytes(option, 0)] for option in block.options])
    saved_bytes = np.array([[option.saved_bytes] for option in block.options])
    seconds = np.array([[option.seconds] for option in block.options])
    may_follow = choices.saved_bytes + least_bytes <= budget_bytes
    if _depends_on_last(block):
        needs = np.array([[option.follows_recomputed] for option in block.options])
        may_follow &= ~needs | _recomputes(choices, before)
    options, places = np.nonzero(may_follow)
    return _Stage(
        saved_bytes=(choices.saved_bytes + saved_bytes)[options, places],
        seconds=(choices.seconds + seconds)[options, places],
        options=options,
        before=places,
    )


def _depends_on_last(block: ChainBlock | None) -> bool:
    """Return whether some option of a block is open only after one that is computed again."""
    return block is not None and any(option.follows_recomputed for option in block.options)


def _recomputes(choices: _Stage, block: ChainBlock | None) -> _Values:
    """Return which choices compute the block again that they end with."""
    if block is None:
        return np.zeros(choices.seconds.size, bool)
    return np.array([option.recomputes for option in block.options])[choices.options]


def _undominated(choices: _Stage, block: ChainBlock, later: ChainBlock | None) -> _Stage:
    """Keep the best choices, apart from each other where the next block tells them apart."""
    if not _depends_on_last(later):
        return _best(choices)
    again = _recomputes(choices, block)
    stages = [_best(choices.at(np.flatnonzero(which))) for which in (again, ~again)]
    found = _Stage(
        saved_bytes=np.concatenate([each.saved_bytes for each in stages]),
        seconds=np.concatenate([each.seconds for each in stages]),
        options=np.concatenate([each.options for each in stages]),
        before=np.concatenate([each.before for each in stages]),
    )
    return found.at(np.argsort(found.saved_bytes, kind="stable"))


def _best(choices: _Stage) -> _Stage:
    """Keep the fastest of all choices with at most so many bytes, and thin out what is close."""
    if not choices.seconds.size:
        return choices
    found = choices.at(np.lexsort((choices.seconds, choices.saved_bytes)))
    fastest_before = np.minimum.accumulate(found.seconds)[:-1]
    found = found.at(np.flatnonzero(np.append(True, found.seconds[1:] < fastest_before)))
    if found.seconds.size <= _MOST_STATES:
        return found
    more_bytes = found.saved_bytes - found.saved_bytes[0]
    near = (more_bytes / (more_bytes[-1] / _MOST_STATES)).astype(np.int64)
    is_last = np.append(near[1:] != near[:-1], True)
    is_last[0] = True
    return found.at(np.flatnonzero(is_last))


def _assignment(chain: Chain, stages: list[_Stage]) -> Assignment:
    """Follow the fastest choice back through the blocks."""
    options: list[Option] = []
    place = np.lexsort((stages[-1].saved_bytes, stages[-1].seconds))[0]
    for block, stage in zip(reversed(chain.blocks), reversed(stages), strict=False):
        options.append(block.options[stage.options[place]])
        place = stage.before[place]
    return _given(chain, tuple(reversed(options)))


def _given(chain: Chain, options: tuple[Option, ...]) -> Assignment:
    return Assignment(
        options=options,
        peak_bytes=chain.peak_bytes(options),
        seconds=sum(option.seconds for option in options),
    )
