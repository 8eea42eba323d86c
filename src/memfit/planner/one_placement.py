"""Plans for one placement: records the job as it is, searches the catalogue, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from memfit.allocator.simulate import peak_bytes
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.spec import Device
from memfit.errors import NoPlanFitsError
from memfit.figures import Prediction, RefusalKind
from memfit.job import Job
from memfit.planner.beside import beside
from memfit.planner.measured import fastest_measured, measured_times
from memfit.planner.result.assembly import FinishedSearch
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.candidates import Evaluator
from memfit.planner.search.evaluation import JobEvaluator, Progress
from memfit.planner.search.options import SearchSpace, calls_blocks_again, search_space
from memfit.planner.search.patience import Patience
from memfit.planner.search.search import OnBetter, Search
from memfit.planner.trial import BatchTrial
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.predict import evaluate, with_other_spread
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import Recording, record
from memfit.session.batches import BatchLayout, find_layout
from memfit.strategies.data_parallel import AbstractDataParallel
from memfit.strategies.plan import Plan

_SLACK = 0.02
"""Times are estimates, so plans closer than this are not told apart by more recordings."""
_SLACK_OF_LONG_STEPS = 0.05
"""The same for steps that take long to record."""
_MOST_OPERATORS = 45_000
"""How many operators are recorded before the effort counts as spent; under a minute."""
_MOST_OPERATORS_OF_LONG_STEPS = 35_000
"""The same for steps that take long to record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of a plan; see memfit.plan."""

    bounds: MemoryBudget
    allow: Sequence[str] = ()
    require: Sequence[str] = ()
    forbid: Sequence[str] = ()
    measure: bool = False
    thorough: bool = False
    prove: bool | None = None
    progress: Progress | None = None
    on_better: OnBetter | None = None
    patience: Patience = field(default_factory=Patience)
    processes: int = 1


def plan_here(
    job: Job, device: Device, wanted: Wanted, parallel: AbstractDataParallel | None = None
) -> PlanningResult:
    """Find the fastest plan for a job, or for the part of one rank in the open process group.

    Raises:
        NoPlanFitsError: if no plan fits.
        MemfitError: as ``memfit.plan`` does.
    """
    layout, bounds, progress = find_layout(job), wanted.bounds, wanted.progress
    if progress is not None:
        progress("as it is")
    plain = recorded_plain(job, layout, device, parallel)
    space = search_space(
        plain.facts,
        wanted.allow,
        wanted.require,
        wanted.forbid,
        parallel=parallel,
        may_use_disk=bounds.disk_bytes is not None,
        calls_blocks_again=calls_blocks_again(plain.steady, plain.facts),
        trial=trial_of(job, layout, plain, wanted.prove),
    )
    times = OperatorTimes(device=device)
    evaluator = JobEvaluator(
        job=job,
        device=device,
        layout=layout,
        times=measured_times(job, device, plain) if wanted.measure else times,
        budget=bounds,
        space=space,
        plain=plain,
        progress=progress,
    )
    if space.must_split and space.split_checks is not None:
        space.split_checks.check_any()
    with beside(evaluator, wanted.processes) as others:
        recordings = Evaluator(evaluator.in_short, evaluator.in_full, others.ahead)
        search = _search(recordings, space, plain, wanted)
        best = search.run()
        if best is None:
            raise _no_plan_fits(search, bounds.num_bytes or 0)
        is_measured = wanted.measure and not search.is_over
        if is_measured:
            best = fastest_measured(job, device, best, search)
        finished = FinishedSearch(
            device=device,
            plain=plain,
            evaluate=recordings,
            search=search,
            is_measured=is_measured,
        )
        rungs = finished.rungs(best)
        others.learn_effects()
        return _reaching_both_spreads(finished.result(best, rungs), evaluator)


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


def recorded_plain(
    job: Job, layout: BatchLayout, device: Device, parallel: AbstractDataParallel | None = None
) -> Recording:
    """Record the job as it is; where sizes rest on answers, with the spread that takes more."""
    as_it_is = Plan(strategies=() if parallel is None else (parallel,))
    plain = record(job, as_it_is, layout, device=device)
    if not plain.decides_sizes:
        return plain
    way, rules = plain.way.other_spread, rules_of(device)
    other = record(job, as_it_is, layout, device=device, way=way, facts=plain.facts)
    return max(plain, other, key=lambda each: peak_bytes(each.steady, rules))


def trial_of(
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


def _search(evaluate: Evaluator, space: SearchSpace, plain: Recording, wanted: Wanted) -> Search:
    slack, most_operators = _SLACK, float(_MOST_OPERATORS)
    if wanted.thorough:
        most_operators = float("inf")
    elif plain.is_long:
        slack, most_operators = _SLACK_OF_LONG_STEPS, float(_MOST_OPERATORS_OF_LONG_STEPS)
    return Search(
        evaluate,
        space,
        slack=slack,
        most_operators=most_operators,
        patience=wanted.patience,
        on_better=wanted.on_better,
    )


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
