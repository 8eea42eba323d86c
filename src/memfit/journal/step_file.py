"""The steps of a run as a file, which stays small however long the run is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from memfit.files import replace_atomically

from .lines import LineFile, read_rows
from .records import StepRecord
from .rolled_steps import MOST_RECORDS, latest, rolled_up
from .typed_records import record_of

_ONE = "num_steps"
_FIELDS = tuple(field.name for field in fields(StepRecord) if field.name != _ONE)


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
