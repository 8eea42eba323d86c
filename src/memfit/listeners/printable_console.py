"""The console that everything is shown on: no text can command the terminal behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from memfit.journal.printable import printable


class PrintableConsole(Console):
    """Write as rich does, with control characters of any text spelled out.

    Square brackets mean nothing in a plain string, and digits have no colours: either may be a part
    of a name.
    """

    def __init__(self, **options: Any) -> None:
        """Set up a console; the options are those of rich."""
        super().__init__(**{"highlight": False, "markup": False, **options})

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Turn into text what is about to be written; rich's own controls are marked as such."""
        return super()._render_buffer(
            each if each.control else each._replace(text=printable(each.text)) for each in buffer
        )
