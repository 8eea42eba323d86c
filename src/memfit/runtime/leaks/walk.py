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
        """Give ``file.py:12``, or nothing."""
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


class Walk:
    """Carry out one look."""

    def __init__(self, suspects: Collection[int], lines: Lines | None) -> None:
        self.look = Look()
        self._leaves = LeafReader(self.look.seen)
        self._readers: dict[type, Reader] = {}
        self._queue: deque[Entry] = deque()
        self._suspects = suspects
        self._lines = lines
        self._deadline = time.perf_counter() + _MOST_SECONDS

    def run(self, start: list[Root]) -> Look:
        """Follow all roots, one variable after the other, and add up what hangs below."""
        started = time.perf_counter()
        for root in start:
            kind = "frame" if root.is_frame else "namespace"
            key = hash((kind, root.name))
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
            node.parent, node.style, node.link = None, "class", reading.type_name
            node.weight = 0.0
        link = node.link
        if type(link) is not str and type(link) is not int:
            link = node.link = f"<{type(link).__name__}>"
        node.key = hash((parent.key if node.parent else 0, node.style, link))
        if node.key in self.look.nodes:
            node.key = hash((node.key, len(self.look.nodes)))
        node.kind = reading.value_kind or reading.kind
        node.type_name = reading.type_name
        node.count, node.is_bounded = reading.count, reading.is_bounded
        node.is_ordered = reading.is_ordered
        node.is_memfits = reading.is_memfits
        node.num_rows, node.bounds = reading.num_rows, reading.bounds
        _add(node, reading, 1.0)
        self.look.nodes[node.key] = node
        if self._lines is not None and node.key in self._suspects:
            node.source_line = self._line(reading, value)
        for style, name, item in reading.items:
            self._queue.append((item, node, style, name, reading.weight))

    def _line(self, reading: Reading, value: Any) -> str:
        """Say where the newest of what a suspect holds was made."""
        assert self._lines is not None, "asked only with lines"
        for _, _, item in reading.items[:-5:-1]:
            line = self._line_within(item, _LINE_DEPTH)
            if line:
                return line
        return "" if reading.items else self._lines.line_of(value)

    def _line_within(self, value: Any, depth: int) -> str:
        """Say where a value, or what it holds, was made."""
        assert self._lines is not None, "asked only with lines"
        line = self._lines.line_of(value)
        if line or not depth:
            return line
        reader = self._leaves.reader_of(type(value))
        reading = reader(value) if type(value) in _PLAIN else None
        items = reading.items[-4:] if reading is not None else ()
        lines = (self._line_within(item, depth - 1) for _, _, item in items)
        return next((line for line in lines if line), "")


def take_look(suspects: Collection[int] = (), lines: Lines | None = None) -> Look:
    """Look at all that the program's variables lead to."""
    return Walk(suspects, lines).run(roots())


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
