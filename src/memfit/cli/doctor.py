"""``memfit doctor``: what would break or slow a training run here, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from .command import Command, add_json_argument, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from memfit.doctor.finding import Finding


# What matters most stands last, where a terminal is read first.
_ORDER = ("not applicable", "ok", "note", "warning", "problem")


class DoctorCommand:
    """Check this machine and this installation, before a run finds out.

    Looks at torch, its driver and NCCL, at packages that exclude each other, compilers, builds of
    bitsandbytes and DeepSpeed, locks in the extension cache, shared memory and variables. Changes
    nothing. Ends with exit code 1 when it finds a problem: something that fails when it is used.
    """

    example = "memfit doctor --json"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare ``--all`` and ``--json``."""
        parser.add_argument(
            "--all", action="store_true", help="show what is not applicable here too, and why"
        )
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Make all checks, then show them."""
        from memfit.doctor.checks import all_findings
        from memfit.doctor.finding import Status
        from memfit.doctor.this_machine import this_machine

        machine = this_machine()
        findings = tuple(all_findings(machine))
        is_ok = all(finding.status is not Status.PROBLEM for finding in findings)
        if args.json:
            host = asdict(machine.probe.host)
            write_json({"ok": is_ok, "host": host, "checks": list(map(asdict, findings))})
        else:
            left_out = set() if args.all else {Status.NOT_APPLICABLE}
            shown = [each for each in findings if each.status not in left_out]
            console.print(_table(sorted(shown, key=lambda each: _ORDER.index(each.status.value))))
            console.print(_summary(findings))
        return 0 if is_ok else 1


COMMAND: Command = DoctorCommand()


def _table(findings: Sequence[Finding]) -> Table:
    """Draw the findings, with what was needed and what to do under each."""
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in findings:
        lines = [each.found, each.needed and f"needed: {each.needed}", each.remedy]
        lines.append(each.command and f"$ {each.command}")
        status = Text(each.status.value, style=colours.get(each.status.value, "dim"))
        table.add_row(status, each.name, Text("\n".join(filter(None, lines))))
    return table


def _summary(findings: Sequence[Finding]) -> str:
    """Count what was found, in a line."""
    counts = [
        (sum(each.status.value == status for each in findings), word)
        for status, word in (
            ("problem", "problems"),
            ("warning", "warnings"),
            ("note", "notes"),
            ("ok", "in order"),
            ("not applicable", "not applicable"),
        )
    ]
    return ", ".join(f"{count} {word}" for count, word in counts)
