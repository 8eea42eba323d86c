"""What a workload is: the same shape for each of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Workload(Protocol):
    """One training system, run by ``memfit train NAME``.

    A workload's package binds an instance to ``WORKLOAD``. Importing it is quick: torch is imported
    inside ``run``.
    """

    name: str
    """The word after ``memfit train``."""
    summary: str
    """One line for the list of workloads."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags; imports nothing slow."""

    def run(self, args: argparse.Namespace, progress_console: Console) -> dict[str, Any]:
        """Train, showing progress on the console, and give what ``--json`` ends with.

        Returns:
            ``metrics`` by name, ``predicted_peak_bytes``, ``measured_peak_bytes``,
            ``plain_peak_bytes``, ``budget_bytes``, ``run_folder``, ``strategies``, ``numerics``
            and what the workload adds, all plain JSON values.
        """
