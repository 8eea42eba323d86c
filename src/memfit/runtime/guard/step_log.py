"""What a step depends on and changes, kept so that it can be done over as if never tried.

Before every step what is small is copied: everything that the job's code can reach, but for the
content of large tensors. What is large (parameters, optimizer states) is written to a file now and
then; the steps since are logged with their batches. A step that has not touched large tensors needs
the copies alone. One that has goes back to the file, and the logged steps are run again,
which gives the same bits on the same device under the same plan.
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from memfit.devices.spec import CPU
from memfit.errors import MemfitWarning
from memfit.live_state import Obstacle
from memfit.observe.out_of_memory import is_out_of_memory
from memfit.runtime.guard.batch_file import BatchFile, StoredBatch
from memfit.runtime.guard.batch_record import has_been_told_of_change
from memfit.runtime.guard.large_tensors import LargeTensors
from memfit.runtime.guard.silent_writes import may_write_silently
from memfit.runtime.guard.state_file import StateFile
from memfit.runtime.guard.step_entry import StepEntries, StepEntry
from memfit.session.leaves import bytes_in
from memfit.session.session import Session
from memfit.units import MIB, format_bytes

_MOST_STEPS = 500
_MOST_BATCH_BYTES = 1024 * MIB
"""The log holds on to no more batches than this: on the disk for training on the CPU, where they
would count, and as they are for training on a card."""
_STORE_FRACTION = 0.002
_FREE_SECONDS = 0.05
"""Storing batches may take such a share of the whole run, and so long whatever the share: the first
steps are the slowest. The slowest of all is not counted: a disk may hesitate once."""
_NOT_PICKLED = (TypeError, AttributeError, pickle.PickleError)
"""What ``torch.save`` raises for states that it cannot write."""
_MOST_OUTSIDE_CHANGES = 3
_HARMLESS = ("lock",)
"""What stands as it stood when a step has failed: locks are let go of on the way."""


class StepLog:
    """Keep a file to go back to, and the steps since it was written.

    Args:
        session: whose steps.
        overhead_fraction: the share of the time that writing the file may take.
    """

    def __init__(self, session: Session, overhead_fraction: float = 0.002) -> None:
        self._session = session
        self.large = LargeTensors(session)
        self._entries = StepEntries(session, self.large, self._stored)
        self._overhead_fraction = overhead_fraction
        self._file = StateFile(self.large, session)
        self._write_seconds = 0.0
        self._seconds = 0.0
        """Of the steps since the file was written."""
        self._run_seconds = 0.0
        self._batch_bytes = 0
        self._batches: BatchFile | None = None
        self._store_seconds = self._slowest_store_seconds = 0.0
        self._left: tuple[int, ...] | None = None
        """Addresses and versions of large tensors, as the latest step has left them."""
        self._num_outside_changes = 0
        self._has_given_up = False
        self._base: StepEntry | None = None
        """What the step after the file's began with."""
        self._base_tensors: dict[str, torch.Tensor] = {}
        self.writes_silently = may_write_silently(session.model, self._entries.live.code())
        """Whether the job's code may change tensors without autograd's notice."""
        self.entries: list[StepEntry] = []
        self.num_steps_before = 0
        """How many steps had been done when the file was written."""
        self.obstacle: str | None = "no file has been written yet"
        """Why there is nothing to go back to; None while there is."""
        self.not_put_back: tuple[Obstacle, ...] = ()
        """What the job's code can reach and change, and nobody can put back."""
        self._say_obstacles(self._entries.obstacles)

    @property
    def fatal_obstacles(self) -> tuple[Obstacle, ...]:
        """Return those that make a failed step end the run."""
        return tuple(each for each in self.not_put_back if each.kind not in _HARMLESS)

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """List the parameters, as they were when the latest step began."""
        return self._entries.parameters

    @property
    def is_due(self) -> bool:
        """Return whether to write the file before the next step."""
        if self._has_given_up:
            return False
        is_cheap = self._write_seconds < self._overhead_fraction * self._seconds
        return is_cheap or self._write_seconds == 0.0

    @property
    def is_kept(self) -> bool:
        """Return whether there is something to go back to."""
        return self.obstacle is None

    def begin(self) -> StepEntry:
        """Note what a step begins with, but for its batch."""
        places = self._entries.places()
        is_told = self._left is not None and self._left != places
        self._entries.has_other_parameters = False
        entry = self._entries.begun(places)
        if is_told or (self._left is not None and self._entries.has_other_parameters):
            self._note_outside_change()
        self._left = None
        return entry

    def take_batch(self, entry: StepEntry, batch: Any) -> None:
        """Note a step's batch; the file is not written after that until the step is done."""
        self._entries.take_batch(entry, batch)
        if found := (*self._entries.obstacles, *entry.batch.obstacles):
            self._say_obstacles(found)

    def begin_again(self, entry: StepEntry) -> None:
        """Note what a step begins with under another plan, which may have other hooks."""
        fresh = self._entries.begun(self._entries.places())
        entry.snapshot, entry.places = fresh.snapshot, fresh.places

    def done(self, entry: StepEntry, seconds: float) -> None:
        """Log a step that was run."""
        self._left = self._entries.places()
        self._seconds += seconds
        self._run_seconds += seconds
        if not self.is_kept:
            self._forget_batch(entry)
            return
        record = entry.batch
        if self._is_here and record.stored is None:
            reason = "storing the batches of the steps since takes too much time"
            self._drop("the job changes its batches" if has_been_told_of_change(record) else reason)
            return
        self._batch_bytes += bytes_in(record.batch)
        record.drop_what_is_stored()
        if entry is not self._base:
            entry.snapshot = None  # it holds on to what the steps have replaced since
        self.entries.append(entry)
        if reason := self._too_much():
            self._drop(reason)

    def has_touched_large(self, entry: StepEntry) -> bool:
        """Return whether a step may have changed large tensors before its update."""
        # Batch normalisation and its like do not tell autograd of changes of their buffers.
        is_untold = self.writes_silently or bool(entry.others)
        return is_untold or entry.places != self._entries.places()

    def put_batch_back(self, entry: StepEntry) -> bool:
        """Make a batch what it was; say whether that was possible."""
        return entry.batch.put_back(self._batches)

    def prepare(self, entry: StepEntry) -> Any:
        """Put back what a logged step began with besides large tensors; give its batch."""
        batch = entry.batch.for_repeating(self._batches)
        gradients = entry.gradients or {}
        if isinstance(gradients, StoredBatch):
            assert self._batches is not None, "gradients are stored in a file"
            gradients = self._batches.load(gradients)
        entry.restore_for_repeating(self._session, self._entries.parameters, gradients)
        return batch

    def write(self, num_steps: int, entry: StepEntry, *, keeps_batches: bool = False) -> None:
        """Write the file anew after some number of steps, and forget the steps before it.

        Training is not stopped for a file that cannot be written: ``obstacle`` then says why.

        Args:
            num_steps: that have been done.
            entry: what the next step begins with.
            keeps_batches: whether batches that were stored before can be read still.
        """
        started = time.perf_counter()
        self._drop("memory ran out while the file was written", keeps_batches)
        try:
            self._file.write()
        except (OSError, RuntimeError, *_NOT_PICKLED) as error:
            if is_out_of_memory(error):
                raise
            self._drop(str(error).partition("\n")[0], keeps_batches)
            self._has_given_up = True
            return
        self._write_seconds = time.perf_counter() - started
        self._seconds, self._batch_bytes = 0.0, 0
        self._base, self._base_tensors = entry, self.large.named()
        self.num_steps_before = num_steps
        self.obstacle = None

    def content(self) -> dict[str, Any]:
        """Read the file: parameters and buffers by name, optimizer states by number, on the CPU."""
        return self._file.content()

    def roll_back(self) -> None:
        """Put everything back as it was when the file was written."""
        assert self._base is not None, "asked for only where there is no obstacle"
        self._base.restore()
        self._entries.look()
        self._file.read_back(self._base_tensors)

    def write_repeated(self, num_steps: int, entry: StepEntry) -> set[str]:
        """Write the file anew where steps were repeated up to an entry; return what is in it.

        It must not be done over once ``take_up`` has begun, which writes over what was repeated.
        """
        self._entries.look()
        names = {*self.large.named()}
        self.write(num_steps, entry, keeps_batches=True)
        return names

    def take_up(self, entry: StepEntry, names: set[str]) -> bool:
        """Put what repeated steps have led to into the tensors of an entry; say whether that is so.

        It is not if there are other tensors now than when the entry was made. This may be done
        over.
        """
        entry.restore()
        self._entries.look()
        self.large.others = entry.others
        self._base_tensors = self.large.named()
        if self.obstacle is not None or names != self._base_tensors.keys():
            return False
        self._file.read_back(self._base_tensors)
        return True

    def forget(self, reason: str) -> None:
        """Go back no further than to the next file, which is due at once."""
        self._drop(reason)
        self._left = None
        self._write_seconds = 0.0

    def close(self) -> None:
        """Drop the files."""
        self._forget_steps()
        self._file.close()
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    @property
    def _is_here(self) -> bool:
        """Return whether training is on the CPU, whose memory batches would take."""
        return self._session.device_type == CPU

    def _note_outside_change(self) -> None:
        self._num_outside_changes += 1
        self.forget("parameters or optimizer states were changed between steps by other code")
        # Once may be a checkpoint that was loaded; a habit would have the file written every step.
        self._has_given_up = self._num_outside_changes > _MOST_OUTSIDE_CHANGES

    def _say_obstacles(self, found: tuple[Obstacle, ...]) -> None:
        new = [each for each in found if each not in self.not_put_back]
        self.not_put_back = (*self.not_put_back, *new) if new else self.not_put_back
        new = [each for each in new if each.kind not in _HARMLESS]
        if new:
            sentences = " ".join(map(str, new))
            msg = (
                f"{sentences} A step that runs out of memory will end this run, since it could not "
                "be run again as if nothing had been. Keep this out of what the model, the "
                "loss and the optimizer reach, or draw from it before the step."
            )
            warnings.warn(msg, MemfitWarning, stacklevel=2)

    def _too_much(self) -> str:
        """Say why the log ends here, if it does."""
        if len(self.entries) > _MOST_STEPS:
            return f"more than {_MOST_STEPS} steps were done since the file was written"
        if self._batch_bytes > _MOST_BATCH_BYTES:
            limit = format_bytes(_MOST_BATCH_BYTES)
            return f"the batches since the file was written take more than {limit}"
        return ""

    def _is_storing_dear(self) -> bool:
        seconds = self._store_seconds - self._slowest_store_seconds
        return seconds > _STORE_FRACTION * self._run_seconds + _FREE_SECONDS

    def _stored(self, batch: Any) -> StoredBatch | None:
        """Put a batch on the disk where it would take of the memory that is planned for."""
        if not self._is_here or (self._is_storing_dear() and not self.writes_silently):
            return None
        started = time.perf_counter()
        if self._batches is None:
            self._batches = BatchFile()
        try:
            stored = self._batches.store(batch)
        except OSError as error:
            self._drop(str(error))
            return None
        seconds = time.perf_counter() - started
        self._store_seconds += seconds
        self._slowest_store_seconds = max(seconds, self._slowest_store_seconds)
        return stored

    def _forget_batch(self, entry: StepEntry) -> None:
        if self._batches is not None and entry.batch.stored is not None:
            self._batches.forget_from(entry.batch.stored)

    def _drop(self, reason: str, keeps_batches: bool = False) -> None:
        self._forget_steps(keeps_batches)
        self.obstacle = reason

    def _forget_steps(self, keeps_batches: bool = False) -> None:
        """Go back to nothing; the files stay, since to write over them is much quicker."""
        self.entries.clear()
        self._base, self._base_tensors = None, {}
        if self._batches is not None and not keeps_batches:
            self._batches.clear()
