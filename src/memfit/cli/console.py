"""The console that commands write their tables to."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class StdoutConsole(Console):
    """Write to standard output and let ``main`` handle a reader that has gone."""

    def __init__(self) -> None:
        """Set up a console without highlighting."""
        # Highlighting would colour digits inside names such as rtx-4090.
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> NoReturn:
        """Hand the error on; rich would end the program with exit code 1."""
        raise BrokenPipeError
