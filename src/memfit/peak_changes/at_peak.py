"""What lives at a peak, by the line of code behind it: as data, and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .plain_values import natural, text

_MOST_CODE = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBlocks:
    """The blocks that a line holds at the peak in one module, of one category."""

    module: str
    category: str
    num_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakLine:
    """A line of code, and what it holds at the peak.

    ``source_line`` is such as ``models/decoder.py:31``. It is empty, as is the rest, for what no
    line of the user's stands behind: parameters of a Job, libraries' workspaces.
    """

    source_line: str
    function: str
    code: str
    """The line itself, without its indent; empty where its file could not be read."""
    blocks: Sequence[LineBlocks]

    @property
    def num_bytes(self) -> int:
        """Add up the blocks."""
        return sum(each.num_bytes for each in self.blocks)

    @property
    def file(self) -> str:
        """Return the file's last folder and name."""
        return self.source_line.rpartition(":")[0]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "source_line": self.source_line,
            "function": self.function,
            "code": self.code,
            "num_bytes": self.num_bytes,
            "blocks": [
                {
                    "module": each.module,
                    "category": each.category,
                    "num_bytes": each.num_bytes,
                    "num_blocks": each.num_blocks,
                }
                for each in self.blocks
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PeakLine:
        """Read what ``to_json`` gives.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or malformed.
        """
        return cls(
            source_line=text(content["source_line"]),
            function=text(content["function"]),
            code=text(content["code"])[:_MOST_CODE],
            blocks=tuple(
                LineBlocks(
                    module=text(each["module"]),
                    category=text(each["category"]),
                    num_bytes=natural("num_bytes", each["num_bytes"]),
                    num_blocks=natural("num_blocks", each["num_blocks"]),
                )
                for each in content["blocks"]
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AtPeak:
    """Where the peak of the steady step lies, and what lives there."""

    phase: str
    """The part of the step: ``forward``, ``backward`` or ``optimizer``."""
    source_line: str
    """The line that asks for the last block; empty where none of the user's does."""
    lines: Sequence[PeakLine]
    """Largest first."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "peak_phase": self.phase,
            "peak_source_line": self.source_line,
            "by_line": [line.to_json() for line in self.lines],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> AtPeak:
        """Read what ``to_json`` gives.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or malformed.
        """
        return cls(
            phase=text(content["peak_phase"]),
            source_line=text(content["peak_source_line"]),
            lines=tuple(map(PeakLine.from_json, content["by_line"])),
        )
