"""The document's two functions, for scripts and notebooks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError, UsageError
from memfit.listeners.printable_console import PrintableConsole

from .arguments import add_arguments

if TYPE_CHECKING:
    from memfit import Run


def train_model(**options: Any) -> dict[str, Any]:
    """Train ConvE, and return what ``memfit train conve --json`` ends with.

    Args:
        options: the command's flags, with underscores: ``train="train.txt", batch_size=512,
            use_mixed_precision=True``. A list gives a flag several times.

    Raises:
        UsageError: if there is no such flag, or flags contradict each other.
        MemfitError: as the command does.
    """
    from . import WORKLOAD

    parser = _Parser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in parser._option_string_actions:
            raise UsageError(f"train_model has no {name}: memfit train conve has no {flag}.")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            values = value if isinstance(value, (list, tuple)) else (value,)
            words += [word for each in values for word in (flag, str(each))]
    return WORKLOAD.run(parser.parse_args(words), PrintableConsole())


def train_epoch(run: Run, batches: Iterable[Any]) -> float:
    """Train on every batch once, and return the mean of their losses.

    Args:
        run: of ``memfit.start``, which holds model, optimizer and plan.
        batches: such as the job's ``batch`` gives.

    Raises:
        MemfitError: if a loss is no number, or there is no batch.
    """
    losses = []
    for number, batch in enumerate(batches, 1):
        losses.append(float(run.step(batch).loss))
        if not math.isfinite(losses[-1]):
            msg = f"The loss is {losses[-1]} at batch {number}; lower the learning rate."
            raise MemfitError(msg)
    if not losses:
        raise MemfitError("There is no batch to train on in this epoch.")
    return sum(losses) / len(losses)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Raise what the caller of a function can catch.

        Raises:
            UsageError: always.
        """
        raise UsageError(message)
