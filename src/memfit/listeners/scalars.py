"""The numbers of a step under the names that TensorBoard and W&B show."""

from __future__ import annotations

from memfit.journal.records import StepRecord
from memfit.units import GIB

PREFIX = "memory/"
EVENTS_TAG, RUN_TAG, ENDING_TAG = f"{PREFIX}events", f"{PREFIX}run", f"{PREFIX}ending"
STEP_TAG = f"{PREFIX}step"


def scalars(record: StepRecord, num_out_of_memory: int) -> dict[str, float]:
    """Return what is known of a step by its tag; what was not measured is left out."""
    in_bytes = {
        "peak_allocated_gib": record.peak_allocated_bytes,
        "peak_reserved_gib": record.peak_reserved_bytes,
        "predicted_peak_gib": record.predicted_peak_bytes,
        "host_gib": record.host_bytes,
    }
    counts = {
        "alloc_retries": record.allocator_retries,
        "ooms": num_out_of_memory,
        "micro_batch_size": record.micro_batch_size,
    }
    found: dict[str, float] = {
        f"{PREFIX}{name}": num_bytes / GIB
        for name, num_bytes in in_bytes.items()
        if num_bytes is not None
    }
    found.update((f"{PREFIX}{name}", n) for name, n in counts.items() if n is not None)
    return found
