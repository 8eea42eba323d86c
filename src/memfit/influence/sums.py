"""Sums of scores over checkpoints, and the highest and lowest of them, in bounded memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError
from memfit.units import format_bytes

from .results import Numbers, Ranked

Rows = npt.NDArray[np.int64]


class PairSums:
    """The sums over checkpoints for all pairs of test and training samples.

    In a folder there is a file for what was summed up to the last checkpoint, and one for what is
    summed up to this one. So a block that is written again, after the process was killed, is the
    same: nothing is ever added to in place.
    """

    def __init__(self, num_test: int, num_train: int, folder: Path | None) -> None:
        self._shape, self._folder = (num_test, num_train), folder
        self._in_memory = np.zeros(self._shape) if folder is None else None
        self._files: dict[int, Numbers] = {}

    def add(self, number: int, test: slice, train: slice, block: Numbers) -> Numbers:
        """Add a block of a checkpoint's scores; return the sums so far of that block.

        Raises:
            DataError: if there is no room on the disk.
        """
        if self._in_memory is not None:
            self._in_memory[test, train] += block
            return self._in_memory[test, train]
        if number:
            block = block + self._file(number - 1)[test, train]
        self._file(number)[test, train] = block
        return block

    def finished(self, number: int) -> None:
        """Let go of what was summed before a checkpoint that is complete."""
        for old in [each for each in self._files if each < number]:
            del self._files[old]
        if self._folder is not None and number:
            self._path(number - 1).unlink(missing_ok=True)

    def flush(self) -> None:
        """Write everything to the disk."""
        for each in self._files.values():
            assert isinstance(each, np.memmap)
            each.flush()

    def total(self, number: int) -> Numbers:
        """Return the sums over all checkpoints, of which the last one has this number."""
        if self._in_memory is not None:
            return self._in_memory
        self.flush()
        self._files.clear()
        opened: Numbers = np.load(self._path(number), mmap_mode="r")
        return opened

    def _path(self, number: int) -> Path:
        assert self._folder is not None, "there are files in a folder alone"
        return self._folder / f"scores-{number}.npy"

    def _file(self, number: int) -> Numbers:
        if number not in self._files:
            path = self._path(number)
            if not path.exists():
                self._make(path)
            self._files[number] = np.load(path, mmap_mode="r+")
        return self._files[number]

    def _make(self, path: Path) -> None:
        """Make a file whose room is certain: a map into a disk that fills up ends the process."""
        num_bytes = 8 * self._shape[0] * self._shape[1]
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            made = np.lib.format.open_memmap(part, mode="w+", dtype=np.float64, shape=self._shape)
            del made
            with part.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            reason = f"there is no room for {format_bytes(num_bytes)} of scores ({error.strerror})"
            raise DataError(str(path), f"{reason}. Keep the highest alone with top_k") from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extremes:
    """The highest and the lowest scores of each test sample so far."""

    scores: dict[str, Numbers]
    """(num_test, K) for ``helpful`` and for ``harmful``, the latter with its sign changed."""
    rows: dict[str, Rows]
    """(num_test, K): the training samples, -1 where there is none yet."""

    @classmethod
    def kept_in(cls, arrays: dict[str, npt.NDArray[Any]], num_test: int, number: int) -> Self:
        """Go on with the arrays that a state has, or begin with new ones that it keeps."""
        scores: dict[str, Numbers] = {}
        rows: dict[str, Rows] = {}
        for name in ("helpful", "harmful"):
            empty = np.full((num_test, number), -np.inf)
            scores[name] = arrays.setdefault(f"{name}_scores", empty)
            none = np.full((num_test, number), -1, dtype=np.int64)
            rows[name] = arrays.setdefault(f"{name}_rows", none)
        return cls(scores=scores, rows=rows)

    def add(self, test: slice, train: slice, block: Numbers) -> None:
        """Take a block of scores in; blocks of a test sample come in the order of their samples."""
        arrived = np.arange(train.start, train.stop, dtype=np.int64)
        for name, signed in (("helpful", block), ("harmful", -block)):
            scores = np.concatenate([self.scores[name][test], signed], axis=1)
            own = np.broadcast_to(arrived, signed.shape)
            rows = np.concatenate([self.rows[name][test], own], axis=1)
            number = self.scores[name].shape[1]
            order = np.argsort(-scores, axis=1, kind="stable")[:, :number]
            self.scores[name][test] = np.take_along_axis(scores, order, axis=1)
            self.rows[name][test] = np.take_along_axis(rows, order, axis=1)

    def ranked(self, name: str) -> Ranked:
        """Return ``helpful`` or ``harmful``."""
        sign = 1.0 if name == "helpful" else -1.0
        # Zero has no sign that anybody would want to see.
        scores = sign * self.scores[name] + 0.0
        return Ranked(indices=self.rows[name].tolist(), scores=scores.tolist())
