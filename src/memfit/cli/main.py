"""The entry point: finds the command, runs it, and turns every error into one line.

Commands are listed here by name and imported only when asked for, so ``memfit --help`` needs
neither torch nor rich. This is the only place that catches every exception.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from memfit.errors import MemfitError, MemfitWarning
from memfit.journal.printable import printable

from .command import Command, prints_aside

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells expect
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


COMMANDS = {
    "predict": "predict the peak memory of a step without running it",
    "job": "write a memfit.Job out of a training script, and prove it",
    "table": "predict many batch sizes, settings and plans at once",
    "plan": "find the fastest exact way to fit a budget",
    "apply": "write a plan into configuration files, reversibly",
    "undo": "put back what the last apply has replaced",
    "config": "work out a training's settings for a card, and write them",
    "measure": "run a step here and measure its peak memory",
    "compare": "say which lines moved the peak between two versions",
    "verify": "prove on the job itself that a plan keeps the results",
    "run": "run any training command, watched and inside a budget",
    "train": "train a system that ships with memfit",
    "tracin": "find the training triples that made a prediction",
    "report": "show what a run went through",
    "replay": "say why memory ran out, and what would have survived it",
    "devices": "list devices and where each figure is from",
    "calibrate": "measure this machine's card and keep its figures",
    "doctor": "find what would break or slow a run on this machine",
}
"""The commands, each with its line in the list; each is a module of this package."""
SHELLS = ("bash", "zsh", "fish")
_LIBRARIES_LOGS = ("torchao", "bitsandbytes", "torch.utils._pytree")
"""What these warn of while they are imported is no concern of the answer; `memfit doctor` says what
does not work."""
_UNKNOWN = "unrecognized arguments"
_LIKELY = 0.75
"""How similar an option is to what was typed, at least; ``--budget`` and ``--debug`` are less."""
_MOST_CHARACTERS = 300
"""Of a file's name, in an error."""
_COMPLETION = "--print-completion"
_LOAD_A_JOB = ("measure", "plan", "predict", "table", "verify")
"""Commands that run the functions of a user's file here, whatever these print."""


_MOST_CHARACTERS = 1000
_MOST_OPTIONS = 2000
"""Before a command's ``--``: argparse takes a time that grows with the square of their number."""


class _ParserDoneError(Exception):
    """Carry the exit code of a parser that has shown its help or refused its arguments."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Parser(argparse.ArgumentParser):
    """Parse without ending the program, so that ``main`` always returns an exit code."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Show the message and hand the exit code to ``main``."""
        if message:
            sys.stderr.write(printable(message))
        raise _ParserDoneError(status)

    def error(self, message: str) -> NoReturn:
        """Show what is wrong, in a line that can be read, with the option that was likely meant."""
        unknown = (word.partition("=")[0] for word in message.split() if word.startswith("--"))
        near = [
            get_close_matches(word, self._option_string_actions, n=1, cutoff=_LIKELY)
            for word in unknown
        ]
        if message.startswith(_UNKNOWN) and any(near):
            message += f"; did you mean {next(filter(None, near))[0]}?"
        is_long = len(message) > _MOST_CHARACTERS
        super().error(f"{message[:_MOST_CHARACTERS]} ..." if is_long else message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``memfit`` with these words (the program's own by default); gives the exit code."""
    # Torch warns whenever a block from before a measurement is freed; read before its import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in _LIBRARIES_LOGS:
        logging.getLogger(name).setLevel(logging.ERROR)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _printable_warnings():
            exit_code = _run(words)
        sys.stdout.flush()
    except _ParserDoneError as done:
        return done.exit_code
    except MemfitError as error:
        _write_error(str(error), words)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit; it needs somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        _write_error(_describe_unexpected(error, words), words)
        return EXIT_ERROR
    return exit_code


@contextmanager
def _printable_warnings() -> Iterator[None]:
    """Have warnings, which may name a user's modules, spell out control characters."""
    written = warnings.formatwarning

    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if issubclass(category, MemfitWarning):  # a place in memfit says nothing to a reader
            return printable(f"memfit: warning: {' '.join(str(message).split())}\n")
        return printable(written(message, category, filename, lineno, line))

    warnings.formatwarning = formatwarning
    try:
        yield
    finally:
        warnings.formatwarning = written


def load_command(name: str) -> Command:
    """Import a command by its name."""
    command: Command = importlib.import_module(f".{name}", __package__).COMMAND
    return command


def command_parser(name: str, command: Command) -> argparse.ArgumentParser:
    """Build the parser of one command, with its docstring and example as help."""
    parser = _Parser(
        prog=f"memfit {name}",
        description=inspect.getdoc(type(command)),
        epilog=f"example:\n  {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    _add_debug_argument(parser)
    return parser


def _run(words: Sequence[str]) -> int:
    """Find the command among the words and run it with the words that follow it."""
    position = _position_of_command(words)
    parser = _main_parser()
    parser.parse_args(words[:position])
    if position == len(words):
        parser.error("a command is needed; `memfit --help` lists them")
    name = words[position]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean `memfit {near[0]}`?" if near else "`memfit --help` lists them"
        parser.error(f"there is no command {name!r}; {hint}")
    command = load_command(name)
    own, script_arguments = words[position + 1 :], []
    loads_a_job = name in _LOAD_A_JOB
    if (loads_a_job or getattr(command, "takes_script_arguments", False)) and "--" in own:
        end = own.index("--")
        own, script_arguments = own[:end], list(own[end + 1 :])
    num_options = sum(word.startswith("-") for word in takewhile("--".__ne__, own))
    if num_options > _MOST_OPTIONS:
        parser.error(f"{num_options:,} options are given; at most {_MOST_OPTIONS:,} are read")
    args = command_parser(name, command).parse_args(own)
    args.script_arguments = script_arguments
    from memfit.listeners.printable_console import StdoutConsole

    argv = [(args.job or "").partition(":")[0], *script_arguments] if loads_a_job else sys.argv
    if loads_a_job and args.job:
        from memfit.job import path_of

        path_of(args.job)  # before torch is imported, which takes seconds
    aside = prints_aside() if loads_a_job and args.json else nullcontext()
    with patch.object(sys, "argv", argv), aside:
        return command.run(args, StdoutConsole())


def _position_of_command(words: Sequence[str]) -> int:
    """Return where the command is; an option before it may take a word."""
    for position, word in enumerate(words):
        is_value = position > 0 and words[position - 1] == _COMPLETION
        if not word.startswith("-") and not is_value:
            return position
    return len(words)


def _main_parser() -> argparse.ArgumentParser:
    """Build the parser of the words before the command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    parser = _Parser(
        prog="memfit",
        usage="memfit [--help] [--version] [--debug] COMMAND ...",
        description="Make a PyTorch training step fit the memory there is.",
        epilog="\n".join(
            ["commands:", *lines, "", "`memfit COMMAND --help` explains one, with an example."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, help="show the version and exit")
    parser.add_argument(
        _COMPLETION,
        metavar="SHELL",
        choices=SHELLS,
        action=_PrintCompletion,
        help="write what has a shell complete commands, options and files: bash, zsh or fish",
    )
    _add_debug_argument(parser)
    return parser


class _ShowVersion(argparse.Action):
    """Show the version, which is looked up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Write ``memfit`` and its version to standard output."""
        from memfit._version import __version__

        sys.stdout.write(f"memfit {__version__}\n")
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Write a shell's completion; all commands are imported for it, none of them torch."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, values: object, *_: object
    ) -> None:
        """Write the script to standard output."""
        from .completion import write_completion

        commands = {name: (summary, load_command(name)) for name, summary in COMMANDS.items()}
        write_completion(str(values), commands)
        parser.exit()


def _add_debug_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--debug``; it is accepted before and after the command."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _is_debugging(words: Sequence[str]) -> bool:
    """Return whether tracebacks are wanted; words after ``--`` belong to another program."""
    own = words[: words.index("--")] if "--" in words else words
    return "--debug" in own or os.environ.get("MEMFIT_DEBUG") == "1"


def _describe_unexpected(error: BaseException, words: Sequence[str]) -> str:
    """Name an error that memfit did not foresee, and how to see where it comes from."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        from memfit.files import full_disk

        return str(full_disk(Path(str(error.filename or Path.cwd() / "*")), error))
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{str(error.filename)[:_MOST_CHARACTERS]}: {error.strerror}."
    advice = "" if _is_debugging(words) else " Run again with --debug to see where it comes from."
    return f"unexpected {type(error).__name__}: {error}.{advice}"


def _write_error(message: str, words: Sequence[str]) -> None:
    """Write an error as one line on standard error, after the traceback if that is wanted."""
    if _is_debugging(words):
        sys.stderr.write(printable(traceback.format_exc()))
    sys.stderr.write(printable(f"memfit: error: {' '.join(message.split())}\n"))
