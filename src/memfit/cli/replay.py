"""``memfit replay``: why memory ran out, from a snapshot of the allocator or a run's journal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .command import Command, add_json_argument, write_json

if TYPE_CHECKING:
    from rich.console import Console


class ReplayCommand:
    """Say why memory ran out, and which allocator settings would have survived it.

    SNAPSHOT is a file of torch.cuda.memory._dump_snapshot (also .gz, JSON, or a page of
    torch.cuda._memory_viz), or the folder of a run with a journal. Nothing in the file is run, and
    no GPU is needed. What held the memory is shown by source line, what was free and of no use, and
    the recorded allocations are replayed under other settings.
    """

    example = "memfit replay snapshot.pickle"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the file and what is to be tried."""
        parser.add_argument(
            "snapshot", metavar="SNAPSHOT", help="a snapshot's file, or the folder of a run"
        )
        parser.add_argument(
            "--device", type=int, metavar="N", help="the device, where several are in the snapshot"
        )
        parser.add_argument(
            "--limit", metavar="SIZE", help="what the allocator may hold, as in 24GiB"
        )
        parser.add_argument(
            "--settings",
            action="append",
            default=[],
            metavar="CONF",
            help="a text of PYTORCH_ALLOC_CONF to try as well; may be repeated",
        )
        parser.add_argument(
            "--max-file", metavar="SIZE", default="1GiB", help="the largest file that is read"
        )
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Read, replay, and show the answer."""
        from pathlib import Path

        from memfit.reports.replay_text import replay_report, run_replay_report
        from memfit.snapshots.files import ReadLimits
        from memfit.snapshots.replaying import replay
        from memfit.snapshots.run_folder import replay_run

        path = Path(args.snapshot)
        if path.is_dir():
            run = replay_run(path)
            found, shown = run.to_json(), run_replay_report(run)
        else:
            result = replay(
                path,
                device=args.device,
                limit_bytes=None if args.limit is None else _bytes(args.limit, "--limit"),
                settings=args.settings,
                limits=ReadLimits(max_file_bytes=_bytes(args.max_file, "--max-file")),
            )
            found, shown = result.to_json(), replay_report(result)
        if args.json:
            write_json(found)
        else:
            console.print(shown)
        return 0


def _bytes(text: str, option: str) -> int:
    from memfit.errors import UsageError
    from memfit.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        message = f"{option}: {error}."
        raise UsageError(message) from None


COMMAND: Command = ReplayCommand()
