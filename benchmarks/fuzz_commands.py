"""Command lines of words that nobody means: of commands that are carried out, and of all others."""

from __future__ import annotations

import argparse
import io
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

from fuzzed_reader import Reader, of

from memfit.cli import main as main_module
from memfit.cli.command import Command
from memfit.cli.main import COMMANDS, command_parser, main
from memfit.errors import MemfitError
from memfit_workloads import load_workload, workload_names
from memfit_workloads.flags import command_of

_NOT_CARRIED_OUT = frozenset({"calibrate", "doctor", "train", "run", "tracin"})
"""They measure, start programs or train; their words are read all the same."""
WORDS = (
    *("devices", "undo", "apply", "report", "replay", "compare", "config", "predict", "--help"),
    *("x.py", "--json", "--device", "cpu", "rtx-3060-12gb", "--budget", "1GiB", "-1", "", "--"),
    *("a:b", "x.py:j", "--batch-size", "0", "99999999999999999999", "--save", "/", "--plan"),
    *("plan.yaml", "\x1b[2J", "é"),
)


class _OnlyRead:
    """A command whose words are read and that does nothing more."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.example = command.example
        self.takes_script_arguments = getattr(command, "takes_script_arguments", False)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self._command.add_arguments(parser)

    def run(self, args: argparse.Namespace, console: object) -> int:
        del console
        if hasattr(args, "workload"):
            workload = load_workload(args.workload)
            command = command_of(args, workload.name, workload.add_arguments)
            workload.settings_from(args, command)
        return 0


@contextmanager
def _only_read() -> Iterator[None]:
    original = main_module.load_command
    main_module.load_command = lambda name: _OnlyRead(original(name))  # type: ignore[assignment]
    try:
        yield
    finally:
        main_module.load_command = original


def _carried_out(path: Path) -> None:
    """Run a command line, and see that errors are one line."""
    words = [word for word in _words_in(path) if word not in _NOT_CARRIED_OUT]
    if words:
        _check(words)


def _read(path: Path) -> None:
    """Read a command line of any command."""
    words = _words_in(path)
    if words:
        with _only_read():
            _check(words)


def _words_in(path: Path) -> list[str]:
    try:
        return shlex.split(path.read_text("utf-8", errors="surrogateescape"))
    except ValueError:
        return []


def _check(words: list[str]) -> None:
    told = io.StringIO()
    with redirect_stderr(told), redirect_stdout(io.StringIO()):
        code = main(words)
    errors = [line for line in told.getvalue().splitlines() if "error:" in line]
    if code and errors and "unexpected" in errors[-1]:
        raise AssertionError(errors[-1])
    if code:
        raise MemfitError(errors[-1] if errors else "refused")


@cache
def _every_command() -> tuple[bytes, ...]:
    """Write a command line with all flags for each command, and each system that is trained."""
    lines = []
    for name in COMMANDS:
        parser = command_parser(name, main_module.load_command(name))
        if name != "train":
            lines.append([name, *_flags_of(parser)])
    for name in workload_names():
        parser = argparse.ArgumentParser()
        load_workload(name).add_arguments(parser)
        lines.append(["train", name, *_flags_of(parser)])
    return tuple(shlex.join(line).encode() for line in lines)


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield every flag with a value that it may have."""
    for action in parser._actions:
        if action.dest in {"help", "debug", "version"}:
            continue
        if action.option_strings:
            yield action.option_strings[-1]
        if action.nargs != 0:
            choices = [*action.choices] if action.choices else []
            yield str(choices[0] if choices else action.default or "1")


COMMAND_READERS = (
    Reader(
        title="command line",
        name="words",
        read=_carried_out,
        contents=of(
            *(shlex.join(WORDS[n::7]).encode() for n in range(7)), shlex.join(WORDS).encode()
        ),
    ),
    Reader(title="words of any command", name="words", read=_read, contents=_every_command),
)
