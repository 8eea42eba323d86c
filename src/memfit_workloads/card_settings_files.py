"""Writes the settings of a card into ``conf/``: config.yaml and the stages of the curricula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.configfile.applying import check_links, finish_earlier, write_changes
from memfit.configfile.batches import Batch
from memfit.configfile.changes import Edits, FileChange, write_batch
from memfit.configfile.document import Document, read_document
from memfit.configfile.history import Record
from memfit.configfile.hydra import CURRICULUM_FOLDERS, stage_files
from memfit.configfile.kinds import Role
from memfit.configfile.settings_files import Place, Settings, read_settings
from memfit.configfile.transaction import common_folder
from memfit.configfile.tree import Insertion, Key
from memfit.errors import ConfigFileError

from .card_settings import StageSettings

_DDP = "ddp"
_NAMES = ("n_positives", "n_negatives")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written, or would be."""

    folder: Path
    files: tuple[FileChange, ...]
    record: Record | None
    notes: tuple[str, ...]


def write_settings(config: Path, stages: Sequence[StageSettings], *, write: bool) -> Written:
    """Work out what changes in ``config`` and in the stages beside it, and write it if asked to.

    Raises:
        ConfigFileError: if a file cannot be read or changed.
        UndoError: if an earlier apply was cut off and cannot be put back.
    """
    found = stage_files(config)
    folder = common_folder([config, *found], Path.cwd())
    finish_earlier(folder, write=write)
    settings = read_settings([config])
    edits = Edits()
    first = stages[0].batch
    _write_devices(edits, settings[0], first)
    write_batch(edits, settings, first)
    numbers = [file for file in found if _number(file) is not None]
    for file in numbers:
        _write_stage(edits, read_document(file), _settings_of(file, stages))
    files = edits.files()
    record = write_changes(folder, files) if write else None
    check_links(folder, files)
    return Written(
        folder=folder, files=files, record=record, notes=tuple(_notes(config, numbers, stages))
    )


def _write_devices(edits: Edits, settings: Settings, batch: Batch) -> None:
    """Have the trainer use as many devices as the batch counts on."""
    place = settings.place(Role.DEVICES)
    if place is not None:
        edits.replace(place, batch.num_devices)
        return
    accumulation = settings.place(Role.ACCUMULATION)
    if batch.num_devices == 1 or accumulation is None:
        return
    document, key = accumulation.document, accumulation.key
    edits.insert(document, Insertion(beside=key, name="devices", value=batch.num_devices))
    if (*key[:-1], "strategy") not in document.tree.entries:
        edits.insert(document, Insertion(beside=key, name="strategy", value=_DDP))


def _write_stage(edits: Edits, document: Document, stage: StageSettings | None) -> None:
    """Write positives and negatives of a stage.

    Raises:
        ConfigFileError: if the file has no place for them.
    """
    if stage is None:
        return
    for name, value in zip(_NAMES, (stage.n_positives, stage.n_negatives), strict=True):
        keys: list[Key] = [(name,), ("curriculum", name)]
        key = next((each for each in keys if each in document.tree.entries), None)
        if key is None:
            near = document.tree.nearest((name,))
            hint = f"Nearest: {near}" if near else "Add it"
            raise ConfigFileError(f"a stage needs {name}, and it has none. {hint}", document.path)
        edits.replace(Place(document, key), value)


def _settings_of(file: Path, stages: Sequence[StageSettings]) -> StageSettings | None:
    """Find the settings of a stage by the number that its file begins with."""
    number = _number(file)
    for each in stages:
        first, _, last = each.stage.partition("-")
        if number is not None and int(first) <= number <= int(last or first):
            return each
    return None


def _number(file: Path) -> int | None:
    digits = file.stem.partition("_")[0]
    return int(digits) if digits.isdecimal() else None


def _notes(config: Path, numbered: Sequence[Path], stages: Sequence[StageSettings]) -> list[str]:
    notes = []
    if not numbered:
        names = " and ".join(CURRICULUM_FOLDERS)
        notes.append(f"No stage files were found in {names} beside {config}; none are changed.")
    notes += [
        f"{file} has a number beyond the guide's stages and stays as it is."
        for file in numbered
        if _settings_of(file, stages) is None
    ]
    if len({each.batch for each in stages}) > 1:
        notes.append(
            f"{config.name} has one batch for all stages: that of stage {stages[0].stage}, whose "
            "steps are the largest."
        )
    return notes
