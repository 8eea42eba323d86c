"""What one step began with, copied so that it can be begun again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.devices.spec import CPU
from memfit.runtime.batch_file import StoredBatch
from memfit.runtime.fingerprint import Fingerprint, places_of
from memfit.runtime.model_tensors import ModelTensors
from memfit.session.leaves import tensors_in
from memfit.session.random_sources import RandomSources, RandomSourcesReader
from memfit.session.session import Session
from memfit.units import MIB

_MOST_BUFFER_BYTES = 16 * MIB
"""Buffers larger than this together are not copied before every step."""
_UNCHANGEABLE = (float, int, bool, str, type(None))


@dataclass(slots=True, kw_only=True)
class StepEntry:
    """What one step began with, and what it left."""

    batch: Any
    batch_fingerprint: Fingerprint
    random: RandomSources
    options: Sequence[dict[str, Any]]
    """The optimizer's settings per group, such as learning rates."""
    stateful: dict[str, Any]
    buffers: dict[str, torch.Tensor] | None
    """None where they are too large to be copied before every step."""
    left: Fingerprint | None = None
    """Of parameters and buffers once the step was done."""

    def has_told_change(self) -> bool:
        """Say whether autograd was told of a change of the batch since the step began."""
        return self.batch_fingerprint.places != places_of(tensors_in(self.batch))

    def has_changed_batch(self) -> bool:
        """Say whether the batch is not what it was when the step began."""
        if isinstance(self.batch, StoredBatch):
            return False
        return self.batch_fingerprint != Fingerprint.of_batch(tensors_in(self.batch))

    def restore(self, session: Session) -> None:
        """Put back what was copied."""
        self.random.put_back(session.device_type)
        for group, options in zip(session.optimizer.param_groups, self.options, strict=True):
            group.update(copy.deepcopy(options))
        for name, state in self.stateful.items():
            session.stateful[name].load_state_dict(copy.deepcopy(state))
        if self.buffers is not None:
            copy_into(dict(session.model.named_buffers()), self.buffers)


class StepEntries:
    """Copy what is small before every step.

    Args:
        session: whose steps.
        tensors: of its model.
    """

    def __init__(self, session: Session, tensors: ModelTensors) -> None:
        self._session = session
        self._tensors = tensors
        self._random = RandomSourcesReader()

    def begun(self, batch: Any) -> StepEntry:
        """Copy what a step begins with."""
        session = self._session
        places = () if session.device_type == CPU else self._tensors.all[:1]
        return StepEntry(
            batch=batch,
            batch_fingerprint=Fingerprint.of_batch(tensors_in(batch)),
            random=self._random.here(*places),
            options=[_options(group) for group in session.optimizer.param_groups],
            stateful={
                name: copy.deepcopy(part.state_dict()) for name, part in session.stateful.items()
            },
            buffers=_copied(self._tensors.buffers),
        )


@torch.no_grad()
def copy_into(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Write saved values into tensors, which stay the same objects."""
    for name, value in saved.items():
        tensors[name].copy_(value)


def _copied(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    if sum(b.numel() * b.element_size() for b in buffers.values()) > _MOST_BUFFER_BYTES:
        return None
    return {name: buffer.detach().clone() for name, buffer in buffers.items()}


def _is_unchangeable(value: Any) -> bool:
    kind = type(value)
    return kind in _UNCHANGEABLE or (kind is tuple and all(map(_is_unchangeable, value)))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if _is_unchangeable(value) else copy.deepcopy(value)
        for name, value in group.items()
        if name != "params"
    }
