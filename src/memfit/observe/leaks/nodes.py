"""The nodes of a look: what holds things, by the path that leads there, and how much it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CONTAINERS = {"list", "dict", "set", "deque"}
LEAVES = {"tensor", "array", "text"}
_HIDDEN = {"_modules", "_parameters", "_buffers"}
"""Dicts of a module whose entries are read as its attributes."""


@dataclass(slots=True, eq=False)
class Node:
    """One holder. It refers to other nodes and to text, never to the program's objects."""

    key: int
    parent: Node | None
    style: str
    """How the parent holds it: variable, attribute, index, key, closure, default, class."""
    link: Any
    """The name, index or key; always a str or an int."""
    kind: str
    type_name: str
    weight: float = 1.0
    """How many of its kind it stands for in its parent."""
    count: int = 0
    num_bytes: int = 0
    """With all that hangs below it."""
    own_bytes: int = 0
    """Without holders below it."""
    num_graph_nodes: float = 0.0
    place: str = "host"
    is_pinned: bool = False
    has_tensors: bool = False
    is_bounded: bool = False
    """It drops what is old by itself."""
    is_ordered: bool = True
    """It looks like a log: a list, or keys that rise with time."""
    num_rows: int = 0
    """Of a tensor: its first dimension."""
    bounds: tuple[int, ...] = ()
    """What its attributes state as the most entries of what it holds."""
    is_memfits: bool = False
    """It is an object of memfit's own, such as a ``Run``."""
    is_ambiguous: bool = False
    """Another one has the same path, so that it cannot be followed from look to look."""
    reached_from: Node | None = None
    """For a class, whose path begins with itself: where it was met."""

    def lineage(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def owner(self, kind: str) -> Node | None:
        """Return the nearest holder of a kind, this one included."""
        return next((node for node in self.lineage()[::-1] if node.kind == kind), None)

    def keeper(self) -> Node | None:
        """Return the nearest holder that is no mere container: an object, a function, a module."""
        node: Node | None = self
        while node is not None and (node.kind in CONTAINERS or node.kind in LEAVES):
            node = node.parent
        return node

    def holder(self) -> str:
        """Write the path as an attribute path, as in ``model.head.metrics.auroc.preds``."""
        text = ""
        for node in self.lineage():
            if node.style in {"variable", "closure", "default", "class"}:
                text = _variable(node)
            elif not _is_hidden(node):
                text += node.text()
        return text.removeprefix(".")

    def chain(self) -> tuple[str, ...]:
        """Return each link of the path, each as Python would write it."""
        found: list[str] = []
        for node in self.lineage():
            if node.style in {"closure", "default"}:
                found.append(f"{node.style} variable {node.link}")
            elif node.style == "class":
                found.append(f"class {node.link}")
            elif node.style == "root":
                found.append(str(node.link) or "__main__")
            elif not _is_hidden(node):
                found.append(node.text())
        return tuple(each for each in found if each)

    def text(self) -> str:
        """Write the link to it."""
        if self.style == "variable":
            return str(self.link)
        parent = self.parent
        is_entry = parent is not None and _is_hidden(parent)
        if self.style == "attribute" or (is_entry and str(self.link).isidentifier()):
            return f".{self.link}"
        if is_entry:
            return f"[{self.link}]"
        return f"[{self.link!r}]" if self.style in {"index", "key"} else ""


def _is_hidden(node: Node) -> bool:
    parent = node.parent
    if parent is None or node.style != "attribute":
        return False
    return (parent.kind == "module" and node.link in _HIDDEN) or parent.kind == "lru_cache"


def _variable(node: Node) -> str:
    """Write the name with which a path begins."""
    parent = node.parent
    if node.style == "variable" and parent is not None and parent.kind == "namespace":
        return f"{parent.link}.{node.link}" if parent.link else str(node.link)
    return str(node.link)
