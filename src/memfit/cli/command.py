"""What a command is.

A command's file has the name that is typed after ``memfit``; ``cli/main.py`` lists it. The file
defines one class and binds an instance of it to ``COMMAND``. The class docstring is the text of
``--help``. Whatever is slow to import (torch, rich tables, the planner) is imported inside ``run``,
so that ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console


class Command(Protocol):
    """One command of ``memfit``."""

    example: str
    """A command line that works, shown in the help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments; imports nothing slow."""

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Do the work, show it on ``console`` and give the exit code.

        Exit codes: 0 done or fits, 1 error, 2 usage, 3 no plan fits. An error is raised as a
        ``MemfitError``, which carries its own exit code.
        """


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every command has."""
    parser.add_argument(
        "--json", action="store_true", help="write one JSON value to standard output instead"
    )


def write_json(data: object) -> None:
    """Write a JSON value to standard output, without the line breaks that a console adds.

    Raises:
        TypeError: if a part of it is no plain JSON value.
        ValueError: if a number is infinite or undefined, which JSON cannot say.
    """
    write_json_text(json_text(data))


def write_json_text(text: str) -> None:
    """Write what ``json_text`` gave where ``write_json`` would."""
    out = _ANSWERS_GO_TO[-1] if _ANSWERS_GO_TO else sys.stdout
    out.write(text)


def json_text(data: object) -> str:
    """Return a JSON value as the text of a file.

    Raises:
        TypeError: if a part of it is no plain JSON value.
        ValueError: if a number is infinite or undefined, which JSON cannot say.
    """
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


_ANSWERS_GO_TO: list[TextIO] = []


@contextmanager
def prints_aside() -> Iterator[None]:
    """Keep standard output for ``write_json``: what code of the user's prints goes to the other."""
    _ANSWERS_GO_TO.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _ANSWERS_GO_TO.pop()
