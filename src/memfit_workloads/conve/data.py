"""Reads knowledge graphs: triples and names from text files, every line accounted for."""

from __future__ import annotations

import array
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memfit.errors import DataError

from .settings import GraphFiles

if TYPE_CHECKING:
    from rich.console import Console


logger = logging.getLogger(__name__)

LineListener = Callable[[Path, int], None]
_LINES_BETWEEN_NOTES = 1_000_000
_MOST_DIGITS = 18
"""Of an id; more is beyond 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A knowledge graph: triples (n, 3) int64 of head, relation and tail, and the names of ids."""

    train: Tensor
    valid: Tensor
    test: Tensor
    entity_ids: dict[str, int]
    relation_ids: dict[str, int]
    num_entities: int
    """The largest id + 1: ids may have gaps."""
    num_relations: int
    num_bad_lines: int
    """Lines that could not be used; above 0 only where they were to be skipped."""

    def triple_name(self, head: int, relation: int, tail: int) -> str:
        """Write a triple with its names, for messages."""
        entities, relations = self.names()
        names = (entities.get(head), relations.get(relation), entities.get(tail))
        return f"({', '.join(map(str, names))})"

    def names(self) -> tuple[dict[int, str], dict[int, str]]:
        """Return the names of entities and of relations by their ids."""
        entities = {number: name for name, number in self.entity_ids.items()}
        relations = {number: name for name, number in self.relation_ids.items()}
        return entities, relations


@dataclass(slots=True)
class BadLines:
    """Stop at the first line that cannot be used, or count them all."""

    skip: bool
    num_skipped: int = 0

    def report(self, path: Path, line: int, reason: str) -> None:
        """Account for one line.

        Raises:
            DataError: unless bad lines are to be skipped.
        """
        if not self.skip:
            remedy = "Correct the line, or pass --skip-bad-lines to leave such lines out."
            raise DataError(str(path), f"{reason}. {remedy}", line)
        self.num_skipped += 1
        logger.warning("%s, line %d is skipped: %s", path, line, reason)


@dataclass(slots=True)
class Names:
    """Ids by name; an open set of names grows with every new one it is asked for."""

    kind: str
    source: Path | None
    ids: dict[str, int] = field(default_factory=dict)

    def id_of(self, name: str) -> int | None:
        """Return the id of a name; None for one that a file of names does not list."""
        found = self.ids.get(name)
        if found is None and self.source is None:
            found = self.ids[name] = len(self.ids)
        return found

    def count(self) -> int:
        """Return the largest id + 1."""
        return max(self.ids.values(), default=-1) + 1


def read_graph(
    files: GraphFiles, *, skip_bad_lines: bool = False, listener: LineListener | None = None
) -> Graph:
    """Read a graph; names without a file of ids are numbered in the order in which they appear.

    Args:
        files: where to read.
        skip_bad_lines: count lines that cannot be used and log each, instead of stopping.
        listener: told of a file and its lines so far, a million at a time.

    Raises:
        DataError: if a file cannot be read, has a bad line, or has no triples.
    """
    bad = BadLines(skip=skip_bad_lines)
    entities = _read_names("entity", files.entity_to_id, bad)
    relations = _read_names("relation", files.relation_to_id, bad)
    train, valid, test = (
        _read_triples(path, entities, relations, bad, listener)
        for path in (files.train, files.valid, files.test)
    )
    return Graph(
        train=train,
        valid=valid,
        test=test,
        entity_ids=entities.ids,
        relation_ids=relations.ids,
        num_entities=entities.count(),
        num_relations=relations.count(),
        num_bad_lines=bad.num_skipped,
    )


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers; empty lines hold nothing and are passed over.

    Raises:
        DataError: if the file cannot be read as text.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                text = line.rstrip("\r\n")
                if text:
                    yield number, text
    except UnicodeDecodeError as error:
        reason = f"it is no UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
        raise DataError(str(path), reason) from None
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}). Check the path and its permissions."
        raise DataError(str(path), reason) from None


def _read_names(kind: str, path: Path | None, bad: BadLines) -> Names:
    """Read ``name TAB id`` lines, each name and each id once."""
    names = Names(kind=kind, source=path)
    if path is None:
        return names
    line_of_id: dict[int, int] = {}
    for number, text in lines_of(path):
        parts = text.split("\t")
        if len(parts) != 2 or not parts[0] or not _is_id(parts[1].strip()):
            reason = f"found {text!r}, needed {kind} name TAB id, the id a number from 0 up"
            bad.report(path, number, reason)
            continue
        name, value = parts[0], int(parts[1].strip())
        if name in names.ids:
            bad.report(path, number, f"the {kind} {name!r} is already listed further up")
        elif value in line_of_id:
            bad.report(path, number, f"the id {value} is already used in line {line_of_id[value]}")
        else:
            names.ids[name] = value
            line_of_id[value] = number
    if not names.ids:
        raise DataError(str(path), f"it lists no {kind}. Needed are lines of name TAB id.")
    return names


def _is_id(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _read_triples(
    path: Path | None,
    entities: Names,
    relations: Names,
    bad: BadLines,
    listener: LineListener | None,
) -> Tensor:
    """Read ``head TAB relation TAB tail`` lines into (n, 3) int64."""
    if path is None:
        return torch.empty((0, 3), dtype=torch.int64)
    ids = array.array("q")
    for number, text in lines_of(path):
        if listener is not None and number % _LINES_BETWEEN_NOTES == 0:
            listener(path, number)
        parts = text.split("\t")
        try:  # what nearly all lines are; the others are looked at more closely
            head, relation, tail = parts
            ids.extend((entities.ids[head], relations.ids[relation], entities.ids[tail]))
        except (ValueError, KeyError):
            reason = _read_slowly(ids, parts, entities, relations)
            if reason is not None:
                bad.report(path, number, reason)
    if not ids:
        raise DataError(str(path), "it has no triples. Needed are lines of head, relation, tail.")
    return torch.frombuffer(ids, dtype=torch.int64).clone().view(-1, 3)


def _read_slowly(
    ids: array.array[int], parts: list[str], entities: Names, relations: Names
) -> str | None:
    """Read a line with a new name, or return why it cannot be used."""
    if len(parts) != 3 or not all(parts):
        text = "\t".join(parts)
        return f"found {text!r}, needed head TAB relation TAB tail"
    unknown = _unknown_name(parts, entities, relations)
    if unknown is None:
        places = zip((entities, relations, entities), parts, strict=True)
        ids.extend(names.ids[name] for names, name in places)
    return unknown


def _unknown_name(parts: list[str], entities: Names, relations: Names) -> str | None:
    """Return which name of a triple is not listed; names of open sets are taken up on the way."""
    for names, name in zip((entities, relations, entities), parts, strict=True):
        if names.id_of(name) is None:
            return f"the {names.kind} {name!r} is not in {names.source}"
    return None


def read_watched(files: GraphFiles, console: Console, *, skip_bad_lines: bool = False) -> Graph:
    """Read a graph as `read_graph` does, with the lines so far in the console's status."""
    with console.status("reading the graph") as status:

        def listen(path: Path, num_lines: int) -> None:
            status.update(f"reading {path.name}: {num_lines:,} lines")

        return read_graph(files, skip_bad_lines=skip_bad_lines, listener=listen)
