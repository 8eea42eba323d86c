"""What pages are made of: sections of blocks, which an empty line parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from results_file import load_result

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A section on the results of one benchmark, which have its name."""

    title: str
    name: str
    body: Callable[[Figures], Iterable[str]]
    command: str = "bench_{name}.py"

    def blocks(self) -> Iterator[str]:
        """Yield the heading, what was run and where, and the body."""
        figures = load_result(self.name)
        yield f"## {self.title}"
        yield (
            f"`python benchmarks/{self.command.format(name=self.name)}`, {figures['date']}, torch "
            f"{figures['torch']}, {figures['num_threads']} threads."
        )
        yield from self.body(figures)


def table(head: str, alignment: str, rows: Iterable[Iterable[object]]) -> str:
    """Write a table; each letter of the alignment, l or r, is that of a column."""
    rule = "|".join({"l": "---", "r": "---:"}[letter] for letter in alignment)
    body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([f"| {head} |", f"|{rule}|", *body])


def between(page: str, begin: str, end: str, text: str) -> str:
    """Put a text between two marks of a page.

    Raises:
        ValueError: if a mark is missing.
    """
    before, after = page.index(begin), page.index(end)
    return f"{page[:before]}{begin}\n\n{text}\n\n{page[after:]}"
