"""Plans: finds the fastest way to fit a budget, on one device or on as many as are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.devices.catalogue import load_device
from memfit.errors import UsageError
from memfit.job import Job
from memfit.planner.cache.recording_cache import RecordingCache
from memfit.planner.garbage import collecting_rarely
from memfit.planner.measured import check_is_here
from memfit.planner.one_placement import Wanted, plan_here
from memfit.planner.over_ranks import Objective, plan_over_ranks
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.evaluation import Progress
from memfit.planner.search.patience import Patience
from memfit.planner.search.search import OnBetter
from memfit.prediction.budget import MemoryBudget, read_budget

_SHARE_OF_ESTIMATES = 0.6
"""Of a bound on time, where the rest is for running the plans that are estimated to be fast."""


@collecting_rarely()
def plan(
    job: Job,
    device: str = "cpu",
    budget: str | int | None = None,
    *,
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
    budget_of: str | None = None,
    host_memory: str | int | None = None,
    disk: str | int | None = None,
    measure: bool = False,
    thorough: bool = False,
    prove: bool | None = None,
    progress: Progress | None = None,
    seconds: float | None = None,
    on_better: OnBetter | None = None,
    processes: int = 1,
    cache: RecordingCache | None = None,
    ranks: int | Sequence[int] | None = None,
    devices_per_node: int | None = None,
    objective: str = Objective.CHEAPEST,
    processor_seconds: float | None = None,
) -> PlanningResult:
    """Find the fastest plan for a job that fits a budget and keeps the results.

    Every plan that is compared has been recorded with its strategies applied; nothing is trained.
    Where micro-batches may be needed, the samples of a batch are followed through the recorded
    step, to prove that pieces keep the results.

    Args:
        job: what would be trained; its effective batch size stays.
        device: a name from ``memfit devices``.
        budget: bytes, or a size such as ``"2GiB"``; None means the memory of the device.
        allow: names of strategies (``"bf16"``), or numerics classes (``"approximate"``), that may
            change the results. Exact and same-in-law ones are always allowed.
        require: names of strategies that the plan must have.
        forbid: names of strategies that the plan may not have.
        budget_of: what the budget bounds, ``allocated``, ``reserved`` or ``process``; by default
            allocated bytes on ``cpu`` and process bytes on a GPU.
        host_memory: what may be taken of the host's memory beside a GPU; None sets no bound.
        disk: what may be written to disk; None means nothing.
        measure: learn how long operators take from a few steps that are run here, and choose among
            the fastest plans by running them. The device has to be this machine's.
        thorough: search steps that take seconds to record as far as all others, for minutes.
        prove: whether pieces whose samples could not be followed are tried on a real batch, on the
            CPU: gradients against those of other pieces. None does so where it takes seconds.
        progress: told of every plan that is about to be recorded.
        seconds: how long to look; then the fastest plan so far is taken, or the next that fits
            where there is none yet. None means until nothing estimated is faster.
        on_better: told of every plan that fits and is faster than those before it, as a
            ``memfit.figures.PlanSoFar``.
        processes: in how many processes to record; those beside this one are copies of it, made on
            Linux where no CUDA card is. The plan is the same.
        cache: keeps recordings between calls, as ``memfit plan`` has them kept; None keeps none.
        ranks: how many share the model and the effective batch, each on such a device with such a
            budget; of several numbers that fit, the objective decides. None leaves that to the job.
        devices_per_node: how many ranks share a machine; None means as many as there are, up to 8.
        objective: of several placements, ``"cheapest"`` takes that of the fewest ranks times
            seconds of a step, ``"fastest"`` that of the fewest seconds of a step.
        processor_seconds: as ``seconds``, but of the processor, in this process and those that it
            has started and that are over; others on the machine do not shorten the search then.

    Raises:
        NoPlanFitsError: if no plan fits, with the smallest peak reached and what holds it.
        UsageError: if the budget, a name or a number makes no sense.
        StrategyError: if a required strategy cannot apply.
        DeviceUnavailableError: if plans are to be measured on a device that is not here.
        KeyboardInterrupt: if it is interrupted before any plan that fits was recorded; later, the
            fastest so far is returned, and a note says so.
    """
    spec = load_device(device)
    wanted = Wanted(
        bounds=MemoryBudget(
            num_bytes=read_budget(budget),
            of=budget_of,
            host_bytes=read_budget(host_memory, "host memory"),
            disk_bytes=read_budget(disk, "disk space"),
        ).on(spec),
        allow=allow,
        require=require,
        forbid=forbid,
        measure=measure,
        thorough=thorough,
        prove=prove,
        progress=progress,
        on_better=on_better,
        patience=Patience(seconds, _SHARE_OF_ESTIMATES if measure else 1.0, processor_seconds),
        processes=processes,
        cache=cache,
    )
    if processes < 1:
        msg = f"processes must be 1 or more, not {processes}; leave it out to use this one alone."
        raise UsageError(msg)
    if measure:
        check_is_here(spec)
    if ranks is None:
        return plan_here(job, spec, wanted)
    numbers = [ranks] if isinstance(ranks, int) else [*ranks]
    return plan_over_ranks(job, spec, wanted, numbers, devices_per_node, objective=objective)
