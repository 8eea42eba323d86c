"""``memfit report``: what a run went through, read from its folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .command import Command, add_json_argument, write_json

if TYPE_CHECKING:
    from rich.console import Console


class ReportCommand:
    """Show what a run went through, from the journal in its folder.

    The run may have ended, be going on, or have been killed. A page, report.html, and its pictures
    are written into the folder. The page needs nothing but itself.
    """

    example = "memfit report runs/resnet"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the folder."""
        parser.add_argument("run", metavar="RUN", help="the folder of a run")
        parser.add_argument(
            "--no-page", action="store_true", help="write nothing into the folder, only show"
        )
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Read the journal, write the page and show a summary."""
        from pathlib import Path

        from memfit.reports.run_contents import read_report
        from memfit.reports.run_page import write_run_page
        from memfit.reports.run_text import run_summary

        report = read_report(Path(args.run))
        files = [] if args.no_page else write_run_page(report)
        if args.json:
            write_json({**report.to_json(), "files": [str(path) for path in files]})
        else:
            console.print(run_summary(report, files))
        return 0


COMMAND: Command = ReportCommand()
