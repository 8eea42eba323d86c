"""What was found, triple by triple, as data: what JSON, CSV, page and terminal show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .labels import Labels, Part

_PLACES = ("Head", "Rel", "Tail")
COLUMNS = (
    *(
        f"{side}{place}{end}"
        for side in ("Test", "Train")
        for place in _PLACES
        for end in ("", "_label")
    ),
    "TracInScore",
    "SelfInfluence",
)
"""Of the CSV file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTriple:
    """A triple with its line in its file, from 0, as triples of that file are counted."""

    index: int
    head: Part
    relation: Part
    tail: Part

    @classmethod
    def of(cls, index: int, triples: Tensor, labels: Labels) -> NamedTriple:
        """Name one of the triples (n, 3)."""
        head, relation, tail = labels.triple(*triples[index].tolist())
        return cls(index=index, head=head, relation=relation, tail=tail)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        parts = {"head": self.head, "relation": self.relation, "tail": self.tail}
        named = {name: part.name for name, part in parts.items()}
        return {
            "index": self.index,
            **named,
            **{f"{name}_label": part.label for name, part in parts.items()},
        }

    def cells(self) -> list[str]:
        """Return its six columns of the CSV file."""
        parts = (self.head, self.relation, self.tail)
        return [text for part in parts for text in (part.name, part.label)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """What one training triple did."""

    train: NamedTriple
    score: float
    self_influence: float

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            **self.train.as_json(),
            "score": self.score,
            "self_influence": self.self_influence,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What training triples did to one test triple."""

    test: NamedTriple
    influences: Sequence[Influence]
    """From the most helpful to the most harmful, each once."""

    @property
    def helpful(self) -> list[Influence]:
        """Return those that lowered the test triple's loss, the most helpful first."""
        return [each for each in self.influences if each.score > 0]

    @property
    def harmful(self) -> list[Influence]:
        """Return those that raised it, the most harmful first."""
        return [each for each in reversed(self.influences) if each.score < 0]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "test": self.test.as_json(),
            "helpful": [each.as_json() for each in self.helpful],
            "harmful": [each.as_json() for each in self.harmful],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that a tracing found."""

    about: dict[str, Any]
    """How it was found, as JSON has it."""
    by_test: Sequence[Finding]
    """None in mode self."""
    own: Sequence[Influence]
    """In mode self the training triples with the highest self-influence, the highest first."""

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {
            **self.about,
            "results": [each.as_json() for each in self.by_test],
            "self_influence": [each.as_json() for each in self.own],
        }

    def rows(self) -> list[list[str]]:
        """Return the rows of the CSV file; in mode self a triple is its own test triple."""
        rows = [_row(finding.test, each) for finding in self.by_test for each in finding.influences]
        return rows + [_row(each.train, each) for each in self.own]

    def of_test(self, place: int) -> Findings:
        """Return those of one test triple alone."""
        return Findings(about=self.about, by_test=[self.by_test[place]], own=())


def _row(test: NamedTriple, found: Influence) -> list[str]:
    scores = [repr(found.score), repr(found.self_influence)]
    return [*test.cells(), *found.train.cells(), *scores]
