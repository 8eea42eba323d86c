"""Records a plan's step, and many micro-batches from a few of them."""

from __future__ import annotations

from dataclasses import replace

from memfit.devices.spec import Device
from memfit.job import Job
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan, splitting_of
from memfit.trace.abridgement import few_pieces

from .recording import Recording, record

_WORTH_IT = 2
"""So many times the pieces that show all: below that a whole step is recorded nearly as fast."""


def record_briefly(
    job: Job, plan: Plan | None = None, *, device: Device | None = None
) -> Recording:
    """Record two steps of a job under a plan, with the events that `record` would give.

    Where a plan cuts the batch into many micro-batches, four or five are recorded. Two in the
    middle are compared, event by event; if they are alike they are repeated, and else all is
    recorded.

    Args:
        job: what would be trained.
        plan: how; None means as it is.
        device: where; None means the CPU.

    Raises:
        RecordingError: if the step cannot be recorded.
        StrategyError: if a strategy of the plan cannot apply.
    """
    plan = plan or Plan()
    split = splitting_of(plan.strategies)
    if not isinstance(split, (MicroBatching, BatchNormReplay)) or plan.parallel is not None:
        return record(job, plan, device=device)
    num_pieces = -(-job.batch_size // split.micro_batch_size)
    fewest = split.fewest_pieces
    if num_pieces < _WORTH_IT * fewest:
        return record(job, plan, device=device)
    with few_pieces(fewest):
        few = record(job, plan, device=device)
    longer = few.with_more_pieces(num_pieces - fewest)
    if longer is None:
        return record(job, plan, device=device, facts=few.facts, way=few.way)
    return replace(longer, record_seconds=few.record_seconds)
