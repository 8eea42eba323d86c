"""The effective batch as a product: micro-batch x devices x accumulation."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import NoExactFactorsError

_MOST_OFFERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How an effective batch is made up."""

    micro_batch_size: int
    accumulation: int
    num_devices: int

    @property
    def effective_size(self) -> int:
        """Return how many samples there are between two updates."""
        return self.micro_batch_size * self.num_devices * self.accumulation

    def product(self) -> str:
        """Write the product out."""
        return (
            f"{self.micro_batch_size} x {self.num_devices} x {self.accumulation} = "
            f"{self.effective_size}"
        )


def split_exactly(effective_size: int, micro_batch_size: int, num_devices: int) -> Batch:
    """Find the accumulation that gives the effective batch exactly.

    Raises:
        NoExactFactorsError: if there is none; it names the nearest that are exact.
    """
    accumulation, rest = divmod(effective_size, micro_batch_size * num_devices)
    if accumulation and not rest:
        return Batch(
            micro_batch_size=micro_batch_size, accumulation=accumulation, num_devices=num_devices
        )
    wanted = (
        f"An effective batch of {effective_size} in micro-batches of {micro_batch_size} on "
        f"{num_devices} device{'' if num_devices == 1 else 's'}"
    )
    raise NoExactFactorsError(wanted, _offers(effective_size, micro_batch_size, num_devices))


def largest_exact_micro_batch(
    effective_size: int, most_samples: int, num_devices: int
) -> int | None:
    """Return the largest micro-batch up to a size that gives the effective batch exactly."""
    share, rest = divmod(effective_size, num_devices)
    if rest:
        return None
    sizes = range(min(most_samples, share), 0, -1)
    return next((size for size in sizes if share % size == 0), None)


def _offers(effective_size: int, micro_batch_size: int, num_devices: int) -> list[str]:
    """Name exact products near by, each with the option that takes it."""
    found = []
    if size := largest_exact_micro_batch(effective_size, micro_batch_size, num_devices):
        kept = split_exactly(effective_size, size, num_devices)
        found.append(f"--micro-batch {size} keeps it ({kept.product()})")
    passes = effective_size // (micro_batch_size * num_devices)
    for accumulation in (passes, passes + 1):
        if accumulation:
            near = Batch(
                micro_batch_size=micro_batch_size,
                accumulation=accumulation,
                num_devices=num_devices,
            )
            found.append(f"--effective-batch {near.effective_size} changes it ({near.product()})")
    return found[:_MOST_OFFERS]
