"""``memfit train``: one of the systems that ship with memfit, inside a budget."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from memfit.errors import PeakAboveBudgetError

from .command import Command, add_json_argument, write_json
from .installed_workloads import workloads_module

if TYPE_CHECKING:
    from rich.console import Console


class TrainCommand:
    """Train one of the systems that ship with memfit, inside a memory budget.

    `memfit train WORKLOAD --help` lists the flags of a workload. With --json the last thing written
    to standard output is one JSON object: final metrics, predicted and measured peak, and the run
    folder; progress goes to standard error. A run whose measured peak is above its budget writes
    it too, with "is_within_budget": false, and ends with exit code 3.
    """

    example = "memfit train conve --dataset umls --output-dir runs/umls --budget-fraction 0.75"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare one parser per workload."""
        workloads = workloads_module()
        parsers = parser.add_subparsers(
            title="workloads", dest="workload", metavar="WORKLOAD", required=True
        )
        for name in workloads.workload_names():
            workload = workloads.load_workload(name)
            own = parsers.add_parser(
                name, help=workload.summary, description=workload.summary, allow_abbrev=False
            )
            workload.add_arguments(own)
            if "--json" not in own._option_string_actions:
                add_json_argument(own)
            own.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Train, and end with the result."""
        from memfit.listeners.printable_console import PrintableConsole

        workload = workloads_module().load_workload(args.workload)
        shown_on = PrintableConsole(file=sys.stderr) if args.json else console
        try:
            result = workload.run(args, shown_on)
        except PeakAboveBudgetError as error:
            if args.json:
                write_json(error.result)
            raise
        if args.json:
            write_json(result)
        return 0


COMMAND: Command = TrainCommand()
