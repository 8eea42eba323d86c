"""Walks through checkpoints, test samples and training samples, from where a state says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from memfit.errors import JobError, OtherScanError

from .checkpoints import Checkpoint, checksum_of
from .results import Numbers, Progress
from .state import ScanState
from .step import Chunks, Gradients, Sides
from .sums import Extremes, PairSums

_SECONDS_BETWEEN_SAVES = 5.0


class Sink(Protocol):
    """What takes blocks of scores."""

    def add(self, number: int, test: slice, train: slice, block: Numbers) -> None:
        """Take a block of the scores under the checkpoint with this number, learning rate included.

        Args:
            number: of the checkpoint, from 0.
            test: the test samples, of which there are none in a scan for self-influence.
            train: the training samples.
            block: (test, train), or (train,).
        """
        ...

    def flush(self) -> None:
        """Have everything that was taken on the disk, if it goes there."""
        ...

    def finished(self, number: int) -> None:
        """Let go of what only the checkpoints up to this one needed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairSink:
    """Takes the scores of pairs: all of them, the highest and lowest, or both."""

    sums: PairSums | None
    extremes: Extremes | None
    last: int
    """The number of the last checkpoint, whose sums are the scores."""

    def add(self, number: int, test: slice, train: slice, block: Numbers) -> None:
        """Add a block up, and look for the highest where it is complete."""
        total = block if self.sums is None else self.sums.add(number, test, train, block)
        if self.extremes is not None and number == self.last:
            self.extremes.add(test, train, total)

    def flush(self) -> None:
        """Write the files of sums."""
        if self.sums is not None:
            self.sums.flush()

    def finished(self, number: int) -> None:
        """Remove the file of sums before this checkpoint's."""
        if self.sums is not None:
            self.sums.finished(number)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnSink:
    """Takes the scores of samples with themselves."""

    scores: Numbers

    def add(self, number: int, test: slice, train: slice, block: Numbers) -> None:  # noqa: ARG002 - a sink takes these
        """Add a block up."""
        self.scores[train] += block

    def flush(self) -> None:
        """Leave it to the state, which has the scores."""

    def finished(self, number: int) -> None:
        """Keep nothing but the sums."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """All steps of a scan, in an order that is always the same."""

    sides: Sides
    checkpoints: Sequence[Checkpoint]
    chunks: Chunks
    folder: Path | None
    listener: Callable[[Progress], None] | None

    @property
    def num_steps_each(self) -> int:
        """Return the steps of one checkpoint."""
        return len(self._train_rows) * len(self._test_rows)

    def go_on(self, state: ScanState, sink: Sink) -> None:
        """Do the steps that are not done; what was done is kept when this is interrupted.

        Raises:
            DataError: if a checkpoint cannot be loaded or progress cannot be written.
            OtherScanError: if a checkpoint has other weights than when it was begun.
            JobError: if a score is no number.
        """
        started = saved = time.monotonic()
        num_steps_each = self.num_steps_each
        num_steps = num_steps_each * len(self.checkpoints)
        for number, test, train, block in self._blocks(state):
            sink.add(number, test, train, block)
            del block
            state.num_done += 1
            now = time.monotonic()
            is_last = state.num_done % num_steps_each == 0
            if self.folder is not None and (is_last or now - saved >= _SECONDS_BETWEEN_SAVES):
                sink.flush()
                state.save(self.folder)
                saved = now
            if is_last:
                sink.finished(number)
            if self.listener is not None:
                progress = Progress(
                    checkpoint=self.checkpoints[number].name,
                    num_done=state.num_done,
                    num_steps=num_steps,
                    seconds=now - started,
                )
                self.listener(progress)

    def _blocks(self, state: ScanState) -> Iterator[tuple[int, slice, slice, Numbers]]:
        """Compute the blocks of scores that are not done yet."""
        train_rows = self._train_rows
        num_train = len(train_rows)
        num_steps_each = self.num_steps_each
        for number, checkpoint in enumerate(self.checkpoints):
            first = number * num_steps_each
            if state.num_done >= first + num_steps_each:
                continue
            self._load(number, checkpoint, state)
            for place, test_rows in enumerate(self._test_rows):
                begin = first + place * num_train
                if state.num_done >= begin + num_train:
                    continue
                held = None if self.sides.test is None else self.sides.held(_tensor_of(test_rows))
                for rows in train_rows[max(0, state.num_done - begin) :]:
                    # Not by a name, which would keep one block beside the next.
                    yield (
                        number,
                        _slice_of(test_rows),
                        _slice_of(rows),
                        self._block(held, rows, checkpoint),
                    )
                del held  # before the next are read

    def _block(self, held: Gradients | None, rows: range, checkpoint: Checkpoint) -> Numbers:
        """Compute one block, with the checkpoint's learning rate.

        Raises:
            JobError: if a score is no number.
        """
        found = self.sides.block(held, _tensor_of(rows)).double().cpu()
        if not bool(torch.isfinite(found).all()):
            wrong = (~torch.isfinite(found)).reshape(-1, len(rows)).any(dim=0)
            row = rows[int(wrong.nonzero()[0])]
            msg = (
                f"The score of training sample {row} is no finite number under the checkpoint "
                f"{checkpoint.name}. Look at its loss there; leave it or the checkpoint out."
            )
            raise JobError(msg)
        block: Numbers = found.mul_(checkpoint.learning_rate).numpy()
        return block

    def _load(self, number: int, checkpoint: Checkpoint, state: ScanState) -> None:
        """Load a checkpoint, and see that it is the one that was begun, if it was."""
        reader = self.sides.train.reader
        if number:
            checkpoint.load_into(reader.model)
        if self.folder is None:
            return
        every = chain(reader.model.parameters(), reader.model.buffers())
        found = checksum_of(every)
        known = state.checksums.setdefault(str(number), found)
        if known != found:
            difference = f"the checkpoint {checkpoint.name} has other weights now"
            raise OtherScanError(str(self.folder), difference)

    @property
    def _train_rows(self) -> list[range]:
        """Return the training samples of each step."""
        return self.sides.train.samples.chunks(self.chunks.train)

    @property
    def _test_rows(self) -> list[range]:
        """Return the test samples that are held together; once none where there are none."""
        if self.sides.test is None:
            return [range(0)]
        return self.sides.test.samples.chunks(self.chunks.test)


def _tensor_of(rows: range) -> Tensor:
    return torch.arange(rows.start, rows.stop)


def _slice_of(rows: range) -> slice:
    return slice(rows.start, rows.stop)
