"""How much memory a step may take, and which of its figures that bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from memfit.devices.spec import CUDA, Device
from memfit.errors import UsageError
from memfit.figures import BOUNDED_FIGURES
from memfit.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How many bytes there are, and which figure of a prediction they bound."""

    num_bytes: int | None = None
    """None stands for the memory of the device, where that is known."""
    of: str | None = None
    """One of ``BOUNDED_FIGURES``; None takes the one that is usual on the device."""
    host_bytes: int | None = None
    """How much of the host's memory may be taken instead; None sets no bound."""
    disk_bytes: int | None = None

    def on(self, device: Device) -> Self:
        """Return the budget with what a device fills in.

        Raises:
            UsageError: if it bounds no figure that there is.
        """
        of = self.of or ("process" if device.kind == CUDA else "allocated")
        if of not in BOUNDED_FIGURES:
            raise UsageError(f"A budget bounds one of {', '.join(BOUNDED_FIGURES)}, not {of!r}.")
        return replace(self, num_bytes=self.num_bytes or device.memory_bytes or None, of=of)

    def holds(self, num_bytes: int, host_bytes: int = 0, disk_bytes: int = 0) -> bool | None:
        """Return whether a step keeps to all of it; None if the device's memory is not known."""
        if self.num_bytes is None:
            return None
        taken = (
            (num_bytes, self.num_bytes),
            (host_bytes, self.host_bytes),
            (disk_bytes, self.disk_bytes),
        )
        return all(most_bytes is None or part <= most_bytes for part, most_bytes in taken)


def read_budget(budget: str | int | None, name: str = "budget") -> int | None:
    """Read a budget in bytes, which errors call by its name; None stays None.

    Raises:
        UsageError: if it is no size, or not positive.
    """
    if budget is None:
        return None
    try:
        budget_bytes = parse_bytes(budget)
    except ValueError as error:
        raise UsageError(f"The {name} {error}.") from None
    if budget_bytes <= 0:
        raise UsageError(f"The {name} must be more than 0 bytes, not {budget}.")
    return budget_bytes
