"""What a plan changes in configuration files, and what it says that they cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import ConfigFileError, UsageError

from .batch_reading import BatchReading, is_auto, read_batch
from .batches import Batch, split_exactly
from .document import Document, diff_of
from .kinds import Role
from .plan_settings import LeftOut, PlanSettings
from .references import followers_of
from .settings_files import Place, Settings
from .tree import Insertion, Key, Scalar, Value, dotted

_ADAMW = "adamw"
_CHECKPOINTING = "activation-checkpointing"
_FINDER = "auto_find_batch_size"
_SCHEDULE = "GradientAccumulationScheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One value, before and after."""

    key: str
    line: int
    before: Scalar
    """None where the key is added."""
    after: Value
    is_added: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A file, before and after."""

    document: Document
    content: bytes
    changes: tuple[Change, ...]

    @property
    def path(self) -> Path:
        """Return the file's path, as it was given."""
        return self.document.path

    def diff(self) -> str:
        """Write the difference."""
        return diff_of(self.path.as_posix().lstrip("/"), self.document.content, self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Everything that a plan changes."""

    files: tuple[FileChange, ...]
    before: Batch | None
    after: Batch | None
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user wants beside the plan."""

    num_devices: int | None = None
    micro_batch_size: int | None = None
    effective_size: int | None = None


class Edits:
    """Collect what is to be replaced and added, per file."""

    def __init__(self) -> None:
        self._documents: dict[Path, Document] = {}
        self._replaced: dict[Path, dict[Key, Value]] = {}
        self._inserted: dict[Path, list[Insertion]] = {}

    def replace(self, place: Place, value: Value) -> None:
        """Have a value replaced, unless it says so already."""
        before = place.entry.value
        if isinstance(before, str) and type(value) is int:
            value = str(value)
        if type(before) is type(value) and before == value:
            return
        self._note(place.document)
        self._replaced[place.document.path][place.key] = value

    def insert(self, document: Document, insertion: Insertion) -> None:
        """Have a key added."""
        self._note(document)
        self._inserted[document.path].append(insertion)

    def keys_in(self, path: Path) -> list[Key]:
        """List what is replaced and added in a file."""
        added = [each.key for each in self._inserted.get(path, ())]
        return [*self._replaced.get(path, ()), *added]

    def files(self) -> tuple[FileChange, ...]:
        """Edit the files.

        Raises:
            ConfigFileError: if one of them cannot be changed as meant.
        """
        return tuple(self._edited(path) for path in self._documents)

    def _note(self, document: Document) -> None:
        self._documents.setdefault(document.path, document)
        self._replaced.setdefault(document.path, {})
        self._inserted.setdefault(document.path, [])

    def _edited(self, path: Path) -> FileChange:
        document, replaced = self._documents[path], self._replaced[path]
        inserted = self._inserted[path]
        entries = document.tree.entries
        changes = [
            Change(
                key=dotted(key),
                line=entries[key].line,
                before=entries[key].value,
                after=value,
                is_added=False,
            )
            for key, value in replaced.items()
        ]
        changes += [
            Change(key=dotted(each.key), line=0, before=None, after=each.value, is_added=True)
            for each in inserted
        ]
        content = document.edited(replaced, inserted)
        return FileChange(document=document, content=content, changes=tuple(changes))


def changes_of(plan: PlanSettings, settings: Sequence[Settings], wishes: Wishes) -> Changes:
    """Work out what a plan changes.

    Raises:
        ConfigFileError: if a file cannot hold the batch, or a value cannot be changed by itself.
        NoExactFactorsError: if the effective batch has no exact factors.
        UsageError: if a wish contradicts the plan.
    """
    edits, left_out = Edits(), list(plan.left_out)
    reading = read_batch(settings, wishes.num_devices)
    after = _batch_after(plan, reading, wishes, settings)
    notes = list(reading.notes) if reading and after else []
    if reading and after:
        write_batch(edits, settings, after)
        notes += _batch_notes(plan, reading.batch, after)
    left_out += _write_precision(edits, settings, plan.precision)
    left_out += _write_checkpointing(edits, settings, plan)
    left_out += _write_optimizer(edits, settings, plan.optimizer)
    notes += _notes_of_finders(settings)
    notes += _notes_of_followers(edits, settings)
    is_switched = all(each.strategy != _CHECKPOINTING for each in left_out)
    if plan.checkpointing and plan.checkpoints_some and is_switched:
        notes.append(
            "The plan checkpoints some blocks, or keeps some results; the switch in a "
            "configuration checkpoints every layer."
        )
    return Changes(
        files=edits.files(),
        before=reading.batch if reading else None,
        after=after,
        left_out=tuple(left_out),
        notes=tuple(notes),
    )


def write_batch(edits: Edits, settings: Sequence[Settings], batch: Batch) -> None:
    """Write micro-batch and accumulation, both, and the effective batch where it is written out.

    Raises:
        ConfigFileError: if no file has a place for one of them.
    """
    numbers = {
        Role.MICRO_BATCH: batch.micro_batch_size,
        Role.ACCUMULATION: batch.accumulation,
        Role.TOTAL: batch.effective_size,
    }
    for role, number in numbers.items():
        places = [place for each in settings if (place := each.place(role))]
        for place in places:
            if not is_auto(place):
                edits.replace(place, number)
        if not places and role is not Role.TOTAL and not _add(edits, settings, role, number):
            raise ConfigFileError(
                f"no key for the {role} was found, and a micro-batch and its accumulation are "
                "written together. Name the file that has it as well, or its key with --mapping",
                ", ".join(str(each.parts[0].document.path) for each in settings),
            )


def _batch_after(
    plan: PlanSettings,
    reading: BatchReading | None,
    wishes: Wishes,
    settings: Sequence[Settings],
) -> Batch | None:
    """Choose the new factors of the effective batch."""
    planned, wanted = plan.micro_batch_size, wishes.micro_batch_size
    if planned is not None and wanted is not None and wanted > planned:
        raise UsageError(
            f"--micro-batch {wanted} is more than the {planned} of the plan, whose peak was "
            "predicted for no more. Plan again with a larger budget, or name less."
        )
    micro = wanted or planned
    if micro is None:
        return None
    if reading is None:
        paths = ", ".join(str(each.parts[0].document.path) for each in settings)
        raise ConfigFileError(
            f"no micro-batch was found, which the plan sets to {micro}. Name the file that has it "
            "as well, or its key with --mapping",
            paths,
        )
    size = wishes.effective_size or reading.batch.effective_size
    return split_exactly(size, micro, reading.batch.num_devices)


def _batch_notes(plan: PlanSettings, before: Batch, after: Batch) -> Iterator[str]:
    yield from (f"The plan: {reason}" for reason in plan.reasons)
    share = before.micro_batch_size * before.accumulation
    if plan.batch_size is not None and plan.batch_size != share:
        yield (
            f"The plan was made for {plan.batch_size} samples between two updates on one device; "
            f"the files say {share}. Their effective batch counts, and the planned micro-batch."
        )
    if before.effective_size != after.effective_size:
        yield (
            f"The effective batch becomes {after.effective_size}; it was {before.effective_size}."
        )


def _notes_of_finders(settings: Sequence[Settings]) -> Iterator[str]:
    """Warn of switches that change the micro-batch while training, and not the accumulation.

    Raises:
        ConfigFileError: if something else sets the accumulation while training.
    """
    for each in settings:
        for part in each.parts:
            for key, entry in part.document.tree.entries.items():
                if isinstance(entry.value, str) and entry.value.endswith(_SCHEDULE):
                    raise ConfigFileError(
                        f"{dotted(key)} is {entry.value}, by which the accumulation follows the "
                        "epoch, and the trainer takes no other beside it. Change its schedule by "
                        "hand",
                        part.document.path,
                    )
                if key[-1] == _FINDER and entry.value is True:
                    yield (
                        f"{dotted(key)} ({part.document.path}) makes the micro-batch smaller when "
                        "memory runs out, and leaves the accumulation: the effective batch would "
                        "change. Switch it off."
                    )


def _notes_of_followers(edits: Edits, settings: Sequence[Settings]) -> Iterator[str]:
    """Say what changes because it refers to what is changed.

    Raises:
        ConfigFileError: if that is more than the plan means.
    """
    for each in settings:
        changed: set[Key] = set()
        for part in each.parts:
            keys = edits.keys_in(part.document.path)
            if keys and part.twin is not None:
                raise ConfigFileError(
                    f"it is put in twice, as {dotted(part.package)} and as {dotted(part.twin)}, so "
                    f"{' and '.join(map(dotted, keys))} would change in both. Set it for the one "
                    "that trains in the file with the defaults list",
                    part.document.path,
                )
            changed |= {(*part.package, *key) for key in keys}
        yield from followers_of(each.parts, changed)


def _add(edits: Edits, settings: Sequence[Settings], role: Role, value: Value) -> bool:
    """Add a key to the first file that has room for it; return whether one has."""
    for each in settings:
        if found := each.addition(role, value):
            edits.insert(*found)
            return True
    return False


def _write_precision(
    edits: Edits, settings: Sequence[Settings], precision: str
) -> Iterator[LeftOut]:
    if not precision:
        return
    written = [_precision_in(edits, each, precision) for each in settings]
    if not any(written):
        yield LeftOut(
            strategy=precision,
            reason="the files have no key for it, or leave it to a file that was not given; "
            "memfit.attach(model, optimizer, plan) does it in the program",
        )


def _precision_in(edits: Edits, settings: Settings, precision: str) -> bool:
    """Write the precision into one configuration; return whether it can hold it."""
    word = settings.kind.precisions.get(precision)
    if word and Role.PRECISION in settings.kind.keys:
        return _set(edits, settings, Role.PRECISION, word)
    if precision not in (Role.BF16, Role.FP16):
        return False
    wanted = Role(precision)
    other = Role.FP16 if wanted is Role.BF16 else Role.BF16
    if wanted not in settings.kind.keys:
        return False
    place = settings.place(other)
    if place is not None and place.entry.value is True:
        edits.replace(place, value=False)
    return _set(edits, settings, wanted, value=True)


def _set(edits: Edits, settings: Settings, role: Role, value: Value) -> bool:
    place = settings.place(role)
    if place is None:
        return _add(edits, [settings], role, value)
    if is_auto(place) and role is not Role.PRECISION:
        return False  # another file decides, which may be among these
    edits.replace(place, value)
    return True


def _write_checkpointing(
    edits: Edits, settings: Sequence[Settings], plan: PlanSettings
) -> Iterator[LeftOut]:
    if not plan.checkpointing:
        return
    written = [_set(edits, each, Role.CHECKPOINTING, value=True) for each in settings]
    if not any(written):
        yield LeftOut(
            strategy=_CHECKPOINTING,
            reason="the files have no switch for it; memfit.attach(model, optimizer, plan) does "
            "it in the program",
        )


def _write_optimizer(
    edits: Edits, settings: Sequence[Settings], optimizer: str
) -> Iterator[LeftOut]:
    if not optimizer:
        return
    name = "eight-bit-optimizer" if optimizer == "eight-bit" else "optimizer-implementation"
    reasons = [_optimizer_in(edits, each, optimizer) for each in settings]
    if all(reasons):
        yield LeftOut(strategy=name, reason=reasons[0])


def _optimizer_in(edits: Edits, settings: Settings, optimizer: str) -> str:
    """Write the optimizer into one configuration; return why not, or nothing."""
    word = settings.kind.optimizers.get(optimizer)
    if word is None:
        return (
            f"a {settings.kind.name} configuration has no word for {optimizer}; "
            "memfit.attach(model, optimizer, plan) does it in the program"
        )
    place = settings.place(Role.OPTIMIZER)
    if place is not None and not str(place.entry.value).startswith(_ADAMW):
        return f"{place} is {place.entry.value}, and the word known for {optimizer} means AdamW"
    return "" if _set(edits, settings, Role.OPTIMIZER, word) else "there is no key for it"


def rows_of(files: Sequence[FileChange]) -> list[Mapping[str, object]]:
    """Return the changes as plain values."""
    return [
        {
            "path": str(each.path),
            "diff": each.diff(),
            "changes": [
                {
                    "key": change.key,
                    "line": change.line,
                    "before": change.before,
                    "after": change.after,
                    "is_added": change.is_added,
                }
                for change in each.changes
            ],
        }
        for each in files
    ]
