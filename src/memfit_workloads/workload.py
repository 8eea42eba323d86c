"""What a workload is on the command line: the same shape for each of them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .flags import command_of

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training system, run by ``memfit train NAME``.

    A workload's package binds an instance to ``WORKLOAD``. Importing it is quick: torch is imported
    with its module ``train``, inside ``run``.
    """

    name: str
    """The word after ``memfit train``."""
    summary: str
    """One line for the list of workloads."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Declares the flags."""
    settings_from: Callable[[argparse.Namespace, str], Any]
    """Makes settings of the parsed flags and the command line that repeats the run."""
    package: str
    """Where its module ``train`` lies, with a function ``train(settings, console)``."""

    def run(self, args: argparse.Namespace, progress_console: Console) -> dict[str, Any]:
        """Train, showing progress on the console, and give what ``--json`` ends with.

        Returns:
            ``metrics`` by name, ``predicted_peak_bytes``, ``measured_peak_bytes``,
            ``plain_peak_bytes``, ``budget_bytes``, ``run_folder``, ``strategies``, ``numerics``
            and what the workload adds, all plain JSON values.
        """
        command = command_of(args, self.name, self.add_arguments)
        settings = self.settings_from(args, command)
        module = importlib.import_module(f"{self.package}.train")
        result: dict[str, Any] = module.train(settings, progress_console)
        return result
