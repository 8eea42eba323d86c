"""Chooses an option for every block of a chain: the fastest assignment under a budget, exactly.

Blocks are taken in the order of forward. What counts for later blocks is only how many bytes the
blocks before them have saved, so of all choices with at most so many bytes the fastest is enough
(dynamic programming over the chain, as in Beaumont et al. 2019, https://arxiv.org/abs/1911.13214,
with options per block as in Zhao et al. 2023, https://arxiv.org/abs/2307.01236). Every peak on the
way is checked while choosing, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


_State = tuple[int, float, int, int]
"""Saved bytes, added seconds, the option's place, and the place of the choice before it."""


def fastest(chain: Chain, budget_bytes: int) -> Assignment | None:
    """Return the fastest assignment whose peak stays within a budget; None if there is none."""
    if chain.elsewhere_bytes > budget_bytes:
        return None
    stages: list[list[_State]] = [[(0, 0.0, 0, 0)]]
    for block in chain.blocks:
        stages.append(_undominated(_extended(stages[-1], block, budget_bytes)))
        if not stages[-1]:
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
        if assignment is not None and assignment.peak_bytes < found[-1].peak_bytes:
            found.append(assignment)
    if least.peak_bytes < found[-1].peak_bytes:
        found.append(least)
    return found


def _extended(states: list[_State], block: ChainBlock, budget_bytes: int) -> list[_State]:
    """Extend every choice by every option of a block that keeps within the budget."""
    found: list[_State] = []
    for place, option in enumerate(block.options):
        most_bytes = budget_bytes - block.peak_bytes(option, 0)
        saved_bytes, seconds = option.saved_bytes, option.seconds
        found += [
            (state[0] + saved_bytes, state[1] + seconds, place, before)
            for before, state in enumerate(states)
            if state[0] <= most_bytes
        ]
    return found


def _undominated(states: list[_State]) -> list[_State]:
    """Keep the fastest of all choices with at most so many bytes."""
    states.sort()
    found: list[_State] = []
    for state in states:
        if not found or state[1] < found[-1][1]:
            found.append(state)
    if len(found) <= _MOST_STATES:
        return found
    width_bytes = (found[-1][0] - found[0][0]) / _MOST_STATES
    thinned = {int((state[0] - found[0][0]) / width_bytes): state for state in found}
    return list(dict.fromkeys([found[0], *thinned.values()]))


def _assignment(chain: Chain, stages: list[list[_State]]) -> Assignment:
    """Follow the fastest choice back through the blocks."""
    options: list[Option] = []
    place = min(range(len(stages[-1])), key=lambda index: stages[-1][index][1::-1])
    for block, stage in zip(reversed(chain.blocks), reversed(stages), strict=False):
        _, _, option, place = stage[place]
        options.append(block.options[option])
    return _given(chain, tuple(reversed(options)))


def _given(chain: Chain, options: tuple[Option, ...]) -> Assignment:
    return Assignment(
        options=options,
        peak_bytes=chain.peak_bytes(options),
        seconds=sum(option.seconds for option in options),
    )
