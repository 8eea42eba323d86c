"""Turns what could be done to the blocks of a recorded step into combinations to record."""

from __future__ import annotations

from dataclasses import replace

from memfit.planner.recompute.assignment import Assignment, frontier, store_all
from memfit.planner.recompute.chain import Chain
from memfit.planner.search.candidates import Candidate, Refinement, Strategies
from memfit.session.block_names import shorten_names
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.base import Strategy
from memfit.strategies.plan import in_catalogue_order

_NEAR_BUDGET = (1.01, 1.0, 0.995, 0.98, 0.95)
"""Peaks for which blocks are chosen exactly, as shares of what the budget leaves."""


def refined(candidate: Candidate) -> Candidate:
    """Turn the assignments of a candidate's chain, as far as they help, into combinations."""
    chain, prediction = candidate.chain, candidate.prediction
    assert chain is not None, "asked of what has blocks only"
    beside_bytes = prediction.bounded_bytes() - store_all(chain).peak_bytes
    budget_bytes = (prediction.budget_bytes or 0) - beside_bytes
    near = (int(budget_bytes * share) for share in _NEAR_BUDGET)
    _, *smaller = frontier(chain, budgets_bytes=near, known=candidate.known)
    refinements = tuple(
        Refinement(
            strategies=in_catalogue_order((*candidate.strategies, *_written(chain, assignment))),
            peak_bytes=assignment.peak_bytes + beside_bytes,
            seconds=prediction.step_seconds + assignment.seconds * candidate.repeats,
        )
        for assignment in smaller
    )
    return replace(candidate, refinements=refinements)


def _written(chain: Chain, assignment: Assignment) -> list[Strategy]:
    """Write an assignment as strategies: one for all blocks that keep the same results."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for block, option in zip(chain.blocks, assignment.options, strict=True):
        if option.recomputes:
            groups.setdefault(option.keep, []).append(block.name)
    found: list[Strategy] = [
        ActivationCheckpointing(blocks=shorten_names(names), keep=keep)
        for keep, names in groups.items()
    ]
    pairs = zip(chain.blocks, assignment.options, strict=True)
    offloaded = [block.name for block, option in pairs if option.moved_bytes]
    if offloaded:
        found.append(ActivationOffload(blocks=shorten_names(offloaded)))
    return found


def without_recomputation(strategies: Strategies) -> Strategies:
    """Return the combination whose blocks a combination recomputes."""
    name = ActivationCheckpointing.name
    return tuple(strategy for strategy in strategies if strategy.name != name)
