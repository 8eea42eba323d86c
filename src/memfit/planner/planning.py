"""Plans: records the job as it is, searches the catalogue, and says why."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from memfit.allocator.simulate import peak_bytes
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import load_device
from memfit.devices.spec import Device
from memfit.errors import NoPlanFitsError
from memfit.figures import Prediction, RefusalKind
from memfit.job import Job
from memfit.planner.measured import check_is_here, fastest_measured, measured_times
from memfit.planner.result.assembly import FinishedSearch
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.candidates import Evaluator
from memfit.planner.search.evaluation import JobEvaluator, Progress
from memfit.planner.search.options import SearchSpace, calls_blocks_again, search_space
from memfit.planner.search.search import Search
from memfit.planner.trial import BatchTrial
from memfit.prediction.budget import MemoryBudget, read_budget
from memfit.prediction.predict import evaluate, with_other_spread
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import Recording, record
from memfit.session.batches import BatchLayout, find_layout
from memfit.strategies.plan import Plan

_SLACK = 0.02
"""Times are estimates, so plans closer than this are not told apart by more recordings."""
_SLACK_OF_LONG_STEPS = 0.05
"""The same for steps that take long to record."""
_MOST_OPERATORS_OF_LONG_STEPS = 35_000
"""How many operators are recorded for them before the effort counts as spent; half a minute."""

_YOUNG_OBJECTS = 200_000
"""Recording makes so many objects that looking for cycles among them at Python's usual pace takes a
sixth of the time."""


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Have Python look for reference cycles less often for a while."""
    usual = gc.get_threshold()
    gc.set_threshold(max(_YOUNG_OBJECTS, usual[0]) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@_collecting_rarely()
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

    Raises:
        NoPlanFitsError: if no plan fits, with the smallest peak reached and what holds it.
        UsageError: if the budget or a name makes no sense.
        StrategyError: if a required strategy cannot apply.
        DeviceUnavailableError: if plans are to be measured on a device that is not here.
    """
    spec = load_device(device)
    bounds = MemoryBudget(
        num_bytes=read_budget(budget),
        of=budget_of,
        host_bytes=read_budget(host_memory, "host memory"),
        disk_bytes=read_budget(disk, "disk space"),
    ).on(spec)
    if measure:
        check_is_here(spec)
    layout = find_layout(job)
    if progress is not None:
        progress("as it is")
    plain = _recorded_plain(job, layout, spec)
    space = search_space(
        plain.facts,
        allow,
        require,
        forbid,
        may_use_disk=bounds.disk_bytes is not None,
        calls_blocks_again=calls_blocks_again(plain.steady, plain.facts),
        trial=_trial(job, layout, plain, prove),
    )
    evaluator = JobEvaluator(
        job=job,
        device=spec,
        layout=layout,
        times=measured_times(job, spec, plain) if measure else OperatorTimes(device=spec),
        budget=bounds,
        space=space,
        plain=plain,
        progress=progress,
    )
    if space.must_split and space.split_checks is not None:
        space.split_checks.check_any()
    recordings = Evaluator(evaluator.in_short, evaluator.in_full)
    search = _search(recordings, space, is_long=plain.is_long and not thorough)
    best = search.run()
    if best is None:
        raise _no_plan_fits(search, bounds.num_bytes or 0)
    if measure:
        best = fastest_measured(job, spec, best, search)
    finished = FinishedSearch(
        device=spec, plain=plain, evaluate=recordings, search=search, is_measured=measure
    )
    return _reaching_both_spreads(finished.result(best), evaluator)


def _reaching_both_spreads(result: PlanningResult, evaluator: JobEvaluator) -> PlanningResult:
    """Have the prediction of a plan reach from evenly spread choices to uneven ones."""
    found, plain = result.prediction, evaluator.plain
    if found is None or not plain.decides_sizes:
        return result
    job, device, budget = evaluator.job, evaluator.device, evaluator.budget
    again = partial(record, job, result, evaluator.layout, device=device, facts=plain.facts)

    def judge(recording: Recording) -> Prediction:
        return evaluate(job, recording, device, result, budget=budget, times=evaluator.times)

    return replace(result, prediction=with_other_spread(found, plain, again, judge))


def _recorded_plain(job: Job, layout: BatchLayout, device: Device) -> Recording:
    """Record the job as it is; where sizes rest on answers, with the spread that takes more."""
    plain = record(job, Plan(), layout, device=device)
    if not plain.decides_sizes:
        return plain
    way, rules = plain.way.other_spread, rules_of(device)
    other = record(job, Plan(), layout, device=device, way=way, facts=plain.facts)
    return max(plain, other, key=lambda each: peak_bytes(each.steady, rules))


def _trial(
    job: Job, layout: BatchLayout, plain: Recording, prove: bool | None
) -> BatchTrial | None:
    """Return what settles on a real batch what could not be followed, where that is wanted.

    A step that looks at values may do something else for the next batch, such as a mean over those
    of its rows that are left: one batch shows too little, unless it is asked for.
    """
    if prove is False or (prove is None and plain.answers):
        return None
    trial = BatchTrial(job, layout, plain)
    return trial if prove or trial.is_quick else None


def _search(evaluate: Evaluator, space: SearchSpace, *, is_long: bool) -> Search:
    if is_long:
        bounds = {"slack": _SLACK_OF_LONG_STEPS, "most_operators": _MOST_OPERATORS_OF_LONG_STEPS}
        return Search(evaluate, space, **bounds)
    return Search(evaluate, space, slack=_SLACK)


def _no_plan_fits(search: Search, budget_bytes: int) -> NoPlanFitsError:
    """Return how small it got, what else could be allowed, and what could not be recorded."""
    smallest, space = search.smallest(), search.space
    remedies = [
        f"{each.strategy} ({each.sentence})"
        for each in space.refused
        if each.kind is RefusalKind.NOT_ALLOWED
    ]
    advice = ["Raise the budget or reduce the batch size or the model."]
    if remedies:
        advice.append("Not tried, because the results would change: " + "; ".join(remedies) + ".")
    failed = search.recordings.refused
    advice += [f"Left out: {name}: {reason}" for name, reason in failed.items()]
    advice += [f"Left out: {each.strategy}: {each.sentence}" for each in space.refused_splits()]
    return NoPlanFitsError(
        budget_bytes=budget_bytes,
        smallest_peak_bytes=smallest.peak_bytes,
        by_category=smallest.prediction.by_category,
        strategies=[strategy.label() for strategy in smallest.strategies],
        remedies=advice,
    )
