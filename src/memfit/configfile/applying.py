"""Writing a plan into configuration files: what would change, and changing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import ConfigFileError, UndoError
from memfit.units import format_seconds

from .changes import Changes, FileChange, Wishes, changes_of
from .document import read_document
from .history import Record, checksum, folder_with_history, records
from .hydra import stage_files
from .kinds import DEEPSPEED, HYDRA, Role
from .mapping import read_mapping
from .plan_settings import read_plan_settings
from .settings_files import Settings, read_settings
from .transaction import (
    Rewrite,
    common_folder,
    put_back_unfinished,
    real_file,
    unfinished_in,
    write_all,
)
from .tree import dotted

_BATCH_NAMES = {"batch_size", "accumulate_grad_batches"}
_DEEPSPEED_NAMES = {"deepspeed", "deepspeed_config_file"}
_CLOCKS_SECONDS = 60.0
"""Files that were copied together differ by less; so do the clocks of two machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What an apply does, or has done."""

    settings: tuple[Settings, ...]
    changes: Changes
    folder: Path
    """Where the history is."""
    record: Record | None = None
    """None where nothing has been written."""
    num_put_back: int = 0
    """How many earlier ones were cut off, and have been put back first."""


def apply_plan(
    plan: Path,
    configs: Sequence[Path],
    wishes: Wishes,
    mapping: Path | None = None,
    *,
    write: bool = False,
    even_if_changed: bool = False,
) -> Applied:
    """Work out what a plan changes in configuration files, and write it if asked to.

    Raises:
        ConfigFileError: if a file cannot be read, understood or changed as meant.
        PlanFileError: if the plan cannot be read.
        NoExactFactorsError: if the effective batch has no exact factors.
        UndoError: if an earlier apply was cut off and cannot be put back.
    """
    wanted = read_plan_settings(plan)
    folder = common_folder(list(configs), Path.cwd())
    num_put_back = finish_earlier(folder, write=write)
    settings = read_settings(configs, read_mapping(mapping) if mapping else None)
    if not even_if_changed:
        _check_older(plan, settings, folder)
    _check_stages(settings)
    _check_named_files(settings)
    changes = changes_of(wanted, settings, wishes)
    applied = Applied(
        settings=tuple(settings), changes=changes, folder=folder, num_put_back=num_put_back
    )
    return _written(applied) if write else _checked(applied)


def write_changes(folder: Path, files: Sequence[FileChange]) -> Record | None:
    """Write changed files as one; None where there is nothing to write."""
    rewrites = [
        Rewrite(path=each.path, before=each.document.content, after=each.content)
        for each in files
        if each.content != each.document.content
    ]
    return write_all(folder, rewrites) if rewrites else None


def history_folder(path: Path) -> Path:
    """Find the folder in which something was last applied to a path, or to files below it.

    Raises:
        UndoError: if there is none, or the last apply there was to other files.
    """
    found = folder_with_history(path)
    if found is not None:
        last = records(found)[-1]
        touched = [found.resolve() / file.path for file in last.files]
        if not any(file.is_relative_to(path.resolve()) for file in touched):
            raise UndoError(
                f"The last apply in {found} was to {', '.join(map(str, touched))}, and not to "
                f"{path.absolute()}. Name one of these, or {found}, to undo it."
            )
    if found is None:
        raise UndoError(
            f"Nothing has been applied in {path.absolute()} or above it, so there is nothing to "
            "undo. Name the folder or the file that a plan was applied to."
        )
    return found


def _written(applied: Applied) -> Applied:
    record = write_changes(applied.folder, applied.changes.files)
    return Applied(
        settings=applied.settings,
        changes=applied.changes,
        folder=applied.folder,
        record=record,
        num_put_back=applied.num_put_back,
    )


def _checked(applied: Applied) -> Applied:
    check_links(applied.folder, applied.changes.files)
    return applied


def check_links(folder: Path, files: Sequence[FileChange]) -> None:
    """Refuse at a dry run the links that writing would refuse."""
    for each in files:
        real_file(each.path, folder)


def finish_earlier(folder: Path, *, write: bool) -> int:
    """Put back what was cut off earlier, where something is to be written.

    Raises:
        UndoError: if there is such a thing and nothing may be written.
    """
    if write:
        return len(put_back_unfinished(folder))
    if unfinished_in(folder):
        raise UndoError(
            f"An earlier apply in {folder} was cut off, so that files may be old or new. "
            f"`memfit undo {folder}` puts the old ones back."
        )
    return 0


def _check_stages(settings: Sequence[Settings]) -> None:
    """Refuse stages of a curriculum that set a batch of their own, which would win.

    Raises:
        ConfigFileError: if one does.
    """
    configs = {each.parts[0].document.path for each in settings if each.kind is HYDRA}
    for config in configs:
        for file in stage_files(config):
            for key in read_document(file).tree.entries:
                if key[-1] in _BATCH_NAMES:
                    raise ConfigFileError(
                        f"this stage sets its own {dotted(key)}, which would win over the batch "
                        f"that is written into {config}. Take it out, or change it by hand",
                        file,
                    )


def _check_named_files(settings: Sequence[Settings]) -> None:
    """Refuse a DeepSpeed file that is named in a file, sets the batch too and was not given.

    Raises:
        ConfigFileError: if there is one.
    """
    given = {part.document.path.resolve() for each in settings for part in each.parts}
    for document in [part.document for each in settings for part in each.parts]:
        for key, entry in document.tree.entries.items():
            for folder in (document.path.parent, Path.cwd()):
                named = folder / str(entry.value)
                is_new = key[-1] in _DEEPSPEED_NAMES and named.resolve() not in given
                if is_new and named.is_file() and _sets_batch(named):
                    raise ConfigFileError(
                        f"{dotted(key)} names {entry.value}, which sets the batch too. Give "
                        f"{named} in the same command",
                        document.path,
                    )


def _sets_batch(path: Path) -> bool:
    """Return whether a DeepSpeed file has numbers of its own for the batch."""
    names = {
        name
        for role in (Role.MICRO_BATCH, Role.ACCUMULATION, Role.TOTAL)
        for name in DEEPSPEED.keys[role]
    }
    entries = read_document(path).tree.entries
    return any(type(entries[(name,)].value) is int for name in names if (name,) in entries)


def _check_older(plan: Path, settings: Sequence[Settings], folder: Path) -> None:
    """Refuse files that were changed after the plan was saved, unless memfit has written them.

    Raises:
        ConfigFileError: if one was.
    """
    planned_seconds = plan.stat().st_mtime
    ours = {file.after for record in records(folder) for file in record.files}
    for each in settings:
        for part in each.parts:
            document = part.document
            later_seconds = document.path.stat().st_mtime - planned_seconds
            if later_seconds > _CLOCKS_SECONDS and checksum(document.content) not in ours:
                raise ConfigFileError(
                    f"it has changed {format_seconds(later_seconds)} after {plan} was saved, so "
                    "the plan may be one for other settings. Plan again, or say "
                    "--even-if-changed if nothing that the plan depends on has changed",
                    document.path,
                )
