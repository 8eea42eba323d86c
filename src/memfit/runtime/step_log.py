"""What a step depends on and changes, kept so that it can be done over as if never tried.

Before every step what is small is copied: random states, buffers, the optimizer's settings. What
is large (parameters, optimizer states) is written to a file now and then; the steps since are
logged with all they depend on. A step that failed before its update needs the copies alone. One
that failed in the update goes back to the file, and the logged steps are carried out again, which
gives the same bits on the same device under the same plan.

Where the caller changes parameters between steps, or a batch after its step, steps cannot be
repeated; fingerprints show it, and a cut update is then said instead of undone.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.devices.spec import CPU
from memfit.runtime.batch_file import BatchFile, StoredBatch
from memfit.runtime.fingerprint import Fingerprint, RepeatedFingerprint, places_of
from memfit.runtime.model_tensors import ModelTensors
from memfit.runtime.out_of_memory import is_out_of_memory
from memfit.runtime.step_entry import StepEntries, StepEntry, copy_into
from memfit.session.leaves import bytes_in, tensors_in
from memfit.session.session import Session
from memfit.units import MIB, format_bytes

_MOST_STEPS = 500
_MOST_BATCH_BYTES = 1024 * MIB
"""The log holds on to no more batches than this: on the disk for training on the CPU, where they
would count, and as they are for training on a card."""
_STORE_FRACTION = 0.002
_FREE_SECONDS = 0.05
"""Storing batches may take such a share of the whole run, and so long whatever the share: the first
steps are the slowest."""
_NOT_PICKLED = (TypeError, AttributeError, pickle.PickleError)
"""What ``torch.save`` raises for states that it cannot write."""
_MOST_OUTSIDE_CHANGES = 3
_MOST_DISK_FRACTION = 0.5
"""The file takes no more of what is free on the disk."""


class StepLog:
    """Keep a file to go back to, and the steps since it was written.

    Args:
        session: whose steps.
        overhead_fraction: the share of the time that writing the file may take.
    """

    def __init__(self, session: Session, overhead_fraction: float = 0.002) -> None:
        self._session = session
        self._tensors = ModelTensors(session.model)
        self._entries = StepEntries(session, self._tensors)
        self._overhead_fraction = overhead_fraction
        self._file: Any = None
        self._is_written = False
        """Whether the file holds a state to go back to."""
        self._write_seconds = 0.0
        self._seconds = 0.0
        """Of the steps since the file was written."""
        self._run_seconds = 0.0
        self._batch_bytes = 0
        self._batches: BatchFile | None = None
        self._store_seconds = 0.0
        self._fingerprint = RepeatedFingerprint()
        self._left: Fingerprint | None = None
        """Of parameters and buffers, as the latest step has left them."""
        self._num_outside_changes = 0
        self._has_given_up = False
        self.entries: list[StepEntry] = []
        self.num_steps_before = 0
        """How many steps had been done when the file was written."""
        self.obstacle: str | None = "no file has been written yet"
        """Why there is nothing to go back to; None while there is."""

    @property
    def is_due(self) -> bool:
        """Say whether to write the file before the next step."""
        if self._has_given_up:
            return False
        is_cheap = self._write_seconds < self._overhead_fraction * self._seconds
        return is_cheap or self._write_seconds == 0.0

    def check(self) -> None:
        """See whether autograd was told of a change since the latest step left its tensors."""
        self._tensors.look()
        if self._left is None or self._left.places == places_of(self._tensors.all):
            return
        self._num_outside_changes += 1
        self.forget("parameters or buffers were changed between steps by other code")
        # Once may be a checkpoint that was loaded; a habit would have the file written every step.
        self._has_given_up = self._num_outside_changes > _MOST_OUTSIDE_CHANGES

    def begin(self, batch: Any) -> StepEntry:
        """Note what a step begins with."""
        return self._entries.begun(batch)

    def done(self, entry: StepEntry, seconds: float) -> None:
        """Log a step that was carried out."""
        self._tensors.look()
        self._left = self._fingerprint.of(self._tensors.all)
        self._seconds += seconds
        self._run_seconds += seconds
        if not self._is_written:
            return
        if self._session.device_type == CPU and entry.has_told_change():
            self._drop("the job changes its batches")
            return
        batch_bytes = bytes_in(entry.batch)
        try:
            entry.batch = self._stored(entry.batch)
        except OSError as error:
            self._drop(str(error))
            return
        entry.left = self._left
        entry.buffers = None  # they come with the file, and are changed by the steps themselves
        self.entries.append(entry)
        self._batch_bytes += batch_bytes
        is_dear = self._store_seconds > _STORE_FRACTION * self._run_seconds + _FREE_SECONDS
        if is_dear or len(self.entries) > _MOST_STEPS or self._batch_bytes > _MOST_BATCH_BYTES:
            self._drop("the steps since the file was written are too many to keep")

    def is_as_left(self, entry: StepEntry) -> bool:
        """Say whether a step that was carried out again has left what it left the first time."""
        self._tensors.look()
        return entry.left is None or entry.left.is_near(RepeatedFingerprint().of(self._tensors.all))

    def loaded(self, entry: StepEntry) -> StepEntry:
        """Give a logged step with its batch."""
        if not isinstance(entry.batch, StoredBatch):
            return entry
        assert self._batches is not None, "a batch is stored in a file"
        batch = self._batches.load(entry.batch)
        fingerprint = Fingerprint.of_batch(tensors_in(batch))
        return replace(entry, batch=batch, batch_fingerprint=fingerprint)

    def _stored(self, batch: Any) -> Any:
        """Put a batch on the disk where it would take of the memory that is planned for."""
        if self._session.device_type != CPU:
            return batch
        started = time.perf_counter()
        if self._batches is None:
            self._batches = BatchFile()
        stored = self._batches.store(batch)
        self._store_seconds += time.perf_counter() - started
        return stored

    def write(self, num_steps: int) -> None:
        """Write the file anew after some number of steps, and forget the steps before it.

        Training is not stopped for a file that cannot be written: ``obstacle`` then says why.
        """
        started = time.perf_counter()
        content = {
            "parameters": dict(self._session.model.named_parameters()),
            "buffers": dict(self._session.model.named_buffers()),
            "optimizer": self._session.optimizer.state_dict()["state"],
        }
        self._drop("memory ran out while the file was written")
        try:
            self._write(content)
        except (OSError, RuntimeError, *_NOT_PICKLED) as error:
            if is_out_of_memory(error):
                raise
            self._drop(str(error).partition("\n")[0])
            self._has_given_up = True
            return
        self._is_written = True
        self._write_seconds = time.perf_counter() - started
        self._seconds, self._batch_bytes = 0.0, 0
        self.num_steps_before = num_steps
        self.obstacle = None

    def content(self) -> dict[str, Any]:
        """Read the file: parameters and buffers by name, optimizer states by number, on the CPU."""
        assert self._is_written, "asked for only where there is no obstacle"
        self._file.seek(0)
        # Nobody else can write to it: it has no name.
        content: dict[str, Any] = torch.load(self._file, map_location="cpu", weights_only=False)
        return content

    def roll_back(self) -> None:
        """Put parameters, buffers and optimizer states back as they are in the file."""
        content = self.content()
        copy_into(dict(self._session.model.named_parameters()), content["parameters"])
        copy_into(dict(self._session.model.named_buffers()), content["buffers"])
        _restore_states(self._session.optimizer, content["optimizer"])

    def forget(self, reason: str) -> None:
        """Go back no further than to the next file, which is due at once."""
        self._drop(reason)
        self._left = None
        self._write_seconds = 0.0

    def close(self) -> None:
        """Drop the files."""
        self._forget_steps()
        for file in (self._file, self._batches):
            if file is not None:
                file.close()
        self._file = self._batches = None

    def _drop(self, reason: str) -> None:
        self._forget_steps()
        self.obstacle = reason

    def _forget_steps(self) -> None:
        """Go back to nothing; the files stay, since to write over them is much quicker."""
        self._is_written = False
        self.entries.clear()
        if self._batches is not None:
            self._batches.clear()

    def _write(self, content: dict[str, Any]) -> None:
        """Write a temporary file, which goes when it is closed.

        Raises:
            OSError: if there is no room for it.
            RuntimeError: if writing fails.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="memfit-")  # noqa: SIM115 - kept open
            weakref.finalize(self, self._file.close)
        _check_room(content, self._file.seek(0, os.SEEK_END))
        self._file.seek(0)
        torch.save(content, self._file)
        self._file.truncate()
        self._file.flush()


def _check_room(content: dict[str, Any], length_bytes: int) -> None:
    """Refuse to fill the disk with a file that takes ``length_bytes`` already."""
    tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
    needed_bytes = sum(t.numel() * t.element_size() for t in tensors) - length_bytes
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if needed_bytes > _MOST_DISK_FRACTION * free_bytes:
        msg = (
            f"{format_bytes(needed_bytes)} are too much for {tempfile.gettempdir()}, which has "
            f"{format_bytes(free_bytes)} free; TMPDIR names another place"
        )
        raise OSError(msg)


@torch.no_grad()
def _restore_states(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Put an optimizer's states back; those that were made since are dropped."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        if number not in saved:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        for name in [*state]:
            if name not in saved[number]:
                del state[name]
        for name, value in saved[number].items():
            if isinstance(value, torch.Tensor) and isinstance(state.get(name), torch.Tensor):
                state[name].copy_(value)
            else:
                state[name] = value
