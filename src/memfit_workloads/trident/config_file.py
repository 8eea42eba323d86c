"""``--config``: a YAML file that says what flags say. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from memfit.errors import DataError, UsageError
from memfit.journal.plain_text import read_plain
from memfit.journal.plain_yaml import parsed_yaml

from .shipped_files import found


class _FileParser(argparse.ArgumentParser):
    """Read flags that a file says, and blame the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.path = path

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the file.

        Raises:
            UsageError: always.
        """
        msg = f"--config {self.path}: {message}. Its names are those of the flags, without dashes."
        raise UsageError(msg)


def with_config(
    args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Fill in what the flags leave open with what the file says.

    Raises:
        DataError: if the file cannot be read as YAML.
        UsageError: if it says what no flag says, or what contradicts one.
    """
    if args.config is None:
        return args
    path, _ = found(args.config)
    parser = _FileParser(path)
    add_arguments(parser)
    words: list[str] = []
    for name, value in _read(path).items():
        words += _words(str(name), value, parser)
    told = parser.parse_args(words)
    defaults = parser.parse_args([])
    filled = argparse.Namespace(**vars(args))
    for name, default in vars(defaults).items():
        if getattr(args, name) == default and not _opposite_is_given(args, name):
            setattr(filled, name, getattr(told, name))
    return filled


def _read(path: Path) -> dict[str, Any]:
    """Read a mapping."""
    try:
        content = parsed_yaml(read_plain(path))
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}). Check the path and its permissions."
        raise DataError(str(path), reason) from None
    except ValueError as error:
        reason = f"it is no YAML ({error})."
        raise DataError(str(path), reason) from None
    if not isinstance(content, dict):
        reason = f"found {type(content).__name__}, needed lines such as `batch_size: 2`."
        raise DataError(str(path), reason)
    return content


def _words(name: str, value: Any, parser: argparse.ArgumentParser) -> list[str]:
    """Write an entry as the words of a command line."""
    flag = f"--{name.replace('_', '-')}"
    if flag == "--config":
        parser.error("a file cannot name another file")
    if value is None:
        return []
    if isinstance(value, bool):
        opposite = f"--no-{flag.removeprefix('--').removeprefix('use-')}"
        if value:
            return [flag]
        return [opposite] if opposite in parser._option_string_actions else []
    return [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]


_OPPOSITES = (
    ("pin_memory", "no_pin_memory"),
    ("use_fp16", "no_fp16"),
    ("checkpoint_every_layer", "no_checkpointing"),
    ("use_bf16", "use_fp16"),
    ("batch_size", "plan"),
    ("grad_accum_steps", "plan"),
    ("budget", "budget_fraction"),
    ("budget", "max_gpu_mem"),
    ("budget_fraction", "max_gpu_mem"),
)


def _opposite_is_given(args: argparse.Namespace, name: str) -> bool:
    """Return whether the command line says the opposite of what a file would say."""
    if name == "overwrite" and args.output_dir is not None:
        return True  # a file may replace the run in the folder that it names, and no other
    partners = {b for a, b in _OPPOSITES if a == name} | {a for a, b in _OPPOSITES if b == name}
    return any(getattr(args, partner) for partner in partners)
