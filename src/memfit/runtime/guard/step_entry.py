"""What one step began with, kept so that it can be begun again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.devices.spec import CPU
from memfit.live_state import LiveState, Obstacle, Snapshot
from memfit.live_state.disk_copies import DiskCopies
from memfit.live_state.random_sources import GlobalRandomness
from memfit.live_state.snapshot import put_generators_back
from memfit.runtime.guard.batch_file import StoredBatch
from memfit.runtime.guard.batch_record import BatchRecord, BatchRecorder
from memfit.runtime.guard.fingerprint import places_of
from memfit.runtime.guard.large_tensors import (
    LargeTensors,
    local_parts,
    options_of,
    state_tensors,
)
from memfit.session.reachable import roots_of
from memfit.session.session import Session
from memfit.units import MIB

_MOST_COPIED_BYTES = 16 * MIB
"""Beside parameters and optimizer states no more is copied before every step."""
_ALL = 2**63


@dataclass(slots=True, kw_only=True)
class StepEntry:
    """What one step began with."""

    record: BatchRecord | None = None
    """Of its batch; None until the batch was taken."""
    snapshot: Snapshot | None
    """Everything but the content of large tensors; dropped once the step is done."""
    random: GlobalRandomness
    generators: Sequence[Any]
    """States of generators of the user's own."""
    options: Sequence[dict[str, Any]]
    """The optimizer's settings per group, such as learning rates."""
    places: tuple[int, ...]
    """Addresses and versions of the large tensors, and how many states optimizers have."""
    gradients: Any = None
    """Those that the caller has set before the step, as they were stored."""
    others: dict[str, torch.Tensor]
    """Large tensors beside parameters and optimizer states."""

    @property
    def batch(self) -> BatchRecord:
        """Return the record of its batch."""
        assert self.record is not None, "a batch is taken before anything else is done with it"
        return self.record

    def restore(self) -> None:
        """Put back everything but the content of large tensors and the batch.

        Raises:
            MemfitError: if something could not be put back.
        """
        assert self.snapshot is not None, "only the latest step is undone"
        self.snapshot.restore()

    def restore_for_repeating(
        self, session: Session, parameters: Sequence[torch.Tensor], gradients: Mapping[int, Any]
    ) -> None:
        """Put back what the caller may change between steps as a matter of course.

        Args:
            session: whose step is to be repeated.
            parameters: of the session, as they were listed when gradients were kept.
            gradients: that the caller had set before it, by the parameter's number.
        """
        for number, parameter in enumerate(parameters):
            parameter.grad = gradients.get(number)
        groups = session.optimizer.param_groups
        for group, options in zip(groups, self.options, strict=False):
            group.update(copy.deepcopy(options))
        put_generators_back(self.generators)
        self.random.put_back()


class StepEntries:
    """Copy what is small before every step.

    Args:
        session: whose steps.
        large: what is not copied.
        store: stores a batch, if that is not too dear.
    """

    def __init__(
        self, session: Session, large: LargeTensors, store: Callable[[Any], StoredBatch | None]
    ) -> None:
        self._session = session
        self._large = large
        self._store = store
        self._batches = BatchRecorder(store)
        self._left_out: list[torch.Tensor] = []
        # In memory they would take of what is planned for, where that is the CPU's.
        copies, is_here = DiskCopies(), session.device_type == CPU
        self._copied: Callable[[Any], Any] = copies.of if is_here else copy.deepcopy
        self._live = LiveState(
            roots_of(session),
            leave_out=[*large.named().values()],
            gradients=True,
            most_bytes=_ALL,
            copied=copies if is_here else torch.cat,
        )
        self._num_walks = 0
        self.has_other_parameters = False
        """Whether parameters came or went when this was looked at last."""
        self._parameters: list[torch.Tensor] = []
        self.look()

    @property
    def obstacles(self) -> tuple[Obstacle, ...]:
        """Return what cannot be put back."""
        return self._live.obstacles

    @property
    def live(self) -> LiveState:
        """Return what the job's code can reach."""
        return self._live

    def begun(self, places: tuple[int, ...]) -> StepEntry:
        """Copy what a step begins with, but for its batch.

        Args:
            places: of the large tensors, as ``places`` gives them now.
        """
        snapshot = self._live.snapshot()
        if self._live.num_walks != self._num_walks:
            self.look()
            snapshot, places = self._live.snapshot(), self.places()
        groups = self._session.optimizer.param_groups
        return StepEntry(
            snapshot=snapshot,
            random=snapshot.randomness,
            generators=snapshot.generators,
            options=[options_of(each, self._copied) for each in groups],
            places=places,
            others=self._large.others,
        )

    def take_batch(self, entry: StepEntry, batch: Any) -> None:
        """Record the batch of a step, and gradients that are there before it."""
        entry.record = self._batches.recorded(batch)
        entry.gradients = self._gradients()

    def _gradients(self) -> Any:
        """Keep gradients that are there before the step has begun."""
        found = {n: p.grad for n, p in enumerate(self._parameters) if p.grad is not None}
        if not found:
            return None
        return self._store(found) or {n: grad.clone() for n, grad in found.items()}

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """List the parameters."""
        return self._parameters

    def places(self) -> tuple[int, ...]:
        """Get addresses and versions of the large tensors known, and how many states there are."""
        counts = [
            sum(len(held) for held in each.state.values() if type(held) is dict)
            for each in self._large.optimizers
        ]
        return (*places_of(self._left_out), *counts)

    def look(self) -> None:
        """Choose anew what is too large to be copied before every step."""
        self._large.optimizers = self._optimizers()
        states = [t for each in self._large.optimizers for t in state_tensors(each)]
        parameters = [*self._large.parameters().values()]
        self.has_other_parameters = [*map(id, parameters)] != [*map(id, self._parameters)]
        self._parameters = parameters
        self._left_out = [*parameters, *states, *local_parts([*parameters, *states])]
        self._live.leave_out(self._left_out)
        self._large.others = _too_large(self._live)
        if self._large.others:
            self._left_out += self._large.others.values()
            self._live.leave_out(self._left_out)
        self._num_walks = self._live.num_walks

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """List all optimizers that can be reached, the session's first."""
        found = [each for part in self._live.found() for each in part.optimizers]
        return [*{id(each): each for each in (self._session.optimizer, *found)}.values()]


def _num_bytes(tensor: torch.Tensor) -> int:
    """Count a tensor's bytes; a sparse one counts as if it were dense."""
    return tensor.numel() * tensor.element_size()


def _too_large(live: LiveState) -> dict[str, torch.Tensor]:
    """Choose tensors that are too large to be copied before every step, by place."""
    copied = sorted(live.copied_tensors(), key=lambda pair: _num_bytes(pair[1]))
    num_bytes, chosen = 0, {}
    for place, tensor in copied:
        num_bytes += _num_bytes(tensor)
        if num_bytes > _MOST_COPIED_BYTES:
            chosen[place] = tensor
    return chosen
