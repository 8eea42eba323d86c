"""Runs a command with the watch attached, and writes how it ended."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.errors import CommandNotStartedError, DataError
from memfit.journal.folder import (
    FACTS_NAME,
    OVERWRITE,
    REFUSE,
    Journal,
    JournalWriter,
    check_earlier_run,
    clear_journal,
    read_ranks,
)
from memfit.journal.records import Ending, RunFacts
from memfit.observe.processes import started_at

from .ending import Seen, ending_of, script_name
from .host_killer import HostKillerSigns, KillerSigns
from .last_words import LastWords, read_failures, read_words, words_folder
from .settings import DISABLE, WatchSettings, watched_environment
from .supervisor import end_left_behind, supervise

_MOST_FOLDERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A command that was run."""

    folder: Path
    ending: Ending


def watch_command(
    words: Sequence[str],
    *,
    folder: Path | None = None,
    budget_bytes: int | None = None,
    finds_leaks: bool = True,
    overwrite: bool = False,
    fit: Mapping[str, Any] | None = None,
    signs: KillerSigns | None = None,
) -> WatchedRun:
    """Run a command to its end, with everything that happens in it noted in a folder.

    Args:
        words: the command, as it would be typed.
        folder: where to write; by default one in ``runs`` named after the time and the script.
        budget_bytes: what every process may allocate with torch; None for no limit.
        finds_leaks: whether to look for what keeps growing.
        overwrite: whether a run that lies in the folder is replaced.
        fit: what a framework's trainer inside is planned with; None leaves trainers alone.
        signs: where the signs of the host's out-of-memory killer are looked for.

    Raises:
        UsageError: if the folder holds another run.
        CommandNotStartedError: if the command cannot be started.
    """
    if shutil.which(words[0]) is None:
        is_missing = not Path(words[0]).exists()
        reason = "there is no such program" if is_missing else "it cannot be executed"
        raise CommandNotStartedError(words[0], reason, is_missing=is_missing)
    if folder is None:
        own_folder = _new_folder(words)
    else:
        own_folder = _free_folder(folder, OVERWRITE if overwrite else REFUSE)
    settings = WatchSettings(
        folder=own_folder.resolve(), budget_bytes=budget_bytes, finds_leaks=finds_leaks, fit=fit
    )
    writer = JournalWriter(own_folder)
    words_folder(own_folder).mkdir(exist_ok=True)
    try:
        writer.begin(_facts(words, settings))
        if signs is None:
            with contextlib.closing(HostKillerSigns()) as host_signs:
                ending = _watched(words, settings, host_signs)
        else:
            ending = _watched(words, settings, signs)
        writer.end(ending)
    except CommandNotStartedError:
        (own_folder / FACTS_NAME).unlink()  # the folder holds no run
        raise
    finally:
        shutil.rmtree(words_folder(own_folder), ignore_errors=True)
    return WatchedRun(folder=own_folder, ending=ending)


def _watched(words: Sequence[str], settings: WatchSettings, signs: KillerSigns) -> Ending:
    """Run the command and tell why it ended."""
    is_disabled = os.environ.get(DISABLE) == "1"
    environment: Mapping[str, str] = os.environ
    if not is_disabled:
        environment = watched_environment(settings, os.environ)
    end = supervise(words, environment, signs)
    killer_signs = signs.found(end.last_sample)
    left_behind = _left_behind(read_words(settings.folder))
    # A command that succeeded may have left them on purpose.
    ended = end_left_behind(left_behind) if end.exit_code else ()
    seen = Seen(
        end=end,
        words=read_words(settings.folder),
        failures=read_failures(settings.folder),
        journals=_journals(settings.folder),
        killer_signs=killer_signs,
        budget_bytes=settings.budget_bytes,
        is_disabled=is_disabled,
        ended_afterwards=ended,
    )
    return ending_of(seen)


def _left_behind(words: Sequence[LastWords]) -> dict[int, int]:
    """Find training processes that are still alive, with the time at which each was started."""
    return {
        each.process_id: each.started_ticks
        for each in words
        if each.rank is not None
        and each.started_ticks is not None
        and started_at(each.process_id) == each.started_ticks
    }


def _journals(folder: Path) -> Mapping[int, Journal]:
    """Read the journals; a part that cannot be read is no reason to lose the rest."""
    try:
        return read_ranks(folder)
    except DataError:
        return {}


def _facts(words: Sequence[str], settings: WatchSettings) -> RunFacts:
    return RunFacts(
        title=script_name(words),
        command=shlex.join(words),
        device="",
        started_at=datetime.now().astimezone().isoformat(),
        process_id=os.getpid(),
        host_name=socket.gethostname(),
        budget_bytes=settings.budget_bytes,
        finds_leaks=settings.finds_leaks,
    )


def _new_folder(words: Sequence[str]) -> Path:
    """Make a folder of a name that is not taken."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{stamp}-{script_name(words)}"
    for number in range(1, _MOST_FOLDERS):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise FileExistsError(first)


def _free_folder(folder: Path, earlier_run: str) -> Path:
    """Take a folder that holds no run, or no longer.

    Raises:
        UsageError: if it holds one that is not to be replaced.
    """
    advice = "Give another --folder, or replace it with --overwrite."
    check_earlier_run(folder, earlier_run, advice)
    if earlier_run == OVERWRITE:
        clear_journal(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
