"""Names of entities and relations as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from memfit.errors import DataError
from memfit.journal.plain_text import parsed_json
from memfit_workloads.conve.data import Graph, lines_of

from .settings import TracinSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An entity or a relation: its name in the graph, and its label."""

    name: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The names in the graph by id, and labels by name; what has no label goes by its name."""

    entities: Mapping[int, str]
    relations: Mapping[int, str]
    entity_labels: Mapping[str, str]
    relation_labels: Mapping[str, str]

    @classmethod
    def of(cls, graph: Graph, settings: TracinSettings) -> Self:
        """Read the labels that the flags name.

        Raises:
            DataError: if a file is missing or malformed.
        """
        entities, relations = graph.names()
        nodes, edges = settings.node_name_dict, settings.edge_map
        return cls(
            entities=entities,
            relations=relations,
            entity_labels={} if nodes is None else read_node_names(nodes),
            relation_labels={} if edges is None else read_edge_map(edges),
        )

    def triple(self, head: int, relation: int, tail: int) -> tuple[Part, Part, Part]:
        """Return the parts of a triple."""
        return (
            _part(self.entities, self.entity_labels, head),
            _part(self.relations, self.relation_labels, relation),
            _part(self.entities, self.entity_labels, tail),
        )


def read_node_names(path: Path) -> dict[str, str]:
    """Read ``name TAB label`` lines.

    Raises:
        DataError: with the first line that is something else.
    """
    labels: dict[str, str] = {}
    for number, text in lines_of(path):
        name, tab, label = text.partition("\t")
        if not tab or not name or not label.strip():
            reason = f"found {text!r:.120}, needed name TAB label"
            raise DataError(str(path), reason, number)
        labels[name] = label.strip()
    return labels


def read_edge_map(path: Path) -> dict[str, str]:
    """Read a JSON object whose keys say what its values, the names of relations, mean.

    A key is a label, or JSON itself: an object with a predicate and its qualifiers.

    Raises:
        DataError: if it is something else.
    """
    text = "\n".join(line for _, line in lines_of(path))
    try:
        content = parsed_json(text)
    except ValueError as error:
        raise DataError(str(path), f"it is no JSON ({error}). {_NEEDED}") from None
    is_usable = isinstance(content, dict) and all(
        isinstance(each, str) for each in content.values()
    )
    if not is_usable:
        raise DataError(str(path), f"it is no object of texts. {_NEEDED}")
    labels: dict[str, str] = {}
    for key, name in content.items():
        if name in labels:
            raise DataError(str(path), f"the relation {name!r} is listed twice. {_NEEDED}")
        labels[name] = _label_of(key)
    return labels


_NEEDED = 'Needed is {"label, or JSON with a predicate": "name of the relation", ...}.'


def _label_of(key: str) -> str:
    """Return the predicate in a key, with its qualifiers in brackets, or the key itself."""
    try:
        content: Any = parsed_json(key)
    except ValueError:
        return key
    if not isinstance(content, dict) or "predicate" not in content:
        return key
    others = [f"{name} {_text(each)}" for name, each in content.items() if name != "predicate"]
    predicate = _text(content["predicate"])
    return f"{predicate} ({', '.join(others)})" if others else predicate


def _text(value: Any) -> str:
    return (
        value.removeprefix("biolink:").replace("_", " ") if isinstance(value, str) else str(value)
    )


def _part(names: Mapping[int, str], labels: Mapping[str, str], number: int) -> Part:
    name = names.get(number, str(number))
    return Part(name=name, label=labels.get(name, name))
