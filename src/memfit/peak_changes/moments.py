"""What lives at the highest moments of a step, by the line of code behind it: data and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .plain_values import natural, text

Held = Counter[tuple[str, str]]
"""Bytes by module and category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLine:
    """A line of code that the step went through."""

    source_line: str
    """Such as ``models/decoder.py:31``."""
    function: str
    """As Python qualifies it: ``Block.forward``."""
    code: str
    """The line itself, without its indent; empty where its file could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBlocks:
    """The blocks that a line holds at a moment in one module, of one category.

    ``source_line`` is empty for what no line of the user's stands behind: parameters of a Job,
    workspaces of libraries.
    """

    source_line: str
    module: str
    category: str
    num_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where one part of the step is highest, and what lives there."""

    phase: str
    """``forward``, ``backward`` or ``optimizer``."""
    source_line: str
    """The line that asks for the last block; empty where none of the user's does."""
    blocks: Sequence[LineBlocks]
    """Largest first."""

    @property
    def num_bytes(self) -> int:
        """Add up the blocks."""
        return sum(each.num_bytes for each in self.blocks)

    def by_line(self) -> dict[str, Held]:
        """Return what each line holds."""
        held: dict[str, Held] = {}
        for each in self.blocks:
            found = held.setdefault(each.source_line, Counter())
            found[each.module, each.category] += each.num_bytes
        return held

    def by_category(self) -> dict[str, int]:
        """Return the bytes of each category."""
        found: Counter[str] = Counter()
        for each in self.blocks:
            found[each.category] += each.num_bytes
        return dict(found)

    def by_module(self) -> dict[str, int]:
        """Return the bytes of each module."""
        found: Counter[str] = Counter()
        for each in self.blocks:
            found[each.module] += each.num_bytes
        return dict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMoments:
    """The lines of the steady step, and the highest moment of each of its phases."""

    lines: Sequence[KnownLine]
    """All that it went through, so that a line which holds nothing is not taken for a new one."""
    moments: Sequence[Moment]
    """In the order in which phases first come."""

    @property
    def highest(self) -> Moment:
        """Return the moment of the step's peak."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    def moment(self, phase: str) -> Moment | None:
        """Return the highest moment of a phase; None where there is no such phase."""
        return next((each for each in self.moments if each.phase == phase), None)

    def reading(self, moment: Moment) -> tuple[str, str]:
        """Return the function and the text of the line that a moment lies at."""
        found = (line for line in self.lines if line.source_line == moment.source_line)
        return next(((line.function, line.code) for line in found), ("", ""))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "lines": [asdict(line) for line in self.lines],
            "moments": [
                {
                    "phase": moment.phase,
                    "source_line": moment.source_line,
                    "num_bytes": moment.num_bytes,
                    "blocks": [asdict(block) for block in moment.blocks],
                }
                for moment in self.moments
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StepMoments:
        """Read what ``to_json`` gives.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or malformed.
        """
        moments = tuple(map(_moment, content["moments"]))
        if not moments:
            msg = "moments is empty"
            raise ValueError(msg)
        lines = tuple(
            KnownLine(
                source_line=text(each["source_line"]),
                function=text(each["function"]),
                code=text(each["code"]),
            )
            for each in content["lines"]
        )
        return cls(lines=lines, moments=moments)


def _moment(content: Mapping[str, Any]) -> Moment:
    return Moment(
        phase=text(content["phase"]),
        source_line=text(content["source_line"]),
        blocks=tuple(
            LineBlocks(
                source_line=text(each["source_line"]),
                module=text(each["module"]),
                category=text(each["category"]),
                num_bytes=natural("num_bytes", each["num_bytes"]),
                num_blocks=natural("num_blocks", each["num_blocks"]),
            )
            for each in content["blocks"]
        ),
    )
