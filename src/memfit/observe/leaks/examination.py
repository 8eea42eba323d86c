"""Compares looks, and says what has become a leak and what may become one."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch.utils.data import dataloader

from .contents import Attributes, lineage
from .histories import Moment, Series, Track
from .limits import LeakLimits
from .naming import Verdict
from .nodes import Node
from .rules import (
    Growth,
    Surroundings,
    grown_bytes,
    growth_in_steps,
    growth_over_passes,
    is_container,
    without_holders_of_others,
)
from .streams import Stream
from .walk import Look
from .wording import kind_of

OPTIMIZER_STREAM = "train"
_MOST_ASKED = 8


@dataclass(slots=True, kw_only=True)
class Examination:
    """Keep the series of looks, and judge them."""

    limits: LeakLimits
    memory_bytes: Mapping[str, int]
    streams: dict[str, Stream]
    suspects: dict[int, str] = field(default_factory=dict)
    """The keys of what may leak, and the stream in which it grows."""
    loader: Node | None = None
    """A data loader that was seen."""
    dataset_name: str = ""
    """The class of its dataset."""
    pass_noted: dict[str, int] = field(default_factory=dict)
    _num_asked: int = 0
    _steps: dict[str, Series] = field(default_factory=dict)
    _passes: dict[str, Series] = field(default_factory=dict)
    _totals: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, look: Look, current: Stream, over: Stream | None, index: int) -> list[Verdict]:
        """Add a look at a boundary of a stream, at which a pass of another may just be over."""
        self._note(look, current)
        series = self._steps.setdefault(current.name, Series())
        if over is not current:
            series.add(look, self._moment(current, index))
        verdicts = self._judge(look, series, self._known(current, look), is_passes=False)
        for key, track in series.tracks.items():
            if len(track.points) > 2 and track.points[-1].exceeds(track.points[-2]):
                self._suspect(look, key, track, current.name)
        if over is not None:
            self._suspect_in_pass(look, series, over.name)
            passes = self._passes.setdefault(over.name, Series())
            at = Moment(
                count=over.pass_number,
                num_boundaries=index,
                pass_number=over.pass_number,
                pass_length=over.position,
            )
            passes.add(look, at)
            verdicts += self._judge(look, passes, self._known(current, look), is_passes=True)
        return verdicts

    def growth_in_looks(self, stream: str, since: int) -> float:
        """Return by how much all that was reached has grown since a count of steps."""
        totals = self._totals.get(stream, [])
        before = [total for count, total in totals if count <= since] or [
            total for _, total in totals[:1]
        ]
        return totals[-1][1] - before[-1] if totals else 0.0

    @property
    def is_anything_growing(self) -> bool:
        """Return whether a holder grew at its last looks."""
        return any(
            len(track.points) > 2 and is_container_track(track)
            for series in self._steps.values()
            for track in series.tracks.values()
        )

    def _note(self, look: Look, current: Stream) -> None:
        roots = [node for node in look.nodes.values() if node.parent is None]
        total = sum(node.num_bytes for node in roots)
        totals = self._totals.setdefault(current.name, [])
        totals.append((current.count, total))
        if len(totals) > 64:
            del totals[1::2]
        for node in look.nodes.values():
            if node.type_name == "DataLoader":
                self.loader = node
            elif node.kind == "dataset" and node.link == "dataset":
                self.dataset_name = node.type_name

    def forget(self) -> None:
        """Drop all looks."""
        self._steps.clear()
        self._passes.clear()
        self._totals.clear()
        self.suspects.clear()

    def _moment(self, current: Stream, index: int) -> Moment:
        optimizer = self.streams.get(OPTIMIZER_STREAM)
        return Moment(
            count=current.count,
            num_boundaries=index,
            pass_number=current.pass_number + self.pass_noted.get(current.name, 0),
            pass_length=current.previous_length,
            num_optimizer_steps=optimizer.count if optimizer is not None else 0,
            batch_bytes=current.batch_bytes,
        )

    def _known(self, current: Stream, look: Look) -> Surroundings:
        knows_passes = self.loader is not None or any(
            stream.pass_number > 1 for stream in self.streams.values()
        )
        optimizer = self.streams.get(OPTIMIZER_STREAM)
        return Surroundings(
            limits=self.limits,
            memory_bytes=self.memory_bytes,
            knows_passes=knows_passes,
            knows_optimizer_steps=optimizer is not None and optimizer.count >= 3,
            is_optimizer_stream=current.name == OPTIMIZER_STREAM,
            stream=current.name,
            bounds=look.bounds,
            asks_for_passes=current.pass_number == 1
            and current.name not in self.pass_noted
            and self._num_asked < _MOST_ASKED,
        )

    def _waits_for_a_pass(self, node: Node, track: Track, known: Surroundings) -> bool:
        """Return whether growth is a leak but for a second pass over the data."""
        if not known.asks_for_passes:
            return False
        return growth_in_steps(node, track, replace(known, knows_passes=False)) is not None

    def _ask_for_passes(self, stream: str, waiting: list[Track]) -> None:
        """See from the loaders themselves whether a new pass has begun since something grew."""
        self._num_asked += 1
        num_steps = max(track.points[-1].at.count - track.points[0].at.count for track in waiting)
        given = batches_given()
        if given and max(given) < num_steps:
            self.pass_noted[stream] = 1
            self.streams[stream].look_soon()

    def _judge(
        self, look: Look, series: Series, known: Surroundings, *, is_passes: bool
    ) -> list[Verdict]:
        judge = growth_over_passes if is_passes else growth_in_steps
        found: list[Growth] = []
        waiting: list[Track] = []
        for key, track in series.tracks.items():
            node = look.nodes.get(key)
            growth = judge(node, track, known) if node is not None else None
            if growth is not None:
                found.append(growth)
            elif node is not None and not is_passes and self._waits_for_a_pass(node, track, known):
                waiting.append(track)
        if waiting:
            self._ask_for_passes(known.stream, waiting)
        kept = without_holders_of_others(found, series)
        return [Verdict(growth=growth, kind=kind_of(growth, look)) for growth in kept]

    def _suspect_in_pass(self, look: Look, series: Series, stream: str) -> None:
        """Suspect what grew since the look before, with a pass in between."""
        for key, track in series.tracks.items():
            if track.points[-1].exceeds(track.points[-2 if len(track.points) > 1 else -1]):
                self._suspect(look, key, track, stream)

    def _suspect(self, look: Look, key: int, track: Track, stream: str) -> None:
        node = look.nodes.get(key)
        if node is None or not is_container(node):
            return
        first, last = track.points[0], track.points[-1]
        grown = max(grown_bytes(track), last.num_bytes - first.num_bytes)
        num_boundaries = max(1, last.at.num_boundaries - first.at.num_boundaries)
        memory = self.memory_bytes.get(node.place, 0)
        is_much = grown / num_boundaries * self.limits.horizon_steps >= (
            self.limits.horizon_fraction * memory
        )
        is_state = node.has_tensors and node.owner("module") is not None
        is_special = "_hooks" in str(node.link) or last.num_graph_nodes > first.num_graph_nodes
        if is_much or is_special or (is_state and grown >= self.limits.least_metric_bytes):
            self.suspects.setdefault(key, stream)


def is_container_track(track: Track) -> bool:
    """Return whether a track grew at its last two looks."""
    last, before, first = track.points[-1], track.points[-2], track.points[-3]
    return last.exceeds(before) and before.exceeds(first)


def batches_given() -> list[int]:
    """Return the number of batches that each live iterator of a loader has given."""
    base = dataloader._BaseDataLoaderIter
    found = []
    for each in gc.get_objects():
        if base in lineage(type(each)):
            held = dict(Attributes(type(each)).of(each))
            given = held.get("_num_yielded")
            if type(given) is int:
                found.append(given)
    return found
