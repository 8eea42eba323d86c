"""The console that commands write their tables to."""

from __future__ import annotations

from typing import NoReturn

from memfit.listeners.printable_console import PrintableConsole


class StdoutConsole(PrintableConsole):
    """Write to standard output and let ``main`` handle a reader that has gone."""

    def on_broken_pipe(self) -> NoReturn:
        """Hand the error on; rich would end the program with exit code 1."""
        raise BrokenPipeError
