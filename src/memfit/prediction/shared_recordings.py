"""One recording for all devices that would give the same, and another where one would not.

A card notes what was asked of it while a step was recorded. Another card that answers all of that
alike would give the same recording, so it is not made again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memfit.allocator.settings import AllocatorSettings
from memfit.devices.spec import Device
from memfit.job import Job, StepBuilder, load_target
from memfit.kernels.cuda.card import Card
from memfit.prediction.card_replays import CardReplays
from memfit.prediction.importing import imported_on
from memfit.prediction.placed_recorder import card_of
from memfit.prediction.recording import Recording, StepRecording, record, record_steps
from memfit.session.batches import BatchLayout
from memfit.strategies.plan import Plan
from memfit.virtual.process_group import current_placement

_MOST_KEPT = 4
"""Recordings of one step; those of large models take hundreds of megabytes each."""


def would_be_alike(card: Card | None, device: Device) -> bool:
    """Return whether what was done on a card would go the same way on a device.

    Ranks may ask for the names of their devices, so nothing is known of them.
    """
    other = card_of(device)
    if current_placement() is not None:
        return False
    if card is None or other is None:
        return card is other
    return card.answers_as(other)


@dataclass(slots=True)
class SharedRecordings:
    """The recordings of one job or step, with their replays."""

    settings: AllocatorSettings
    num_made: int = 0
    _kept: dict[Hashable, list[CardReplays]] = field(default_factory=lambda: defaultdict(list))

    def of_job(
        self,
        job: Job,
        plan: Plan,
        layout: BatchLayout,
        *,
        device: Device,
        **options: Any,
    ) -> CardReplays:
        """Return the recording of a job under a plan that holds for a device."""
        key = (job.batch_size, tuple(plan.labels()))
        return self._for(key, device, partial(record, job, plan, layout, device=device, **options))

    def of_steps(self, builder: StepBuilder, device: Device) -> CardReplays:
        """Return the recording of any code that holds for a device."""
        return self._for("steps", device, partial(record_steps, builder, device))

    def _for(self, key: Hashable, device: Device, make: Callable[[], StepRecording]) -> CardReplays:
        """Find what was recorded; what rests on answers, or was never on a card, is made again."""
        for kept in self._kept[key]:
            if not kept.recording.decides_sizes and would_be_alike(kept.recording.card, device):
                return kept
        made = CardReplays(make(), self.settings, device.name)
        self.num_made += 1
        self._kept[key] = [*self._kept[key][1 - _MOST_KEPT :], made]
        return made


def job_recording(replays: CardReplays) -> Recording:
    """Return the recording behind replays of a job."""
    assert isinstance(replays.recording, Recording), "that of a job"
    return replays.recording


@dataclass(slots=True)
class LoadedTarget:
    """What a reference names, as it was imported for some cards, and what was recorded of it."""

    target: Job | StepBuilder
    card: Card | None
    recordings: SharedRecordings

    def as_job(self) -> Job:
        """Take a function for what gives a job, and the job in its place."""
        if isinstance(self.target, StepBuilder):
            self.target = self.target.function()
        assert isinstance(self.target, Job), "a function that gives one"
        return self.target


@dataclass(slots=True)
class SharedTargets:
    """A reference, imported once for all devices on which the file would have gone the same way."""

    reference: str
    settings: AllocatorSettings
    _loaded: list[LoadedTarget] = field(default_factory=list)

    def on(self, device: Device) -> LoadedTarget:
        """Return what the reference names on a device.

        Raises:
            MemfitError: if it cannot be imported.
        """
        for loaded in self._loaded:
            if would_be_alike(loaded.card, device):
                return loaded
        card = card_of(device)
        target = imported_on(device, load_target, self.reference, card)
        loaded = LoadedTarget(target, card, SharedRecordings(self.settings))
        self._loaded.append(loaded)
        return loaded
