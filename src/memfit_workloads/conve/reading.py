"""Reads a graph, and shows how far that is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .data import Graph, read_graph
from .settings import GraphFiles

if TYPE_CHECKING:
    from rich.console import Console


def read_watched(files: GraphFiles, console: Console, *, skip_bad_lines: bool = False) -> Graph:
    """Read a graph as `read_graph` does, with the lines so far in the console's status."""
    with console.status("reading the graph") as status:

        def listen(path: Path, num_lines: int) -> None:
            status.update(f"reading {path.name}: {num_lines:,} lines")

        return read_graph(files, skip_bad_lines=skip_bad_lines, listener=listen)
