"""Writes the script with which a shell completes ``memfit``'s commands, options and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from memfit.devices.catalogue import device_names
from memfit.errors import MissingExtraError

from .command import Command

_FILES = ("FILE", "SNAPSHOT")
_FOLDERS = ("DIR", "RUN")


def completion_script(shell: str, commands: Mapping[str, tuple[str, Command]]) -> str:
    """Return the script for a shell.

    Args:
        shell: bash, zsh or fish.
        commands: the line in the list and the command itself, by name.

    Raises:
        MissingExtraError: if shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise MissingExtraError("--print-completion", "shtab", "completion") from error
    parser = argparse.ArgumentParser(prog="memfit")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    chosen = parser.add_subparsers()
    for name, (summary, command) in commands.items():
        below = chosen.add_parser(name, help=summary)
        command.add_arguments(below)
        for action in below._actions:
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            if "--device" in action.option_strings:
                action.choices = device_names()
            elif metavar.startswith(_FILES):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif metavar in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell)
    return script


def write_completion(shell: str, commands: Mapping[str, tuple[str, Command]]) -> None:
    """Write the script for a shell to standard output."""
    sys.stdout.write(f"{completion_script(shell, commands)}\n")
