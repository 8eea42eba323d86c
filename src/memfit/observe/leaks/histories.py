"""Keeps how the size of each holder went from look to look, where it grew."""

from __future__ import annotations

from dataclasses import dataclass, field

from .nodes import Node
from .walk import Look

_MOST_TRACKS = 4000
_MOST_POINTS = 48
_NOISE_BYTES = 64
_NEW_STYLES = {"variable", "attribute", "closure", "class"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a look was taken."""

    count: int
    """Steps of the series: boundaries of its stream, or passes."""
    num_boundaries: int
    """Of all streams."""
    pass_number: int
    pass_length: int = 0
    num_optimizer_steps: int = 0
    batch_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """The size of a holder at one moment."""

    at: Moment
    count: int
    num_bytes: int
    own_bytes: int
    num_graph_nodes: float

    @classmethod
    def of(cls, at: Moment, node: Node) -> Point:
        """Read a node."""
        return cls(at, node.count, node.num_bytes, node.own_bytes, node.num_graph_nodes)

    def exceeds(self, other: Point) -> bool:
        """Return whether anything has grown since."""
        return (
            self.count > other.count
            or self.num_bytes > other.num_bytes + _NOISE_BYTES
            or self.num_graph_nodes > other.num_graph_nodes
        )

    def is_less(self, other: Point) -> bool:
        """Return whether the holder was emptied, even in part."""
        if self.count != other.count:
            return self.count < other.count
        return self.num_bytes < 0.98 * other.num_bytes


@dataclass(slots=True)
class Track:
    """The points of one holder since it was last emptied."""

    points: list[Point]
    most_before_reset: int = 0
    """The largest count before it was emptied."""

    def add(self, point: Point) -> None:
        """Add a point."""
        if point.is_less(self.points[-1]):
            self.most_before_reset = max(
                self.most_before_reset, *(each.count for each in self.points)
            )
            self.points = [point]
            return
        self.points.append(point)
        if len(self.points) > _MOST_POINTS:
            del self.points[1]

    @property
    def is_at_rest(self) -> bool:
        """Return whether it has long stopped growing."""
        last = self.points[-1]
        return len(self.points) > 6 and not last.exceeds(self.points[-5])


@dataclass(slots=True)
class Series:
    """Looks that can be compared: of one stream, or after the passes of one stream."""

    tracks: dict[int, Track] = field(default_factory=dict)
    _before: dict[int, Point] = field(default_factory=dict)
    _before_at: Moment | None = None
    _was_complete: bool = True

    def add(self, look: Look, at: Moment) -> None:
        """Compare a look with the one before."""
        now: dict[int, Point] = {}
        for key, node in look.nodes.items():
            point = now[key] = Point.of(at, node)
            track = self.tracks.get(key)
            if track is not None:
                track.add(point)
                continue
            before = self._before.get(key) or self._nothing(node)
            if before is not None and point.exceeds(before) and len(self.tracks) < _MOST_TRACKS:
                self.tracks[key] = Track([before, point])
        for key in [key for key, track in self.tracks.items() if track.is_at_rest]:
            del self.tracks[key]
        self._before, self._before_at, self._was_complete = now, at, look.is_complete

    def _nothing(self, node: Node) -> Point | None:
        """Return the size of a named holder that was not there in the last look."""
        is_new = self._before_at is not None and self._was_complete and node.style in _NEW_STYLES
        return Point(self._before_at, 0, 0, 0, 0.0) if is_new and self._before_at else None
