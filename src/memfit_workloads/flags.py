"""Flags that several workloads have. Imports no torch."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.units import parse_bytes


def add_memory_flags(group: Any) -> None:
    """Declare where to train, and how much memory it may take."""
    group.add_argument("--device", help="cpu or cuda; default: CUDA where there is any")
    group.add_argument("--no-gpu", action="store_true", help="train on the CPU")
    budget = group.add_mutually_exclusive_group()
    budget.add_argument("--budget", type=size, metavar="SIZE", help="such as 512MiB or 8GB")
    budget.add_argument(
        "--budget-fraction",
        type=positive,
        metavar="F",
        help="budget as a fraction of the predicted peak without any strategy",
    )
    group.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="let the planner use a strategy that changes the numerics; may be repeated",
    )
    group.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help="a strategy that the plan has to have, whatever it does to the numerics; may be "
        "repeated",
    )
    group.add_argument("--plan", type=Path, metavar="FILE", help="run this saved plan")


def command_of(
    args: argparse.Namespace,
    workload: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
) -> str:
    """Write the command line that repeats a run, with the flags that differ from their defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    words = ["memfit", "train", workload]
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value == action.default:
            continue
        if not action.option_strings:  # a word that says what is done
            words.append(str(value))
            continue
        flag = max(action.option_strings, key=len)
        if value is True:
            words.append(flag)
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [flag, str(each)]
    return shlex.join(words)


def whole(lowest: int) -> Callable[[str], int]:
    """Make a reader of whole numbers from ``lowest`` up."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            msg = f"{text!r} is no whole number of at least {lowest}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return read


def _number(is_good: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """Make a reader of finite numbers of which something is true."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not is_good(value):
            msg = f"{text!r} is no number {what}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return read


positive = _number(lambda value: value > 0, "above 0")
"""Reads a number above 0."""
not_negative = _number(lambda value: value >= 0, "of at least 0")
"""Reads a number of at least 0."""
fraction = _number(lambda value: 0 <= value < 1, "from 0 to below 1")
"""Reads a number from 0 to below 1."""


def size(text: str) -> int:
    """Read a number of bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
