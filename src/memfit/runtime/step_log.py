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

import copy
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from memfit.devices.spec import CPU
from memfit.runtime.batch_file import BatchFile, StoredBatch
from memfit.runtime.fingerprint import Fingerprint, RepeatedFingerprint, places_of, tensors_in
from memfit.runtime.out_of_memory import is_out_of_memory
from memfit.session.session import Session
from memfit.session.surroundings import RandomStates
from memfit.units import MIB, format_bytes

_MOST_BUFFER_BYTES = 16 * MIB
"""Buffers larger than this together are not copied before every step."""
_MOST_STEPS = 500
_MOST_BATCH_BYTES = 1024 * MIB
"""The log holds on to no more batches than this: on the disk for training on the CPU, where they
would count, and as they are for training on a card."""
_STORE_FRACTION = 0.003
_FREE_SECONDS = 0.1
"""Storing batches may take so long whatever the share: the first steps are the slowest."""
_MOST_OUTSIDE_CHANGES = 3
_MOST_DISK_FRACTION = 0.5
"""The file takes no more of what is free on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """What one step began with."""

    batch: Any
    batch_fingerprint: Fingerprint
    random_states: RandomStates
    python_random: Any
    numpy_random: Any
    options: Sequence[dict[str, Any]]
    """The optimizer's settings per group, such as learning rates."""
    stateful: dict[str, Any]
    buffers: dict[str, torch.Tensor] | None
    """None where they are too large to be copied before every step."""
    left: Fingerprint | None = None
    """Of parameters and buffers once the step was done."""

    @classmethod
    def of(cls, session: Session, batch: Any) -> StepEntry:
        """Copy what is small."""
        buffers = dict(session.model.named_buffers())
        num_bytes = sum(buffer.nbytes for buffer in buffers.values())
        copied = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        parameter = next(session.model.parameters(), torch.empty(0))
        return cls(
            batch=batch,
            batch_fingerprint=Fingerprint.of(tensors_in(batch)),
            random_states=RandomStates.here(parameter),
            python_random=random.getstate(),
            numpy_random=np.random.get_state(),
            options=[_options(group) for group in session.optimizer.param_groups],
            stateful={
                name: copy.deepcopy(part.state_dict()) for name, part in session.stateful.items()
            },
            buffers=copied if num_bytes <= _MOST_BUFFER_BYTES else None,
        )

    def has_told_change(self) -> bool:
        """Say whether autograd was told of a change of the batch since the step began."""
        return self.batch_fingerprint.places != places_of(tensors_in(self.batch))

    def has_changed_batch(self) -> bool:
        """Say whether the batch is not what it was when the step began."""
        if isinstance(self.batch, StoredBatch):
            return False
        return self.batch_fingerprint != Fingerprint.of(tensors_in(self.batch))

    def restore(self, session: Session) -> None:
        """Put back what was copied."""
        self.random_states.put_back(session.device_type)
        random.setstate(self.python_random)
        np.random.set_state(self.numpy_random)
        for group, options in zip(session.optimizer.param_groups, self.options, strict=True):
            group.update(copy.deepcopy(options))
        for name, state in self.stateful.items():
            session.stateful[name].load_state_dict(copy.deepcopy(state))
        if self.buffers is not None:
            _copy_into(dict(session.model.named_buffers()), self.buffers)


class StepLog:
    """Keep a file to go back to, and the steps since it was written.

    Args:
        session: whose steps.
        overhead_fraction: the share of the time that writing the file may take.
    """

    def __init__(self, session: Session, overhead_fraction: float = 0.003) -> None:
        self._session = session
        self._overhead_fraction = overhead_fraction
        self._file: Any = None
        self._closing: Callable[[], object] = _nothing
        self._write_seconds = 0.0
        self._seconds = 0.0
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
        if self._left is None or self._left.places == places_of(self._tensors()):
            return
        self._num_outside_changes += 1
        self.forget("parameters or buffers were changed between steps by other code")
        # Once may be a checkpoint that was loaded; a habit would have the file written every step.
        self._has_given_up = self._num_outside_changes > _MOST_OUTSIDE_CHANGES

    def begin(self, batch: Any) -> StepEntry:
        """Note what a step begins with."""
        return StepEntry.of(self._session, batch)

    def done(self, entry: StepEntry, seconds: float) -> None:
        """Log a step that was carried out."""
        self._left = self._fingerprint.of(self._tensors())
        self._seconds += seconds
        if self._file is None:
            return
        if self._session.device_type == CPU and entry.has_told_change():
            self._drop("the job changes its batches")
            return
        try:
            batch = self._stored(entry.batch)
        except OSError as error:
            self._drop(str(error))
            return
        # Buffers come with the file, and are changed by the steps themselves.
        self.entries.append(replace(entry, batch=batch, buffers=None, left=self._left))
        self._batch_bytes += sum(tensor.nbytes for tensor in tensors_in(entry.batch))
        is_dear = self._store_seconds > _STORE_FRACTION * self._seconds + _FREE_SECONDS
        if is_dear or len(self.entries) > _MOST_STEPS or self._batch_bytes > _MOST_BATCH_BYTES:
            self._drop("the steps since the file was written are too many to keep")

    def is_as_left(self, entry: StepEntry) -> bool:
        """Say whether a step that was carried out again has left what it left the first time."""
        return entry.left is None or entry.left.is_near(Fingerprint.of(self._tensors()))

    def loaded(self, entry: StepEntry) -> StepEntry:
        """Give a logged step with its batch."""
        if not isinstance(entry.batch, StoredBatch):
            return entry
        assert self._batches is not None, "a batch is stored in a file"
        batch = self._batches.load(entry.batch)
        return replace(entry, batch=batch, batch_fingerprint=Fingerprint.of(tensors_in(batch)))

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
        self.close()
        self._store_seconds = 0.0
        try:
            self._file = _written(content)
        except (OSError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            self._drop(str(error).partition("\n")[0])
            self._has_given_up = True
            return
        self._closing = weakref.finalize(self, self._file.close)
        self._write_seconds = time.perf_counter() - started
        self._seconds, self._batch_bytes = 0.0, 0
        self.num_steps_before = num_steps
        self.obstacle = None

    def content(self) -> dict[str, Any]:
        """Read the file: parameters and buffers by name, optimizer states by number, on the CPU."""
        assert self._file is not None, "asked for only where there is no obstacle"
        self._file.seek(0)
        content: dict[str, Any] = torch.load(self._file, map_location="cpu", weights_only=True)
        return content

    def roll_back(self) -> None:
        """Put parameters, buffers and optimizer states back as they are in the file."""
        content = self.content()
        _copy_into(dict(self._session.model.named_parameters()), content["parameters"])
        _copy_into(dict(self._session.model.named_buffers()), content["buffers"])
        _restore_states(self._session.optimizer, content["optimizer"])

    def forget(self, reason: str) -> None:
        """Go back no further than to the next file, which is due at once."""
        self._drop(reason)
        self._left = None
        self._write_seconds = 0.0

    def close(self) -> None:
        """Drop the file."""
        self.entries.clear()
        if self._batches is not None:
            self._batches.clear()
        if self._file is not None:
            self._closing()
            self._file = None

    def _drop(self, reason: str) -> None:
        self.close()
        self.obstacle = reason

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._session.model.parameters(), *self._session.model.buffers()]


def _written(content: dict[str, Any]) -> Any:
    """Write a temporary file, which goes when it is closed, and leave it open.

    Raises:
        OSError: if there is no room for it.
        RuntimeError: if writing fails.
    """
    tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
    needed_bytes = sum(tensor.nbytes for tensor in tensors)
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if needed_bytes > _MOST_DISK_FRACTION * free_bytes:
        msg = (
            f"{format_bytes(needed_bytes)} are too much for {tempfile.gettempdir()}, which has "
            f"{format_bytes(free_bytes)} free; TMPDIR names another place"
        )
        raise OSError(msg)
    file = tempfile.TemporaryFile(prefix="memfit-")  # noqa: SIM115 - kept open on purpose
    try:
        torch.save(content, file)
    except BaseException:
        file.close()
        raise
    return file


def _nothing() -> None:
    """Close nothing."""


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


@torch.no_grad()
def _copy_into(tensors: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Write saved values into tensors, which stay the same objects."""
    for name, value in saved.items():
        tensors[name].copy_(value)


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
