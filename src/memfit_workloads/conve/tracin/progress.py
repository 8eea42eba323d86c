"""Where a tracing keeps its progress, how that is shown, and how Ctrl-C stops it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from memfit import influence
from memfit.errors import DataError, OtherScanError
from memfit.files import foreign_file, remove_own_folder, write_atomically
from memfit.journal.plain_text import parsed_json, read_plain
from memfit_workloads.interruption import InterruptWatch

from .settings import TracinSettings

if TYPE_CHECKING:
    from rich.console import Console

_DEFINITION = "tracin.json"
_OWN = re.compile(
    r"(self/)?(\.?(tracin\.json|progress\.npz|scores-\d+\.npy)(\..*part)?|scores-\d+\.part)"
)
"""What a tracing writes into its folder."""
Listener = Callable[[influence.Progress], None]


@contextmanager
def kept_folder(settings: TracinSettings, definition: Mapping[str, Any]) -> Iterator[Path | None]:
    """Give the folder that progress is kept in; None where there is nothing to write either.

    The one beside the first output is removed once all is done.

    Raises:
        OtherScanError: if the folder holds a scan by another definition.
        DataError: if it cannot be used.
    """
    outputs = settings.files.each()
    folder = settings.folder
    if folder is None and outputs:
        folder = outputs[0].with_name(f"{outputs[0].name}.progress")
    if folder is not None:
        _claim(folder, definition)
    yield folder
    if folder is not None and settings.folder is None:
        remove_own_folder(folder, _OWN)


def _claim(folder: Path, definition: Mapping[str, Any]) -> None:
    """Note in the folder which scan it is for, or see that it is for this one."""
    path = folder / _DEFINITION
    foreign = foreign_file(folder, _OWN)
    if foreign is not None:
        reason = f"it holds {foreign.name}, which no tracing has written. Give another --folder"
        raise DataError(str(folder), reason)
    try:
        if not path.exists():
            write_atomically(path, json.dumps(definition, indent=2) + "\n")
            return
        there = parsed_json(read_plain(path))
        differing = [name for name in definition if there.get(name) != definition[name]]
    except OSError as error:
        reason = f"progress cannot be kept there ({error.strerror}). Give another --folder"
        raise DataError(str(folder), reason) from None
    except (ValueError, AttributeError):
        raise DataError(str(path), "it does not say whose progress this is. Remove it") from None
    if differing:
        name = differing[0]
        difference = f"{name} is {there.get(name)!s:.80} there and {definition[name]!s:.80} here"
        raise OtherScanError(str(folder), difference)


@contextmanager
def watched(console: Console, folder: Path | None) -> Iterator[Listener]:
    """Show how far a scan is, and stop it between two steps on Ctrl-C."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with InterruptWatch() as watch, Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tracing", total=None)

        def listen(progress: influence.Progress) -> None:
            bar.update(
                task,
                description=progress.checkpoint,
                completed=progress.num_done,
                total=progress.num_steps,
            )
            if watch.is_requested:
                raise KeyboardInterrupt

        try:
            yield listen
        except KeyboardInterrupt:
            kept = "Nothing was written."
            if folder is not None:
                kept += f" The same command goes on with what {folder} has."
            console.print(f"Stopped. {kept}", soft_wrap=True, markup=False)
            raise
