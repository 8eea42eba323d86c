"""``memfit tracin``: which training triples made a prediction of a trained ConvE."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from .command import Command, add_json_argument, write_json
from .installed_workloads import workloads_module

if TYPE_CHECKING:
    from rich.console import Console

_TRACIN = "conve.tracin"


class TracinCommand:
    """Trace predictions of a trained ConvE back to the training triples that made them.

    Scores are TracInCP, summed up over checkpoints: positive is helpful, negative harmful. Data and
    how it was trained are taken from the run folder that the model lies in. With --json one JSON
    object goes to standard output, and everything else to standard error. Exit codes: 0 done, 1
    something given cannot be used, 2 usage, 3 nothing fits into the budget; after Ctrl-C the same
    command goes on.
    """

    example = "memfit tracin --model-path runs/umls --max-test-triples 20 --page umls.html"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags, which the workload brings."""
        workloads_module(_TRACIN).add_arguments(parser)
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Trace, and end with what was found."""
        from memfit.listeners.printable_console import PrintableConsole

        shown_on = PrintableConsole(file=sys.stderr) if args.json else console
        result = workloads_module(_TRACIN).run(args, shown_on)
        if args.json:
            write_json(result)
        return 0


COMMAND: Command = TracinCommand()
