"""The steps of a run as a file, which stays small however long the run is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from memfit.files import replace_atomically

from .lines import LineFile, read_rows
from .records import StepRecord
from .typed_records import record_of

_ONE = "num_steps"
_FIELDS = tuple(field.name for field in fields(StepRecord) if field.name != _ONE)
MOST_RECORDS = 5000
"""Of a journal; a picture as wide as a screen has 2,000 points."""
_MOST_AFTERWARDS = 3 * MOST_RECORDS // 4


class StepFile:
    """Append steps to a file, a line for each; once there are very many, older ones are rolled up.

    Args:
        path: of the file, which may hold steps already.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineFile(path)
        with path.open("rb") as file:
            self._num_lines = sum(1 for _ in file)

    def add(self, record: StepRecord) -> None:
        """Add a step.

        Raises:
            FullDiskError: if there is no room for it.
        """
        if self._num_lines >= MOST_RECORDS:
            self._roll_up()
        self._file.add(_line(record))
        self._num_lines += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _roll_up(self) -> None:
        rolled = rolled_up(_records(self._path))

        def write(part: Path) -> None:
            with part.open("w", encoding="utf-8") as file:
                file.writelines(map(_line, rolled))

        replace_atomically(self._path, write)
        self._file.close()
        self._file, self._num_lines = LineFile(self._path), len(rolled)


def read_steps(path: Path) -> tuple[StepRecord, ...]:
    """Read the steps in a file; of those done twice, the later ones.

    Raises:
        DataError: if the file is larger than any journal.
    """
    return tuple(latest(_records(path)))


def _records(path: Path) -> Iterator[StepRecord]:
    for row in read_rows(path):
        record = record_of(StepRecord, row)
        if record is not None and record.num_steps >= 1:
            yield record


def _line(record: StepRecord) -> str:
    # By hand, because it is done in every step: asdict and json.dumps take three times as long.
    # All fields are finite numbers, which JSON writes as Python does.
    parts = [
        f'"{name}": {value!r}' for name in _FIELDS if (value := getattr(record, name)) is not None
    ]
    if record.num_steps > 1:
        parts.append(f'"{_ONE}": {record.num_steps}')
    return f"{{{', '.join(parts)}}}\n"


def rolled_up(steps: Iterable[StepRecord]) -> list[StepRecord]:
    """Return at most three quarters of ``MOST_RECORDS``, each of as many steps but for the last.

    A run of a week has millions of steps, and no picture has as many points. What is kept of
    several steps is what is asked of them: how many they were, how long they took, and their
    highest peaks.

    >>> steps = [StepRecord(step=n, time_seconds=n, step_seconds=1.0) for n in range(1, 20_001)]
    >>> rolled = rolled_up(steps)
    >>> len(rolled), rolled[-1].first_step, rolled[-1].step
    (2500, 19993, 20000)
    """
    kept = latest(steps)
    num_steps, width = sum(step.num_steps for step in kept), 1
    while width * MOST_RECORDS < 2 * num_steps:
        width *= 2
    rolled = _joined(kept, width)
    while len(rolled) > _MOST_AFTERWARDS:  # where what was continued left odd numbers of steps
        width *= 2
        rolled = _joined(rolled, width)
    return rolled


def latest(steps: Iterable[StepRecord]) -> list[StepRecord]:
    """Keep what was done last of steps done twice: a run that was continued counts on from there.

    A run that went on from a checkpoint repeats the steps since; one that began anew in the same
    folder repeats all of them.
    """
    kept: list[StepRecord] = []
    for record in steps:
        while kept and kept[-1].first_step >= record.first_step:
            kept.pop()
        if kept and kept[-1].step >= record.first_step:  # a part of what was rolled up
            before = record.first_step - 1
            num_steps = before + 1 - kept[-1].first_step
            kept[-1] = replace(kept[-1], step=before, num_steps=num_steps)
        kept.append(record)
    return kept


def _joined(steps: Iterable[StepRecord], width: int) -> list[StepRecord]:
    joined: list[StepRecord] = []
    group: list[StepRecord] = []
    num_steps = 0
    for step in steps:
        if group and num_steps + step.num_steps > width:
            joined.append(_one_of(group))
            group, num_steps = [], 0
        group.append(step)
        num_steps += step.num_steps
    return [*joined, _one_of(group)] if group else joined


def _one_of(group: list[StepRecord]) -> StepRecord:
    """Return a record for several: its figures are the highest, of time the mean."""
    if len(group) == 1:
        return group[0]
    num_steps = sum(step.num_steps for step in group)
    seconds = sum(step.step_seconds * step.num_steps for step in group)
    highest = max(reversed(group), key=lambda step: step.peak_allocated_bytes or 0)
    return StepRecord(
        step=group[-1].step,
        num_steps=num_steps,
        time_seconds=group[-1].time_seconds,
        step_seconds=round(seconds / num_steps, 6),
        peak_allocated_bytes=highest.peak_allocated_bytes,
        peak_reserved_bytes=_known(max, (step.peak_reserved_bytes for step in group)),
        predicted_peak_bytes=highest.predicted_peak_bytes,
        allocator_retries=_known(max, (step.allocator_retries for step in group)),
        host_bytes=_known(max, (step.host_bytes for step in group)),
        micro_batch_size=_known(min, (step.micro_batch_size for step in group)),
        num_samples=_known(sum, (step.num_samples for step in group)),
    )


def _known(of: Callable[[list[int]], int], values: Iterable[int | None]) -> int | None:
    """Take one of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return of(known) if known else None
