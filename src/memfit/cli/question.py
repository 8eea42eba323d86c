"""What the words of ``memfit predict`` ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.allocator.settings import AllocatorSettings
    from memfit.devices.placement import Placement
    from memfit.devices.spec import Device
    from memfit.prediction.budget import MemoryBudget
    from memfit.strategies.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Devices, plan, budget and allocator of a prediction, and how much of it is shown."""

    devices: Sequence[Device]
    plan: Plan | None
    budget: MemoryBudget
    settings: AllocatorSettings
    num_holders: int
    ranks: Mapping[str, int | None] | None = None
    """What makes a placement of a device; None where no process group is to be opened."""

    def placement_on(self, device: Device) -> Placement | None:
        """Return where one of the ranks would run."""
        from memfit.devices.placement import Placement

        ranks = self.ranks
        if ranks is None and self.plan is not None and self.plan.parallel is not None:
            ranks = {"num_ranks": self.plan.ranks or 1}
        return None if ranks is None else Placement(device=device.name, **ranks)  # type: ignore[arg-type]

    @property
    def judged_by(self) -> dict[str, Any]:
        """Return what a prediction is made with, besides its recording."""
        return {
            "budget": self.budget,
            "settings": self.settings,
            "in_full": True,
        }
