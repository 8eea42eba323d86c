"""``memfit apply``: a plan written into configuration files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .command import Command, add_json_argument, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.configfile.applying import Applied
    from memfit.configfile.batches import Batch


class ApplyCommand:
    """Write a plan into the configuration files of a trainer, reversibly.

    Shows a unified diff; nothing is written without --yes. Only the values that the plan sets are
    changed; comments, order and layout stay. Micro-batch and accumulation are written together, so
    that micro-batch x devices x accumulation stays the effective batch; where that has no exact
    factors the exit code is 3 and the nearest are named. Several files are written as one: all or
    none. Each has a numbered backup beside it, and `memfit undo` puts it back byte for byte.
    """

    example = "memfit apply plan.yaml conf/config.yaml --devices 2 --yes"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the plan, the files, and what may differ."""
        parser.add_argument("plan", metavar="PLAN", help="a plan of `memfit plan --save`")
        parser.add_argument(
            "configs",
            metavar="CONFIG",
            nargs="+",
            help="a YAML, JSON, TOML or Python file, or a folder with a config.yaml",
        )
        numbers = {
            "--devices": "how many devices train together, where the files do not say",
            "--micro-batch": "a smaller micro-batch than the plan's",
            "--effective-batch": "another effective batch than the files say",
        }
        for flag, text in numbers.items():
            parser.add_argument(flag, metavar="N", type=whole_number, help=text)
        parser.add_argument(
            "--mapping", metavar="FILE", help="a TOML or YAML file that says which key holds what"
        )
        parser.add_argument(
            "--even-if-changed",
            action="store_true",
            help="take files that were changed after the plan was saved",
        )
        parser.add_argument("--yes", action="store_true", help="write the files")
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Show what changes, and write it if asked to."""
        from pathlib import Path

        from memfit.configfile.applying import apply_plan
        from memfit.configfile.changes import Wishes

        wishes = Wishes(
            num_devices=args.devices,
            micro_batch_size=args.micro_batch,
            effective_size=args.effective_batch,
        )
        applied = apply_plan(
            Path(args.plan),
            [Path(each) for each in args.configs],
            wishes,
            Path(args.mapping) if args.mapping else None,
            write=args.yes,
            even_if_changed=args.even_if_changed,
        )
        if args.json:
            write_json(_as_json(applied))
        else:
            _show(applied, console, is_written=args.yes)
        return 0


COMMAND: Command = ApplyCommand()


def whole_number(text: str) -> int:
    """Read a whole number of at least one, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        msg = f"{text!r} is no whole number of at least 1"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _as_json(applied: Applied) -> dict[str, Any]:
    """Return what changes as plain values."""
    from dataclasses import asdict

    from memfit.configfile.changes import rows_of

    changes = applied.changes
    return {
        "files": rows_of(changes.files),
        "kinds": [each.kind.name for each in applied.settings],
        "batch_before": _batch_json(changes.before),
        "batch_after": _batch_json(changes.after),
        "left_out": [asdict(each) for each in changes.left_out],
        "notes": list(changes.notes),
        "folder": str(applied.folder),
        "is_written": applied.record is not None,
        "backups": _backups(applied),
        "num_put_back": applied.num_put_back,
    }


def _batch_json(batch: Batch | None) -> dict[str, int] | None:
    if batch is None:
        return None
    return {
        "micro_batch_size": batch.micro_batch_size,
        "accumulation": batch.accumulation,
        "num_devices": batch.num_devices,
        "effective_size": batch.effective_size,
    }


def _backups(applied: Applied) -> list[str]:
    from memfit.configfile.transaction import backups_of

    if applied.record is None:
        return []
    return [str(path) for path in backups_of(applied.record, applied.folder).values()]


def _show(applied: Applied, console: Console, *, is_written: bool) -> None:
    """Show the diff, the batch, what is left out, and what to do next."""
    changes = applied.changes
    lines = []
    if applied.num_put_back:
        lines.append("An earlier apply was cut off; what it had left is put back.")
    lines += [each.diff() for each in changes.files]
    if changes.after is not None and changes.before is not None:
        lines.append(
            "micro-batch x devices x accumulation = effective batch: "
            f"{changes.before.product()} becomes {changes.after.product()}"
        )
    lines += [f"Left out: {each.strategy} ({each.reason})." for each in changes.left_out]
    if changes.left_out:
        lines.append("Until what is left out is done too, the step takes more than was predicted.")
    lines += changes.notes
    if not changes.files:
        lines.append("Nothing to change: the files say so already.")
    elif applied.record is not None:
        lines += [f"Backup: {path}" for path in _backups(applied)]
        lines.append(f"Written. `memfit undo {applied.folder}` puts it back.")
    elif not is_written:
        lines.append("Nothing has been written; --yes writes it.")
    console.out("\n".join(lines), highlight=False)  # as it is: patch reads tabs and line ends
