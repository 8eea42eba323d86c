"""Takes one look at everything that the program's variables lead to.

Each holder is known by the path that leads to it, so that two looks can be compared without keeping
anything alive in between. What is reached twice belongs to the first path.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from .bounds import bounds_of_program
from .nodes import Node
from .readers import LeafReader, Reader, Reading
from .roots import Root, roots

_MOST_NODES = 150_000
_MOST_SECONDS = 2.0
_LINE_DEPTH = 2
_PLAIN = {list, dict, tuple}


class Lines(Protocol):
    """Tells where an object was made."""

    def line_of(self, value: Any) -> str:
        """Return ``file.py:12``, or nothing."""
        ...


@dataclass(slots=True, kw_only=True)
class Look:
    """What was seen."""

    nodes: dict[int, Node] = field(default_factory=dict)
    is_complete: bool = True
    took_seconds: float = 0.0
    bounds: tuple[int, ...] = ()
    """What the program's variables state as the most entries of something."""
    seen: set[int] = field(default_factory=set)
    """The ids of what was reached; of use only while the program stands still."""


Entry = tuple[Any, Node, str, Any, float]
"""A value, what holds it, how, under which name, and for how many it stands."""


@dataclass(slots=True, kw_only=True)
class LineSearch:
    """What a walk looks for to say where it was made: only along the ways that lead there.

    While lines are noted every object takes long to make, and so would a look at everything.
    """

    suspects: Collection[int]
    """The keys of what grows."""
    ways: Collection[int]
    """The keys of all that lead there, and the suspects' own."""
    lines: Lines
    found: dict[int, str] = field(default_factory=dict)

    def leads_on(self, key: int) -> bool:
        """Return whether to follow what a node holds."""
        return key in self.ways


class Walk:
    """Run one look, or a part of one in search of lines."""

    def __init__(self, search: LineSearch | None = None) -> None:
        self.look = Look()
        self._leaves = LeafReader(self.look.seen)
        self._readers: dict[type, Reader] = {}
        self._queue: deque[Entry] = deque()
        self._search = search
        self._deadline = time.perf_counter() + _MOST_SECONDS

    def run(self, start: list[Root]) -> Look:
        """Follow all roots, one variable after the other, and add up what hangs below."""
        started = time.perf_counter()
        for root in start:
            kind = "frame" if root.is_frame else "namespace"
            key = hash((kind, root.name))
            if self._search is not None and not self._search.leads_on(key):
                continue
            top = Node(key, None, "root", root.name, kind, "")
            self.look.nodes.setdefault(key, top)
            self.look.bounds += bounds_of_program(root.variables)
            for name, value in root.variables:
                if type(name) is str and not name.startswith("__"):
                    self._visit(value, top, "variable", name, 1.0)
                    self._empty_queue()
        for node in reversed(self.look.nodes.values()):
            _add_to_parent(node)
        self.look.took_seconds = time.perf_counter() - started
        return self.look

    def _empty_queue(self) -> None:
        queue = self._queue
        while queue:
            if len(self.look.nodes) > _MOST_NODES or (
                len(self.look.nodes) % 64 == 0 and time.perf_counter() > self._deadline
            ):
                self.look.is_complete = False
                queue.clear()
                return
            self._visit(*queue.popleft())

    def _visit(self, value: Any, parent: Node, style: str, link: Any, weight: float) -> None:
        kind = type(value)
        reader = self._readers.get(kind)
        if reader is None:
            reader = self._readers[kind] = self._leaves.reader_of(kind)
        reading = reader(value)
        if reading is None:
            return
        if reading.is_shared:
            if id(value) in self.look.seen:
                return
            self.look.seen.add(id(value))
        if reading.is_inline:  # a tuple, a bound method: what it holds is its holder's
            for each_style, name, item in reading.items:
                self._queue.append(
                    (item, parent, each_style or style, f"{link}[{name}]", weight * reading.weight)
                )
            return
        self._enter(reading, value, Node(0, parent, style, link, reading.kind, "", weight))

    def _enter(self, reading: Reading, value: Any, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "only namespaces and classes have none"
        if reading.kind == "leaf" and not (reading.is_large and node.style != "index"):
            _add(parent, reading, node.weight)
            return
        if reading.is_class:
            node.parent, node.reached_from = None, parent
            node.style, node.link = "class", reading.type_name
            node.weight = 0.0
        link = node.link
        if type(link) is not str and type(link) is not int:
            link = node.link = f"<{type(link).__name__}>"
        node.key = hash((parent.key if node.parent else 0, node.style, link))
        if node.key in self.look.nodes:
            node.is_ambiguous = self.look.nodes[node.key].is_ambiguous = True
            node.key = hash((node.key, len(self.look.nodes)))
        node.kind = reading.value_kind or reading.kind
        node.type_name = reading.type_name
        node.count, node.is_bounded = reading.count, reading.is_bounded
        node.is_ordered = reading.is_ordered
        node.is_memfits = reading.is_memfits
        node.num_rows, node.bounds = reading.num_rows, reading.bounds
        _add(node, reading, 1.0)
        self.look.nodes[node.key] = node
        search = self._search
        if search is not None and node.key in search.suspects:
            search.found[node.key] = _line(reading, value, search.lines, self._leaves)
        if search is not None and not search.leads_on(node.key):
            return
        for style, name, item in reading.items:
            self._queue.append((item, node, style, name, reading.weight))


def take_look() -> Look:
    """Look at all that the program's variables lead to."""
    return Walk().run(roots())


def find_lines(search: LineSearch) -> dict[int, str]:
    """Say where the newest of what each suspect holds was made, where that was noted."""
    Walk(search).run(roots())
    return {key: line for key, line in search.found.items() if line}


def ways_to(look: Look, suspects: Collection[int]) -> set[int]:
    """Return the keys of all that lead to suspects, and their own."""
    ways: set[int] = set()
    for key in suspects:
        node = look.nodes.get(key)
        while node is not None and node.key not in ways:
            ways.add(node.key)
            node = node.parent or node.reached_from
    return ways


def _line(reading: Reading, value: Any, lines: Lines, leaves: LeafReader) -> str:
    """Say where the newest of what a holder holds was made."""
    for _, _, item in reading.items[:-5:-1]:
        line = _line_within(item, _LINE_DEPTH, lines, leaves)
        if line:
            return line
    return "" if reading.items else lines.line_of(value)


def _line_within(value: Any, depth: int, lines: Lines, leaves: LeafReader) -> str:
    """Say where a value, or what it holds, was made."""
    line = lines.line_of(value)
    if line or not depth:
        return line
    reading = leaves.reader_of(type(value))(value) if type(value) in _PLAIN else None
    items = reading.items[-4:] if reading is not None else ()
    found = (_line_within(item, depth - 1, lines, leaves) for _, _, item in items)
    return next((line for line in found if line), "")


def _add(node: Node, reading: Reading, weight: float) -> None:
    num_bytes = int(reading.num_bytes * weight)
    node.num_bytes += num_bytes
    node.own_bytes += num_bytes
    node.num_graph_nodes += reading.num_graph_nodes * weight
    if reading.value_kind == "tensor":
        node.has_tensors = True
        node.is_pinned = node.is_pinned or reading.is_pinned
        if reading.place != "host":
            node.place = reading.place


def _add_to_parent(node: Node) -> None:
    parent = node.parent
    if parent is None:
        return
    parent.num_bytes += int(node.num_bytes * node.weight)
    parent.num_graph_nodes += node.num_graph_nodes * node.weight
    parent.has_tensors = parent.has_tensors or node.has_tensors
    parent.is_pinned = parent.is_pinned or node.is_pinned
    if node.place != "host":
        parent.place = node.place
