"""The console that everything is shown on: no text can command the terminal behind it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from rich.console import Console
from rich.segment import Segment

from memfit.journal.printable import printable

_LEAST_WIDTH = 40
"""What is narrower is no terminal that someone reads: COLUMNS=0, say."""
_USUAL_WIDTH = 80


class PrintableConsole(Console):
    """Write as rich does, with control characters of any text spelled out.

    Square brackets mean nothing in a plain string, and digits have no colours: either may be a part
    of a name.
    """

    def __init__(self, **options: Any) -> None:
        """Set up a console; the options are those of rich."""
        usual = {
            "highlight": False,
            "markup": False,
            "width": _width(is_error=options.get("stderr")),
        }
        super().__init__(**{**usual, **options})

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Turn into text what is about to be written; rich's own controls are marked as such."""
        return super()._render_buffer(
            each if each.control else each._replace(text=printable(each.text)) for each in buffer
        )


class StdoutConsole(PrintableConsole):
    """Write to standard output and let ``main`` handle a reader that has gone."""

    def on_broken_pipe(self) -> NoReturn:
        """Hand the error on; rich would end the program with exit code 1."""
        raise BrokenPipeError


def _width(*, is_error: bool | None) -> int | None:
    """Return a width in the place of one that makes no sense; None leaves it to the terminal."""
    said = os.environ.get("COLUMNS", "")
    if not said or (said.isdecimal() and int(said) >= _LEAST_WIDTH):
        return None
    try:
        stream = sys.stderr if is_error else sys.stdout
        return max(_LEAST_WIDTH, os.get_terminal_size(stream.fileno()).columns)
    except (AttributeError, OSError, ValueError):
        return _USUAL_WIDTH
