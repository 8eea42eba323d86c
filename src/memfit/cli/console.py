"""The console that commands write their tables to."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from memfit.listeners.printable_console import PrintableConsole

_LEAST_WIDTH = 40
"""What is narrower is no terminal that someone reads: COLUMNS=0, say."""
_USUAL_WIDTH = 80


class StdoutConsole(PrintableConsole):
    """Write to standard output and let ``main`` handle a reader that has gone."""

    def __init__(self) -> None:
        """Set up a console of a width that makes sense."""
        super().__init__(width=_width())

    def on_broken_pipe(self) -> NoReturn:
        """Hand the error on; rich would end the program with exit code 1."""
        raise BrokenPipeError


def _width() -> int | None:
    """Return a width in the place of one that makes no sense; None leaves it to the terminal."""
    said = os.environ.get("COLUMNS", "")
    if not said or (said.isdecimal() and int(said) >= _LEAST_WIDTH):
        return None
    try:
        return max(_LEAST_WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):
        return _USUAL_WIDTH
