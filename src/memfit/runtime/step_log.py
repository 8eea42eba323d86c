"""What a step depends on and changes, kept so that it can be done over as if never tried.

Before every step what is small is copied: random states, buffers, the optimizer's settings. What
is large (parameters, optimizer states) is written to a file now and then; the steps since are
logged with all they depend on. A step that failed before its update needs the copies alone. One
that failed in the update goes back to the file, and the logged steps are carried out again, which
gives the same bits on the same device under the same plan.

Not seen: parameters that are changed between steps by the caller, who may call ``forget``.
"""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from memfit.runtime.out_of_memory import is_out_of_memory
from memfit.session.session import Session
from memfit.session.surroundings import RandomStates
from memfit.units import MIB, format_bytes

_MOST_BUFFER_BYTES = 16 * MIB
"""Buffers larger than this together are not copied before every step."""
_MOST_STEPS = 200
_MOST_BATCH_BYTES = 256 * MIB
"""The log holds on to no more batches than this."""
_MOST_DISK_FRACTION = 0.5
"""The file takes no more of what is free on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """What one step began with."""

    batch: Any
    random_states: RandomStates
    python_random: Any
    numpy_random: Any
    options: Sequence[dict[str, Any]]
    """The optimizer's settings per group, such as learning rates."""
    stateful: dict[str, Any]
    buffers: dict[str, torch.Tensor] | None
    """None where they are too large to be copied before every step."""

    @classmethod
    def of(cls, session: Session, batch: Any) -> StepEntry:
        """Copy what is small."""
        buffers = dict(session.model.named_buffers())
        num_bytes = sum(buffer.nbytes for buffer in buffers.values())
        copied = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        parameter = next(session.model.parameters(), torch.empty(0))
        return cls(
            batch=batch,
            random_states=RandomStates.here(parameter),
            python_random=random.getstate(),
            numpy_random=np.random.get_state(),
            options=[_options(group) for group in session.optimizer.param_groups],
            stateful={
                name: copy.deepcopy(part.state_dict()) for name, part in session.stateful.items()
            },
            buffers=copied if num_bytes <= _MOST_BUFFER_BYTES else None,
        )

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

    def __init__(self, session: Session, overhead_fraction: float = 0.01) -> None:
        self._session = session
        self._overhead_fraction = overhead_fraction
        self._file: Any = None
        self._closing: Callable[[], object] = _nothing
        self._write_seconds = 0.0
        self._seconds = 0.0
        self._batch_bytes = 0
        self.entries: list[StepEntry] = []
        self.obstacle: str | None = None
        """Why there is no file to go back to, and will be none."""

    def begin(self, batch: Any) -> StepEntry:
        """Note what a step begins with; write the file where that is due."""
        if self._is_due():
            self.write()
        return StepEntry.of(self._session, batch)

    def done(self, entry: StepEntry, seconds: float) -> None:
        """Log a step that was carried out."""
        if self._file is None:
            return
        self.entries.append(entry)
        self._seconds += seconds
        leaves = tree_leaves(entry.batch)
        self._batch_bytes += sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))

    def write(self) -> None:
        """Write the file anew, and forget the steps before it.

        Training is not stopped for a file that cannot be written: ``obstacle`` then says why.
        """
        started = time.perf_counter()
        content = {
            "parameters": dict(self._session.model.named_parameters()),
            "buffers": dict(self._session.model.named_buffers()),
            "optimizer": self._session.optimizer.state_dict()["state"],
        }
        self.entries.clear()
        self.close()
        try:
            self._file = _written(content)
        except (OSError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            self.obstacle = str(error).partition("\n")[0]
            return
        self._closing = weakref.finalize(self, self._file.close)
        self._write_seconds = time.perf_counter() - started
        self._seconds, self._batch_bytes = 0.0, 0

    def roll_back(self) -> None:
        """Put parameters, buffers and optimizer states back as they are in the file."""
        assert self._file is not None, "asked for only where there is no obstacle"
        self._file.seek(0)
        content = torch.load(self._file, map_location="cpu", weights_only=True)
        _copy_into(dict(self._session.model.named_parameters()), content["parameters"])
        _copy_into(dict(self._session.model.named_buffers()), content["buffers"])
        _restore_states(self._session.optimizer, content["optimizer"])

    def forget(self) -> None:
        """Write the file anew before the next step."""
        self.close()

    def close(self) -> None:
        """Drop the file."""
        if self._file is not None:
            self._closing()
            self._file = None

    def _is_due(self) -> bool:
        if self._file is None:
            return self.obstacle is None
        is_cheap = self._write_seconds < self._overhead_fraction * self._seconds
        is_full = len(self.entries) >= _MOST_STEPS or self._batch_bytes > _MOST_BATCH_BYTES
        return is_cheap or is_full


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
