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
from memfit.planner.cache.kept_recordings import JobCache, KeptRecordings
from memfit.planner.cache.recording_cache import RecordingCache
from memfit.planner.measured import PlanClock, fastest_measured, measured_times
from memfit.planner.result.assembly import FinishedSearch
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.candidates import Evaluator, Strategies
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
    cache: RecordingCache | None = None


def plan_here(
    job: Job, device: Device, wanted: Wanted, parallel: AbstractDataParallel | None = None
) -> PlanningResult:
    """Find the fastest plan for a job, or for the part of one rank in the open process group.

    Raises:
        NoPlanFitsError: if no plan fits.
        MemfitError: as ``memfit.plan`` does.
    """
    layout = find_layout(job)
    if wanted.progress is not None:
        wanted.progress("as it is")
    # Measured times, and what ranks share, are of one call.
    cache = None if wanted.measure or parallel is not None else wanted.cache
    kept = JobCache.of(cache, job, layout)
    plain = kept.plain(job, layout, partial(recorded_plain, job, layout, device, parallel))
    kept.learn(plain.facts.separation, wanted.prove)
    try:
        evaluator = _evaluator(job, device, plain, wanted, layout=layout, parallel=parallel)
        found = _searched(KeptRecordings(evaluator, kept), wanted)
    finally:
        kept.keep_findings(plain.facts.separation, wanted.prove)
    return _reaching_both_spreads(found, evaluator)


def _evaluator(
    job: Job,
    device: Device,
    plain: Recording,
    wanted: Wanted,
    *,
    layout: BatchLayout,
    parallel: AbstractDataParallel | None,
) -> JobEvaluator:
    """Return what records the job under what may be combined.

    Raises:
        StrategyError: if pieces of the batch are required, and none may be taken.
    """
    space = search_space(
        plain.facts,
        wanted.allow,
        wanted.require,
        wanted.forbid,
        parallel=parallel,
        may_use_disk=wanted.bounds.disk_bytes is not None,
        calls_blocks_again=calls_blocks_again(plain.steady, plain.facts),
        trial=trial_of(job, layout, plain, wanted.prove),
    )
    times = OperatorTimes(device=device)
    evaluator = JobEvaluator(
        job=job,
        device=device,
        layout=layout,
        times=measured_times(job, device, plain) if wanted.measure else times,
        budget=wanted.bounds,
        space=space,
        plain=plain,
        progress=wanted.progress,
    )
    if space.must_split and space.split_checks is not None:
        space.split_checks.check_any()
    return evaluator


def _searched(recorded: KeptRecordings, wanted: Wanted) -> PlanningResult:
    """Search for the fastest plan that fits, and for what lies around it.

    Raises:
        NoPlanFitsError: if no plan fits.
    """
    evaluator = recorded.evaluator
    job, device, plain = evaluator.job, evaluator.device, evaluator.plain
    with beside(recorded, wanted.processes) as others:
        recordings = Evaluator(
            recorded.in_short, recorded.in_full, others.ahead, recorded.before_proof
        )
        known = recorded.fastest_known()
        search = _search(recordings, evaluator.space, plain, wanted, known)
        best = search.run()
        if best is None:
            tried = FinishedSearch(
                device=device, plain=plain, evaluate=recordings, search=search, is_measured=False
            )
            raise _no_plan_fits(tried, wanted.bounds.num_bytes or 0)
        wanted.patience.give_rest()
        is_measured = wanted.measure and not search.is_over
        if is_measured:
            clock = PlanClock(job, device, plain.facts.separation)
            try:
                best = fastest_measured(clock, best, search)
            except KeyboardInterrupt:  # the best by its estimate is known
                search.patience.interrupt()
                is_measured = False
        finished = FinishedSearch(
            device=device,
            plain=plain,
            evaluate=recordings,
            search=search,
            is_measured=is_measured,
        )
        rungs = finished.rungs(best)
        others.learn_effects()
        recorded.keep_known()
        return finished.result(best, rungs)


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


def _search(
    evaluate: Evaluator,
    space: SearchSpace,
    plain: Recording,
    wanted: Wanted,
    known: Strategies | None,
) -> Search:
    slack, most_operators = _SLACK, float(_MOST_OPERATORS)
    if wanted.thorough:
        most_operators = float("inf")
    elif plain.is_long:
        slack, most_operators = _SLACK_OF_LONG_STEPS, float(_MOST_OPERATORS_OF_LONG_STEPS)
    return Search(
        evaluate,
        space,
        slack=slack,
        is_long=plain.is_long,
        most_operators=most_operators,
        patience=wanted.patience,
        on_better=wanted.on_better,
        known=known,
    )


def _no_plan_fits(tried: FinishedSearch, budget_bytes: int) -> NoPlanFitsError:
    """Return how small it got, what else could be allowed, and what could not be recorded."""
    search, space = tried.search, tried.search.space
    smallest = search.smallest()
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
    error = NoPlanFitsError(
        budget_bytes=budget_bytes,
        smallest_peak_bytes=smallest.peak_bytes,
        by_category=smallest.prediction.by_category,
        strategies=[strategy.label() for strategy in smallest.strategies],
        remedies=advice,
    )
    error.smallest_plan = partial(tried.result, smallest, ())
    return error
