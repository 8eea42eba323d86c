"""What is shown in a terminal, as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def rendered(renderable: RenderableType, width: int = 80) -> str:
    """Render as when the output is a file: no colour, no trailing spaces, at most 120 columns."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(renderable)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= min(width, 120)
    return "\n".join(lines).strip("\n")
