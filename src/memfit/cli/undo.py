"""``memfit undo``: what the last apply has replaced, put back."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .command import Command, add_json_argument, write_json

if TYPE_CHECKING:
    from rich.console import Console


class UndoCommand:
    """Put back what the last `memfit apply` or `memfit config --apply` has replaced.

    Files become what they were, byte for byte, all or none, and their backups are removed. A file
    that was changed since is not touched, unless --even-if-changed says so. What an apply that was
    cut off has left is put back too. Doing it again undoes the apply before.
    """

    example = "memfit undo conf"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the folder."""
        parser.add_argument(
            "path",
            metavar="PATH",
            nargs="?",
            default=".",
            help="a folder or a file that a plan was applied to; by default this folder",
        )
        parser.add_argument(
            "--even-if-changed",
            action="store_true",
            help="put files back that were changed since, which loses these changes",
        )
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Put the files back and name them."""
        from pathlib import Path

        from memfit.configfile.applying import history_folder
        from memfit.configfile.transaction import undo_last

        folder = history_folder(Path(args.path))
        record = undo_last(folder, even_if_changed=args.even_if_changed)
        files = [str(folder / file.path) for file in record.files]
        if args.json:
            write_json({"folder": str(folder), "files": files, "number": record.number})
        else:
            for file in files:
                console.print(f"Put back {file}.", markup=False, soft_wrap=True)
        return 0


COMMAND: Command = UndoCommand()
