"""What all reports for a terminal are made of: tables without lines, headings, bars and marks.

No renderable prints; the caller gives it to its own console. Names from outside are wrapped in
``Text``, since plain strings would be read as console markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement as CellMeasurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.figures import Certainty

WIDTH = 120
"""As wide as a report becomes: longer lines are not read well."""
_USUAL_WIDTH = 80
PLAN_WIDTH = 28
INDENT = (0, 0, 0, 2)
_BAR_WIDTH = 22
_LEAST_BAR_WIDTH = 6
_LEAST_NAME_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a fraction from 0 to 1, in characters that the terminal can write."""

    fraction: float

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> CellMeasurement:
        """Ask for the whole width of a bar, and take less on a narrow terminal."""
        return CellMeasurement(_LEAST_BAR_WIDTH, _BAR_WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar; anything above zero shows at least one mark."""
        width = min(_BAR_WIDTH, options.max_width)
        length = round(self.fraction * width) or (1 if self.fraction > 0 else 0)
        mark = "#" if options.ascii_only else "\N{FULL BLOCK}"
        yield Text(mark * length, style="cyan")


@dataclass(frozen=True, slots=True)
class Name:
    """A name on one line, whose middle gives way to what the terminal has room for."""

    text: str
    most: int
    """Characters on a terminal of 80; a wider one has room for as many more."""
    level: int = 0
    """How far it is indented, in steps of two."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> CellMeasurement:
        """Ask for the whole name up to its most, and take less on a narrow terminal."""
        width = min(self.most + _more_room(console), 2 * self.level + len(self.text))
        return CellMeasurement(min(_LEAST_NAME_WIDTH, width), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Write the name, or both its ends."""
        indent = "  " * self.level
        room = min(self.most + _more_room(console), options.max_width) - len(indent)
        yield Text(indent + shorten(self.text, max(4, room)), no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Words that are written for the width that there is."""

    write: Callable[[int], Text]
    """Writes them within so many characters."""
    width: int
    """On a terminal of 80; a wider one has room for as many more."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> CellMeasurement:
        """Ask for what the words take."""
        text = self.write(self.width + _more_room(console))
        return CellMeasurement.get(console, options, text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Write them, and leave a narrower terminal to fold them."""
        yield self.write(self.width + _more_room(console))


def _more_room(console: Console) -> int:
    """Return how many columns a report has beyond the usual ones."""
    return max(0, min(console.width, WIDTH) - _USUAL_WIDTH)


def grid(*columns: Column) -> Table:
    """Make a table without lines, at most as wide as the page minus its indent."""
    return Table(
        *columns,
        box=None,
        show_header=any(column.header for column in columns),
        header_style="dim",
        padding=(0, 2, 0, 0),
        pad_edge=False,
        collapse_padding=True,
    )


def word(header: str = "") -> Column:
    """Return a column of words, which are not wrapped."""
    return Column(header, no_wrap=True)


def shorten(name: str, width: int) -> str:
    """Cut the middle out of a name that is wider than ``width`` characters.

    Both ends tell modules apart: the part of the model in front, the layer at the end.
    """
    if len(name) <= width:
        return name
    front = (width - 3) // 2
    return f"{name[:front]}...{name[len(name) - (width - 3 - front) :]}"


def amount(header: str = "") -> Column:
    """Return a column of figures."""
    return Column(header, justify="right", no_wrap=True)


def folded(header: str) -> Column:
    """Return a column of names that are as long as they are."""
    return Column(header, overflow="fold")


def dashed(sentences: Iterable[Text]) -> Table:
    """Show sentences, each behind a dash."""
    table = grid(word(), Column(overflow="fold"))
    for sentence in sentences:
        table.add_row("-", sentence)
    return table


def section(title: str, body: RenderableType) -> RenderableType:
    """Put a heading above an indented body, with an empty line before both."""
    return Group("", Text(title, style="bold"), Padding(body, INDENT))


def at_page_width(*parts: RenderableType) -> RenderableType:
    """Hold a report to the width of a page on terminals that are wider still."""
    return Constrain(Group(*parts), width=WIDTH)


def certainty_mark(certainty: Certainty) -> Text:
    """Write how a figure is known; a guess stands out."""
    return Text(certainty.value, style="bold yellow" if certainty is Certainty.GUESS else "dim")


def yes_or_no(fits: bool | None) -> Text:
    """Write whether something fits; unknown is a dash."""
    if fits is None:
        return Text("-", style="dim")
    return Text("yes", style="green") if fits else Text("no", style="bold red")
