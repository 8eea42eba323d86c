"""Chooses what to keep inside one block: the exact trade of kept bytes against recomputed seconds.

Recomputing runs every operator of the block whose result was not kept, so both bytes and seconds
are sums over operators: a 0-1 knapsack. Its whole frontier is found at once by merging operators
one after the other and dropping what is dominated, which is exact and needs no solver.

Source: Nemhauser and Ullmann 1969, "Discrete dynamic programming and capital allocation",
Management Science 15(9), for the frontier by dominance. Visvalingam and Whyatt 1993, "Line
generalisation by repeated elimination of points", The Cartographic Journal 30(1), for corners.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_POINTS = 512
"""Where more than this many trades remain, some are dropped that lie above the convex hull."""


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
    """Keep at most so many undominated trades: the corners of their convex hull, then even ones.

    A chain of many blocks alike reaches what lies between two corners by taking one in some blocks
    and the other in the rest. What lies above the hull it needs only for the last few bytes.

    Args:
        trades: fewest bytes first.
        num_points: two or more; the first and the last are always kept.
    """
    if len(trades) <= num_points:
        return list(trades)
    # The corners that bend least go, one by one (Visvalingam and Whyatt 1993).
    corners = list(_corners(trades))
    while len(corners) > num_points:
        bends = [_bend(*three) for three in zip(corners, corners[1:], corners[2:], strict=False)]
        del corners[1 + bends.index(min(bends))]
    at_corners = {trade.num_bytes for trade in corners}
    others = [trade for trade in trades if trade.num_bytes not in at_corners]
    kept = [*corners, *_even(others, num_points - len(corners))]
    return sorted(kept, key=lambda trade: trade.num_bytes)


def _corners(trades: Sequence[Trade]) -> list[Trade]:
    """Return the corners of the lower convex hull."""
    found: list[Trade] = []
    for trade in trades:
        while len(found) > 1 and _bend(found[-2], found[-1], trade) <= 0:
            found.pop()
        found.append(trade)
    return found


def _bend(before: Trade, trade: Trade, later: Trade) -> float:
    """Get twice the area of a triangle of trades, positive where the middle one lies below."""
    whole_bytes, whole_seconds = later.num_bytes - before.num_bytes, later.seconds - before.seconds
    to_bytes, to_seconds = trade.num_bytes - before.num_bytes, trade.seconds - before.seconds
    return whole_seconds * to_bytes - whole_bytes * to_seconds


def _even(trades: Sequence[Trade], num_points: int) -> list[Trade]:
    """Return so many trades at about equal distances in bytes."""
    found: list[Trade] = []
    if not trades or not num_points:
        return found
    low_bytes, high_bytes = trades[0].num_bytes, trades[-1].num_bytes
    for trade in trades:
        wanted = low_bytes + (high_bytes - low_bytes) * len(found) / num_points
        if trade.num_bytes >= wanted and len(found) < num_points:
            found.append(trade)
    return found


def _keeping(trade: Trade, item: Item) -> Trade:
    assert item.num_bytes is not None, "only what can be kept is kept"
    return Trade(
        trade.num_bytes + item.num_bytes,
        trade.seconds,
        trade.unneeded_bytes + item.unneeded_bytes,
        (*trade.keep, item.name),
    )
