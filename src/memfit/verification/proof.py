"""Verifies one plan, or every strategy alone, at a batch size that this machine can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.devices.detect import free_memory_bytes
from memfit.errors import MemfitError, PromiseBrokenError, RecordingError, TooLargeToVerifyError
from memfit.figures import Prediction
from memfit.job import Job
from memfit.prediction.predict import predict
from memfit.prediction.recording import record
from memfit.strategies import CATALOGUE
from memfit.strategies.base import Strategy
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import Plan
from memfit.units import format_bytes
from memfit.verification.result import Verification
from memfit.verification.verify import Verifier

Progress = Callable[[str], None]
_MOST_FLOPS = 5e12
"""Operations for plain and planned steps of one plan: minutes on a CPU."""
_MOST_FLOPS_EACH = 5e11
"""The same where many plans are verified."""
_MEMORY_SHARE = 0.8
_SMALLEST_BATCH = 3
"""The smallest batch of which a micro-batch of two leaves an uneven rest."""
_NUM_STEPS = 4
_NUM_COPIES = 3
"""Copies of parameters, gradients and buffers that are kept to be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifications:
    """What was verified of a job."""

    batch_size: int
    verifications: tuple[Verification, ...]
    failed: tuple[tuple[str, str], ...] = ()
    """Strategies that could not be tried, each with the reason."""
    notes: tuple[str, ...] = ()
    """What was made smaller, and why."""

    @property
    def broken(self) -> tuple[Verification, ...]:
        """Return the plans that earn less than they claim."""
        return tuple(each for each in self.verifications if not each.keeps_promise)

    def check(self) -> None:
        """Refuse plans that earn less than they claim.

        Raises:
            PromiseBrokenError: if there are any.
        """
        if self.broken:
            raise PromiseBrokenError([_broken_promise(each) for each in self.broken])

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "batch_size": self.batch_size,
            "keeps_promise": not self.broken,
            "verifications": [each.to_json() for each in self.verifications],
            "failed": [{"strategy": name, "reason": reason} for name, reason in self.failed],
            "notes": list(self.notes),
        }


def verify_each(
    job: Job,
    plan: Plan | None = None,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Verifications:
    """Verify a plan, or, without one, each strategy that can apply to a job alone.

    Args:
        job: what to run.
        plan: how; None tries every strategy with its mildest setting.
        dtype: see ``memfit.verify``.
        seed: of parameters, batch and dropout.
        batch_size: None takes the job's, or the largest that this machine can run.
        progress: told of every plan that is about to be run.

    Raises:
        TooLargeToVerifyError: if not even a few samples fit.
        StrategyError: if a strategy of the plan cannot apply to the job.
        UsageError: if the plan is for several ranks.
    """
    if plan is not None:
        plan.check_for_one_process("held against the plain step")
    wanted = batch_size or job.batch_size
    is_double = dtype is None or dtype is torch.float64
    batch_size, notes = affordable_batch_size(
        replace(job, batch_size=wanted),
        num_times=2 if is_double else 1,
        most_flops=_MOST_FLOPS_EACH if plan is None else _MOST_FLOPS,
    )
    small_job = replace(job, batch_size=batch_size)
    verifier = Verifier(small_job, seed)
    tell = progress or _tell_nobody
    if plan is not None:
        plan = scaled(plan, job.batch_size, batch_size)
        tell(" + ".join(plan.labels()) or "no strategy")
        return Verifications(
            batch_size=batch_size, verifications=(verifier.verify(plan, dtype),), notes=notes
        )
    found: list[Verification] = []
    failed: list[tuple[str, str]] = []
    for strategy in applicable(_facts(small_job, verifier)):
        tell(strategy.label())
        try:
            found.append(verifier.verify(Plan(strategies=(strategy,)), dtype))
        except MemfitError as error:
            failed.append((strategy.name, str(error)))
    return Verifications(
        batch_size=batch_size, verifications=tuple(found), failed=tuple(failed), notes=notes
    )


def affordable_batch_size(
    job: Job, *, num_times: int, most_flops: float = _MOST_FLOPS
) -> tuple[int, tuple[str, ...]]:
    """Find the largest batch that can be run here, halving the job's own.

    Args:
        job: with the batch size that is wanted.
        num_times: how many times larger the job's tensors are when they are compared.
        most_flops: operations that plain and planned steps may take.

    Returns:
        The batch size, an odd one where it is smaller, so that micro-batches leave a rest; and
        sentences about what was made smaller.

    Raises:
        TooLargeToVerifyError: if not even a few samples fit.
    """
    batch_size, reason = job.batch_size, ""
    while True:
        try:
            prediction = predict(replace(job, batch_size=batch_size))
        except RecordingError as error:
            return batch_size, (f"not known to fit this machine: {error.what.rstrip('.')}",)
        too_much, is_memory = _too_much(prediction, num_times, most_flops)
        if not too_much:
            break
        reason = reason or too_much
        if batch_size <= _SMALLEST_BATCH:
            if is_memory:
                raise TooLargeToVerifyError(batch_size, too_much)
            break
        batch_size = max(_SMALLEST_BATCH, batch_size // 2 | 1)
    if batch_size == job.batch_size:
        return batch_size, ()
    return batch_size, (f"batch size {batch_size} instead of {job.batch_size}: {reason}",)


def _too_much(prediction: Prediction, num_times: int, most_flops: float) -> tuple[str, bool]:
    """Return what exceeds this machine, empty if nothing; and whether it is memory."""
    kept = sum(prediction.by_category.get(name, 0) for name in ("parameters", "buffers"))
    num_bytes = num_times * (prediction.peak_allocated_bytes + 2 * _NUM_COPIES * kept)
    free = free_memory_bytes()
    if free is not None and num_bytes > _MEMORY_SHARE * free:
        return f"it takes {format_bytes(num_bytes)} and {format_bytes(free)} are free", True
    num_flops = _NUM_STEPS * (prediction.num_flops or 0)
    if num_flops > most_flops:
        return f"it takes {num_flops:.1g} operations, more than {most_flops:.0g}", False
    return "", False


def scaled(plan: Plan, old_batch_size: int, batch_size: int) -> Plan:
    """Keep micro-batches meaningful in another batch: their share of it, and an uneven rest."""
    own = plan.splitting
    if own is None or own.micro_batch_size >= old_batch_size or batch_size == old_batch_size:
        return plan
    size = own.micro_batch_size
    is_uneven = old_batch_size % size != 0
    smaller = micro_batch_size(batch_size, size / old_batch_size, is_uneven=is_uneven)
    scaled_own = own.with_size(smaller)
    return replace(plan, strategies=tuple(scaled_own if s is own else s for s in plan.strategies))


def micro_batch_size(batch_size: int, share: float, *, is_uneven: bool) -> int:
    """Find the micro-batch nearest to a share of a batch that leaves a rest, or leaves none."""
    sizes = range(1, max(2, batch_size))
    matching = [size for size in sizes if (batch_size % size != 0) == is_uneven] or sizes
    return min(matching, key=lambda size: abs(size - share * batch_size))


def applicable(facts: JobFacts) -> Iterator[Strategy]:
    """Yield each strategy that can apply alone, with its mildest setting.

    Micro-batches are about a third of the batch and leave a rest.
    """
    for strategy_class in CATALOGUE:
        options = (each for each in strategy_class.options(facts) if each.obstacle(facts) is None)
        strategy = next(options, None)
        if strategy is None:
            continue
        size = micro_batch_size(facts.batch_size, 1 / 3, is_uneven=True)
        split = strategy.splitting
        yield strategy if split is None else split.with_size(size)


def _facts(job: Job, verifier: Verifier) -> JobFacts:
    """Return the facts of a recorded step, or what is known without one."""
    try:
        return record(job).facts
    except RecordingError:
        return verifier.facts


def _broken_promise(found: Verification) -> str:
    plan = " + ".join(found.strategies) or "no strategy"
    if found.slope_error is not None and found.earned == "different":
        what = f"its gradient is off by {found.slope_error:.1g} from the slope of its own loss"
    elif found.effects:
        what = found.effects[0]
    else:
        what = f"{found.worst} is off by {found.deciding_error:.1g} (relative), in {found.dtype}"
    return f"{plan} claims {found.numerics} and is {found.earned}: {what}"


def _tell_nobody(_text: str) -> None:
    """Make no progress known."""
