"""Chooses what to keep inside one block: the exact trade of kept bytes against recomputed seconds.

Recomputing runs every operator of the block whose result was not kept, so both bytes and seconds
are sums over operators: a 0-1 knapsack. Its whole frontier is found at once by merging operators
one after the other and dropping what is dominated, which is exact and needs no solver.

Source: Nemhauser and Ullmann 1969, "Discrete dynamic programming and capital allocation",
Management Science 15(9), for the frontier by dominance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_POINTS = 512
"""Where more than this many trades remain, evenly spaced ones are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One operator that recomputation would run."""

    name: str
    """The call, such as ``addmm.1``."""
    num_bytes: int | None
    """What keeping its results takes; None where they cannot be kept."""
    unneeded_bytes: int
    """The part of it that backward has no use for."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Trade:
    """A set of kept results."""

    num_bytes: int = 0
    seconds: float = 0.0
    unneeded_bytes: int = 0
    keep: tuple[str, ...] = ()


def frontier(items: Iterable[Item]) -> list[Trade]:
    """Return every undominated trade, fewest bytes first."""
    trades = [Trade()]
    for item in items:
        again = [
            Trade(t.num_bytes, t.seconds + item.seconds, t.unneeded_bytes, t.keep) for t in trades
        ]
        kept = [] if item.num_bytes is None else [_keeping(trade, item) for trade in trades]
        trades = spread(undominated([*again, *kept]), _MOST_POINTS)
    return trades


def undominated(trades: Iterable[Trade]) -> list[Trade]:
    """Drop every trade that another one beats in bytes and in seconds."""
    found: list[Trade] = []
    for trade in sorted(trades, key=lambda t: (t.num_bytes, t.seconds, t.unneeded_bytes, t.keep)):
        if not found or trade.seconds < found[-1].seconds:
            found.append(trade)
    return found


def spread(trades: Sequence[Trade], num_points: int) -> list[Trade]:
    """Keep at most so many trades, evenly spaced in bytes, with the first and the last."""
    if len(trades) <= num_points:
        return list(trades)
    low, high = trades[0].num_bytes, trades[-1].num_bytes
    found = [trades[0]]
    for trade in trades[1:-1]:
        wanted = low + (high - low) * len(found) / (num_points - 1)
        if trade.num_bytes >= wanted and len(found) < num_points - 1:
            found.append(trade)
    return [*found, trades[-1]]


def _keeping(trade: Trade, item: Item) -> Trade:
    assert item.num_bytes is not None, "only what can be kept is kept"
    return Trade(
        trade.num_bytes + item.num_bytes,
        trade.seconds,
        trade.unneeded_bytes + item.unneeded_bytes,
        (*trade.keep, item.name),
    )
