"""Chooses an option for every block of a chain: the fastest assignment under a budget, exactly.

Blocks are taken in the order of forward. What counts for later blocks is only how many bytes the
blocks before them have saved, so of all choices with at most so many bytes the fastest is enough
(dynamic programming over the chain, as in Beaumont et al. 2019, https://arxiv.org/abs/1911.13214,
with options per block as in Zhao et al. 2023, https://arxiv.org/abs/2307.01236). Every peak on the
way is checked while choosing, in forward and in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planner.chain import Block, Chain, Option

_NUM_LEVELS = 32
_NUM_STEPS = 4096
"""Saved bytes are told apart to one part in this many of the budget, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One option for each block, with what the step takes under them."""

    options: tuple[Option, ...]
    peak_bytes: int
    seconds: float
    """What the options add to the step."""


@dataclass(slots=True)
class _State:
    """A choice for the blocks so far."""

    saved_bytes: int
    seconds: float
    option: Option | None
    before: _State | None


def fastest(chain: Chain, budget_bytes: int) -> Assignment | None:
    """Give the fastest assignment whose peak stays within a budget; None if there is none."""
    if chain.elsewhere_bytes > budget_bytes:
        return None
    states = [_State(0, 0.0, None, None)]
    for block in chain.blocks:
        states = _undominated(_extended(states, block, budget_bytes), budget_bytes)
        if not states:
            return None
    return _assignment(chain, min(states, key=lambda state: (state.seconds, state.saved_bytes)))


def smallest(chain: Chain) -> Assignment:
    """Give the assignment with the smallest peak, and among those the fastest found.

    Found by halving the budget's interval, so it is exact to one part in a thousand.
    """
    high = _given(chain, tuple(block.options[0] for block in chain.blocks))
    low_bytes = chain.elsewhere_bytes - 1
    while high.peak_bytes - low_bytes > max(1, high.peak_bytes // 1000):
        middle_bytes = (low_bytes + high.peak_bytes) // 2
        found = fastest(chain, middle_bytes)
        if found is None:
            low_bytes = middle_bytes
        else:
            high = found
    return high


def frontier(chain: Chain, num_levels: int = _NUM_LEVELS) -> list[Assignment]:
    """Give the fastest assignments for evenly spaced budgets, from storing all to the smallest."""
    store = _given(chain, tuple(block.options[0] for block in chain.blocks))
    least = smallest(chain)
    span_bytes = store.peak_bytes - least.peak_bytes
    found = [store]
    for level in range(1, num_levels):
        budget_bytes = store.peak_bytes - span_bytes * level // num_levels
        assignment = fastest(chain, budget_bytes)
        if assignment is not None and assignment.peak_bytes < found[-1].peak_bytes:
            found.append(assignment)
    if least.peak_bytes < found[-1].peak_bytes:
        found.append(least)
    return found


def _extended(states: list[_State], block: Block, budget_bytes: int) -> list[_State]:
    """Extend every choice by every option of a block that keeps within the budget."""
    return [
        _State(
            state.saved_bytes + option.saved_bytes, state.seconds + option.seconds, option, state
        )
        for state in states
        for option in block.options
        if block.peak_bytes(option, state.saved_bytes) <= budget_bytes
    ]


def _undominated(states: list[_State], budget_bytes: int) -> list[_State]:
    """Keep the fastest of all choices with at most so many bytes."""
    step_bytes = max(1, budget_bytes // _NUM_STEPS)
    found: list[_State] = []
    for state in sorted(states, key=lambda s: (-(-s.saved_bytes // step_bytes), s.seconds)):
        if not found or state.seconds < found[-1].seconds:
            found.append(state)
    return found


def _assignment(chain: Chain, last: _State) -> Assignment:
    options: list[Option] = []
    state: _State | None = last
    while state is not None and state.option is not None:
        options.append(state.option)
        state = state.before
    return _given(chain, tuple(reversed(options)))


def _given(chain: Chain, options: tuple[Option, ...]) -> Assignment:
    return Assignment(
        options=options,
        peak_bytes=chain.peak_bytes(options),
        seconds=sum(option.seconds for option in options),
    )
