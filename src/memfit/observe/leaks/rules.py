"""Decides which growth is a leak.

Two kinds of series are judged. In steps of one stream, growth has to go on evenly over many steps,
and, where passes over the data are known, over the first pass and into a later one, since caches
fill and epoch-wide lists grow within a pass. After passes of one stream, what a pass adds has to be
added again by the next. An autograph graph or hooks that grow over equal steps need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from .bounds import is_within_bound
from .histories import Point, Series, Track
from .limits import LeakLimits
from .nodes import CONTAINERS, LEAVES, Node

HOOK_LINKS = ("_hooks", "_hooks_with_kwargs", "_pre_hooks", "_always_called", "_post_hooks")
_EVEN_FRACTION = 0.5
"""Of the mean rate, which the last intervals have to reach."""
_CACHE_EVEN_FRACTION = 0.8
"""The same for what may be a cache, which fills ever more slowly."""
_LEAST_INTERVALS = 3
_LEAST_BURSTS = 4
"""That were seen; there are more where looks are rare."""
_BURSTS_FROM_LINE_FRACTION = 0.2
"""Of all growth: how far a staircase of so many steps may be from a straight line."""
_PASSES_OF_A_CACHE = 2
_PASSES_OF_A_HISTORY = 5
Quantity = Callable[[Point], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a holder has grown."""

    node: Node
    kind: str
    num_bytes: int
    num_boundaries: int
    """Of all streams, or of its own where it was judged in steps."""
    num_passes: int = 0
    """Over which it was seen; 0 where it was judged in steps."""
    num_added: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is known besides the looks."""

    limits: LeakLimits
    memory_bytes: Mapping[str, int]
    """The memory of each place."""
    knows_passes: bool
    """Passes over the data were seen, or a loader that makes them."""
    knows_optimizer_steps: bool
    is_optimizer_stream: bool = False
    stream: str = ""
    bounds: tuple[int, ...] = ()
    """What the program's variables state as the most entries of something."""
    asks_for_passes: bool = False
    """Whether a pass is over is not known, and may be asked of the loaders."""


def is_container(node: Node) -> bool:
    """Return whether a node can be what grows, and not only hold it."""
    if node.kind not in CONTAINERS and node.kind not in LEAVES:
        return False
    if any(each.is_bounded or each.is_ambiguous for each in node.lineage()):
        return False
    # A guard keeps the batches of its last steps. A model or a function of the program that a
    # ``Run`` leads to is the program's.
    keeper = node.keeper()
    return not (keeper is not None and keeper.is_memfits)


def growth_in_steps(node: Node, track: Track, known: Surroundings) -> Growth | None:
    """Judge a holder by looks at the same place of steps of one stream."""
    points = track.points
    first, last = points[0], points[-1]
    num_steps = last.at.count - first.at.count
    if len(points) <= _LEAST_INTERVALS or num_steps <= 0 or not is_container(node):
        return None
    total = grown_bytes(track)
    kind = _growing_kind(node, track, num_steps, known)
    if kind is None:
        if not _matters(total, total / num_steps, node, known):
            return None
        if not _goes_on(track, node, total, known) or _is_within_bound(node, known):
            return None
    return Growth(
        node=node,
        kind=kind or "",
        num_bytes=total,
        num_boundaries=num_steps,
        num_added=last.count - first.count,
    )


def growth_over_passes(node: Node, track: Track, known: Surroundings) -> Growth | None:
    """Judge a holder by looks taken after the passes of one stream."""
    if not is_container(node) or len(track.points) < 2:
        return None
    points = track.points
    first, last = points[0], points[-1]
    before = points[-2]
    added, added_bytes = last.count - before.count, last.num_bytes - before.num_bytes
    held = before.count if added else before.num_bytes
    again = added if added else added_bytes
    if again <= 0 or held < _EVEN_FRACTION * again:
        return None  # the pass before has not left as much
    num_passes = len(points)
    needed = _needed_passes(node, track, added)
    even = _CACHE_EVEN_FRACTION if _is_cache_like(node, track) else _EVEN_FRACTION
    if _is_within_bound(node, known):
        return None
    if num_passes < needed or not _is_even(points, _quantity(track), needed - 1, even):
        return None
    per_step = added_bytes / max(1, last.at.num_boundaries - before.at.num_boundaries)
    is_metric = node.owner("module") is not None and node.has_tensors
    least = known.limits.least_metric_bytes
    if not (is_metric and added_bytes >= least) and not _matters(
        last.num_bytes - (first.num_bytes if first.num_bytes > 2 * added_bytes else 0),
        per_step,
        node,
        known,
    ):
        return None
    return Growth(
        node=node,
        kind="metric-state" if is_metric else "",
        num_bytes=last.num_bytes - first.num_bytes + min(first.num_bytes, added_bytes),
        num_boundaries=max(1, last.at.num_boundaries - first.at.num_boundaries),
        num_passes=num_passes,
        num_added=added,
    )


def _is_within_bound(node: Node, known: Surroundings) -> bool:
    return is_within_bound(node, known.bounds, known.memory_bytes.get(node.place, 0))


def _needed_passes(node: Node, track: Track, added: int) -> int:
    """Say after how many passes it is clear that a holder is never emptied."""
    length = track.points[-1].at.pass_length
    if _is_cache_like(node, track):
        return _PASSES_OF_A_CACHE + 1
    if added:
        grows_with_steps = added >= max(2, _EVEN_FRACTION * length)
        return 2 if grows_with_steps else _PASSES_OF_A_HISTORY + 1
    is_state = node.kind in LEAVES and node.owner("module") is not None
    return 2 if is_state else _PASSES_OF_A_CACHE + 1


def grown_bytes(track: Track) -> int:
    """Get the bytes that a track has grown by; what hangs below counts if there is more of it."""
    first, last = track.points[0], track.points[-1]
    if last.count > first.count:
        return last.num_bytes - first.num_bytes
    return last.own_bytes - first.own_bytes


def _quantity(track: Track) -> Quantity:
    first, last = track.points[0], track.points[-1]
    if last.count > first.count:
        return lambda point: point.count
    return lambda point: point.own_bytes


def _is_cache_like(node: Node, track: Track) -> bool:
    """Test whether a holder may be a cache: keys in no order, filled slots, parts of a dataset."""
    if not node.is_ordered or node.owner("dataset") is not None:
        return True
    return node.kind in CONTAINERS and track.points[-1].count == track.points[0].count


def _is_even(
    points: list[Point],
    quantity: Quantity,
    num_intervals: int,
    even_fraction: float = _EVEN_FRACTION,
) -> bool:
    """Return whether each of the last intervals, and the second half, grew as the whole did."""
    pairs = list(pairwise(points))[-num_intervals:]
    rates = [
        (quantity(after) - quantity(before)) / max(1, after.at.count - before.at.count)
        for before, after in pairs
    ]
    mean = sum(rates) / max(1, len(rates))
    return mean > 0 and all(rate >= even_fraction * mean for rate in rates)


def _grows_in_bursts(points: list[Point], quantity: Quantity, limits: LeakLimits) -> bool:
    """Return whether a quantity climbs like an even staircase: now and then, and again and again.

    What each validation or each restart adds is seen so where nobody tells of passes.
    """
    first, last = points[0], points[-1]
    num_steps, total = last.at.count - first.at.count, quantity(last) - quantity(first)
    added = [quantity(after) - quantity(before) for before, after in pairwise(points)]
    num_bursts = sum(each > 0 for each in added)
    # What grows between all looks is no staircase: a cache that fills ever more slowly, perhaps.
    if num_steps < limits.burst_steps or num_bursts < _LEAST_BURSTS or num_bursts == len(added):
        return False
    return all(
        abs(
            (quantity(each) - quantity(first)) / total
            - (each.at.count - first.at.count) / num_steps
        )
        <= _BURSTS_FROM_LINE_FRACTION
        for each in points
    )


def _matters(total: float, rate: float, node: Node, known: Surroundings) -> bool:
    limits = known.limits
    if rate >= limits.least_bytes_per_step and total >= limits.least_rate_total_bytes:
        return True
    memory = known.memory_bytes.get(node.place, 0)
    projected = rate * limits.horizon_steps
    return total >= limits.least_total_bytes and projected >= limits.horizon_fraction * memory


def _growing_kind(node: Node, track: Track, num_steps: int, known: Surroundings) -> str | None:
    """Name what is a fault at any size, and in the first pass as well."""
    limits = known.limits
    points = track.points
    if num_steps < limits.graph_steps:
        return None
    if _is_even(points, lambda point: point.num_graph_nodes, _LEAST_INTERVALS):
        grown = points[-1].num_bytes - points[0].num_bytes
        optimizer_steps = points[-1].at.num_optimizer_steps - points[0].at.num_optimizer_steps
        is_long = num_steps >= limits.lone_graph_steps
        is_apart = known.is_optimizer_stream or (
            known.knows_optimizer_steps and (optimizer_steps >= 3 or optimizer_steps == 0)
        )
        if grown >= limits.least_graph_bytes and (is_long or is_apart):
            return "autograd-graph"
    added = points[-1].count - points[0].count
    if added < 0.25 * num_steps or not _is_even(
        points, lambda point: point.count, _LEAST_INTERVALS
    ):
        return None
    link = str(node.link)
    if node.style == "attribute" and link.endswith(HOOK_LINKS):
        return "hooks"
    if link == "param_groups" and node.style == "attribute":
        return "optimizer-groups"
    parent = node.parent
    if link == "_parameters" and parent is not None and parent.kind == "module":
        return "parameters"
    return None


def _goes_on(track: Track, node: Node, total: float, known: Surroundings) -> bool:
    """Return whether growth went on for long enough to be no cache and no list of one epoch."""
    points, quantity = track.points, _quantity(track)
    first, last = points[0], points[-1]
    is_cache = _is_cache_like(node, track)
    even = _CACHE_EVEN_FRACTION if is_cache else _EVEN_FRACTION
    if not _is_even(points, quantity, max(_LEAST_INTERVALS, len(points) // 2), even) and (
        is_cache or not _grows_in_bursts(points, quantity, known.limits)
    ):
        return False
    if last.count == first.count and _grows_with_batches(points):
        return False
    if last.count <= 2 * track.most_before_reset and track.most_before_reset:
        return False  # it was emptied before, and has not yet outgrown that
    memory = known.memory_bytes.get(node.place, 0)
    if memory and total >= known.limits.urgent_fraction * memory:
        return True
    num_steps = last.at.count - first.at.count
    if known.knows_passes:
        return points[-2].at.pass_number > first.at.pass_number
    return num_steps >= (known.limits.cache_steps if is_cache else known.limits.list_steps)


def _grows_with_batches(points: list[Point]) -> bool:
    """Return whether the batches became longer all the while, as in a curriculum."""
    first, last = points[0].at.batch_bytes, points[-1].at.batch_bytes
    return first is not None and last is not None and last > 1.05 * first


def without_holders_of_others(found: list[Growth], series: Series) -> list[Growth]:
    """Leave out what grows only because something below it does."""
    by_node = {id(growth.node): growth for growth in found}
    explained: dict[int, float] = {}
    for growth in found:
        track = series.tracks[growth.node.key]
        for holder in growth.node.lineage()[:-1]:
            if id(holder) in by_node and track.points[0].num_bytes > 0:
                key = id(holder)
                explained[key] = explained.get(key, 0.0) + growth.num_bytes
    return [
        growth
        for growth in found
        if explained.get(id(growth.node), 0.0) < _EVEN_FRACTION * growth.num_bytes
    ]
