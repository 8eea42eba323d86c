"""Plans over numbers of ranks: which placement fits, and which is the cheapest or the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from memfit.devices.placement import Placement
from memfit.devices.spec import Device
from memfit.errors import MemfitError, NoPlanFitsError, StrategyError, UsageError
from memfit.figures import ConsideredPlacement
from memfit.job import Job
from memfit.planner.one_placement import Wanted, plan_here, recorded_plain, trial_of
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.evaluation import Progress
from memfit.planner.search.recording_limits import failure_of
from memfit.planner.search.splits import SplitChecks, may_be_unproved
from memfit.prediction.recording import Recording
from memfit.session.batches import BatchLayout, find_layout
from memfit.strategies import CATALOGUE
from memfit.strategies.data_parallel import AbstractDataParallel, share_of
from memfit.strategies.micro_batching import MicroBatching
from memfit.virtual.process_group import one_rank_of

_FAILURES = (MemfitError, RuntimeError, NotImplementedError, TypeError, ValueError)
"""What a step may end with that reads shards, or that torch cannot shard."""


class Objective(StrEnum):
    """Of which placement a plan is taken, where several fit."""

    CHEAPEST = "cheapest"
    """That of the fewest ranks times seconds of a step."""
    FASTEST = "fastest"
    """That of the fewest seconds of a step."""


def plan_over_ranks(
    job: Job,
    device: Device,
    wanted: Wanted,
    numbers: Sequence[int],
    devices_per_node: int | None = None,
    *,
    objective: str = Objective.CHEAPEST,
) -> PlanningResult:
    """Plan for every number of ranks and every way to share the model; return one plan.

    Args:
        job: whose effective batch all ranks share.
        device: each of them has one.
        wanted: of the plan; budgets are of one rank.
        numbers: of ranks.
        devices_per_node: how many ranks share a machine.
        objective: what is least of the placement that is taken; see ``Objective``.

    Raises:
        NoPlanFitsError: if no placement fits, that of the smallest peak.
        UsageError: if a number of ranks or the objective makes no sense, or plans were to be
            measured.
        StrategyError: if the effective batch cannot be shared.
    """
    if objective not in [*Objective]:
        msg = f"The objective is {' or '.join(Objective)}, not {objective!r}."
        raise UsageError(msg)
    placements = [
        Placement(device=device.name, num_ranks=number, devices_per_node=devices_per_node)
        for number in sorted(set(numbers))
    ]
    if wanted.measure and placements[-1].num_ranks > 1:
        msg = "Plans for several ranks cannot be measured here; leave --measure out."
        raise UsageError(msg)
    sharing = _Sharing(job, device, wanted)
    found: list[_Found] = []
    for placement in placements:
        found += sharing.plans(placement)
    fitting = [each for each in found if each.plan is not None]
    if not fitting:
        raise _least_lacking(found)
    best = min(fitting, key=lambda each: each.cost(objective))
    rows = tuple(each.row(is_chosen=each is best) for each in found)
    assert best.plan is not None, "it fits"
    return replace(
        best.plan,
        ranks=best.placement.num_ranks,
        placements=rows,
        ended_early=wanted.patience.is_over,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What became of one way to share the model among so many ranks."""

    placement: Placement
    parallel: AbstractDataParallel | None
    plan: PlanningResult | None = None
    error: NoPlanFitsError | None = None
    reason: str = ""

    @property
    def device_seconds(self) -> float:
        """Return what a step costs, in seconds of devices."""
        prediction = None if self.plan is None else self.plan.prediction
        assert prediction is not None, "it fits"
        return self.placement.num_ranks * prediction.step_seconds

    def cost(self, objective: str) -> tuple[float, int]:
        """Return what is to be least; of equal placements the one of fewer ranks is taken."""
        num_ranks, seconds = self.placement.num_ranks, self.device_seconds
        return (seconds if objective == Objective.CHEAPEST else seconds / num_ranks), num_ranks

    def row(self, *, is_chosen: bool) -> ConsideredPlacement:
        """Return it for a table."""
        prediction = None if self.plan is None else self.plan.prediction
        smallest = None if self.error is None else self.error.smallest_peak_bytes
        return ConsideredPlacement(
            ranks=self.placement.num_ranks,
            parallel="" if self.parallel is None else self.parallel.label(),
            strategies=() if self.plan is None else self.plan.labels(),
            peak_bytes=smallest if prediction is None else prediction.bounded_bytes(),
            step_seconds=None if prediction is None else prediction.step_seconds,
            device_seconds=None if prediction is None else self.device_seconds,
            fits=prediction is not None,
            chosen=is_chosen,
            reason=self.reason,
        )


class _Sharing:
    """Plan a job for placements, each as the part of its first rank, which is the largest."""

    def __init__(self, job: Job, device: Device, wanted: Wanted) -> None:
        self._job = job
        self._device = device
        self._wanted = wanted
        self._whole: tuple[BatchLayout, Recording] | None = None

    def plans(self, placement: Placement) -> Iterator[_Found]:
        """Yield the plan for every way to share the model, or why there is none."""
        if placement.num_ranks == 1:
            yield self._planned(self._job, placement, None)
            return
        part = share_of(self._job, placement.num_ranks, placement.rank)
        if reason := self._mixes(part.batch_size):
            yield _Found(placement=placement, parallel=None, reason=reason)
            return
        kinds = [kind for kind in CATALOGUE if issubclass(kind, AbstractDataParallel)]
        wanted = {kind.name for kind in kinds} & {*self._wanted.require}
        for kind in kinds:
            if kind.name in self._wanted.forbid or (wanted and kind.name not in wanted):
                continue
            for parallel in kind.choices(placement.num_ranks, self._device.kind):
                yield self._planned(part, placement, parallel)

    def _planned(
        self, job: Job, placement: Placement, parallel: AbstractDataParallel | None
    ) -> _Found:
        wanted = self._wanted
        if parallel is not None:
            wanted = replace(wanted, progress=self._progress(placement, parallel))
        try:
            with one_rank_of(None if parallel is None else placement):
                plan = plan_here(job, self._device, wanted, parallel)
        except NoPlanFitsError as error:
            error.smallest_plan = None  # it could only be described among the ranks
            reason = "no plan keeps to the budget."
            return _Found(placement=placement, parallel=parallel, error=error, reason=reason)
        except _FAILURES as error:
            if parallel is None:
                raise
            return _Found(placement=placement, parallel=parallel, reason=failure_of(error))
        return _Found(placement=placement, parallel=parallel, plan=plan)

    def _progress(self, placement: Placement, parallel: AbstractDataParallel) -> Progress | None:
        told = self._wanted.progress
        if told is None:
            return None
        return lambda text: told(f"{placement.num_ranks} ranks, {parallel.label()}: {text}")

    def _mixes(self, share: int) -> str:
        """Say why ranks may not have parts of so many samples; nothing if they may."""
        wanted = self._wanted
        if self._whole is None:
            layout = find_layout(self._job)
            self._whole = layout, recorded_plain(self._job, layout, self._device)
        layout, whole = self._whole
        split = MicroBatching(micro_batch_size=share)
        if reason := split.unsuited(whole.facts):
            return reason
        unproved = may_be_unproved(CATALOGUE, wanted.allow)
        trial = trial_of(self._job, layout, whole, wanted.prove)
        return SplitChecks([split], whole.facts, unproved, trial).obstacle(split) or ""


def _least_lacking(found: Sequence[_Found]) -> Exception:
    """Return the error of the placement that came nearest; else why none was planned.

    A batch that no placement can share is no matter of the budget.
    """
    errors = [each.error for each in found if each.error is not None]
    if errors:
        return min(errors, key=lambda error: error.smallest_peak_bytes)
    reasons = [each.reason for each in found if each.reason]
    return StrategyError("data parallelism", reasons[0] if reasons else "all of it was forbidden.")
