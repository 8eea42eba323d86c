"""Runs a command with the watch attached, and writes how it ended."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.errors import CommandNotStartedError, DataError, MemfitError, UsageError
from memfit.files import naming_full_disk, remove_own_folder
from memfit.journal.folder import (
    FACTS_NAME,
    OVERWRITE,
    REASON_NAME,
    REFUSE,
    Journal,
    JournalWriter,
    check_earlier_run,
    clear_journal,
    read_ranks,
)
from memfit.journal.folder_lock import FolderLock
from memfit.journal.records import Ending, RunFacts
from memfit.observe.processes import started_at

from .ending import Seen, ending_of, script_name
from .host_killer import HostKillerSigns, KillerSigns
from .last_words import WORDS, read_failures, read_words, words_folder
from .settings import DISABLE, WatchSettings, watched_environment
from .supervisor import end_left_behind, supervise

_MOST_FOLDERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A command that was run."""

    folder: Path
    ending: Ending
    lost: tuple[str, ...] = ()
    """What could not be written or read of its journal, and why."""


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
    own_folder = _new_folder(words) if folder is None else _made_folder(folder)
    lost: list[str] = []
    lock = _locked(own_folder, OVERWRITE if overwrite else REFUSE, lost)
    settings = WatchSettings(
        folder=own_folder.resolve(), budget_bytes=budget_bytes, finds_leaks=finds_leaks, fit=fit
    )
    try:
        writer = JournalWriter(own_folder)
        with _losing(lost, FACTS_NAME):
            words_folder(own_folder).mkdir(exist_ok=True)
            writer.begin(_facts(words, settings))
        with contextlib.closing(HostKillerSigns()) as host_signs:
            ending = _watched(words, settings, signs or host_signs, lost)
        with _losing(lost, REASON_NAME):
            writer.end(ending)
    except CommandNotStartedError:
        (own_folder / FACTS_NAME).unlink(missing_ok=True)  # the folder holds no run
        raise
    finally:
        remove_own_folder(words_folder(own_folder), WORDS)
        if lock is not None:
            lock.release(keeps_file=False)
    return WatchedRun(folder=own_folder, ending=ending, lost=tuple(lost))


@contextlib.contextmanager
def _losing(lost: list[str], what: str) -> Iterator[None]:
    """Note what could not be kept or read: a journal is no reason to lose a command's end."""
    try:
        yield
    except CommandNotStartedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the exit code is the command's
        reason = (
            str(error) if isinstance(error, MemfitError) else f"{type(error).__name__}: {error}"
        )
        lost.append(f"{what} ({reason.rstrip('.')})")


def _watched(
    words: Sequence[str], settings: WatchSettings, signs: KillerSigns, lost: list[str]
) -> Ending:
    """Run the command and tell why it ended."""
    is_disabled = os.environ.get(DISABLE) == "1"
    environment: Mapping[str, str] = os.environ
    if not is_disabled:
        environment = watched_environment(settings, os.environ)
    end = supervise(words, environment, signs)
    fit = settings.fit
    budget_bytes = fit["budget"] if fit else settings.budget_bytes
    seen = Seen(end=end, journals={}, budget_bytes=budget_bytes, is_disabled=is_disabled, fit=fit)
    with _losing(lost, "what the processes have left"):
        seen = _with_what_is_left(seen, settings.folder, signs)
    with _losing(lost, "why it ended"):
        return ending_of(seen)
    return ending_of(Seen(end=end, journals={}, budget_bytes=settings.budget_bytes))


def _with_what_is_left(seen: Seen, folder: Path, signs: KillerSigns) -> Seen:
    """Read what the processes of a command have left."""
    killer_signs = signs.found(seen.end.last_sample)
    # Training processes that are still alive, with the time at which each was started.
    left_behind = {
        each.process_id: each.started_ticks
        for each in read_words(folder)
        if each.rank is not None
        and each.started_ticks is not None
        and started_at(each.process_id) == each.started_ticks
    }
    # A command that succeeded may have left them on purpose.
    ended = end_left_behind(left_behind) if seen.end.exit_code else ()
    return replace(
        seen,
        words=read_words(folder),
        failures=read_failures(folder),
        journals=_journals(folder),
        killer_signs=killer_signs,
        ended_afterwards=ended,
    )


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
            with naming_full_disk(path):
                path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except PermissionError as error:
            raise DataError(str(path), f"{error.strerror}. Give a place with --folder.") from None
    raise FileExistsError(first)


def _made_folder(folder: Path) -> Path:
    """Make a folder that was asked for, if it is not there.

    Raises:
        DataError: if it cannot be made.
    """
    try:
        with naming_full_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        reason = f"it cannot be used as a folder ({error.strerror}). Give another --folder."
        raise DataError(str(folder), reason) from None
    return folder


def _locked(folder: Path, earlier_run: str, lost: list[str]) -> FolderLock | None:
    """Hold a folder that holds no run, or no longer; None where it cannot be held.

    Raises:
        UsageError: if it holds one that is not to be replaced, or one that still goes on.
    """
    lock = None
    try:
        lock = FolderLock(folder)
    except OSError as error:  # a full disk is no reason to start nothing
        lost.append(f"the lock of the folder ({str(error).rstrip('.')})")
    try:
        advice = "Give another --folder, or replace it with --overwrite."
        check_earlier_run(folder, earlier_run, advice)
    except UsageError:
        if lock is not None:
            lock.release(keeps_file=False)
        raise
    if earlier_run == OVERWRITE:
        clear_journal(folder)
    return lock
