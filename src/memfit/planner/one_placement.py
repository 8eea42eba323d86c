"""Plans for one placement: records the job as it is, searches the catalogue, and says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from memfit.allocator.simulate import peak_bytes
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.spec import Device
from memfit.errors import NoPlanFitsError
from memfit.figures import Prediction, RefusalKind
from memfit.job import Job
from memfit.planner.cache.kept_recordings import JobCache, KeptRecordings
from memfit.planner.cache.recording_cache import RecordingCache
from memfit.planner.measured import PlanClock, fastest_measured, measured_times
from memfit.planner.result.assembly import FinishedSearch
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.aside import Aside, can_fork
from memfit.planner.search.candidates import Evaluator
from memfit.planner.search.evaluation import Foreseen, JobEvaluator, Progress
from memfit.planner.search.foresight import Foresight
from memfit.planner.search.options import SearchSpace, calls_blocks_again, search_space
from memfit.planner.search.patience import Patience
from memfit.planner.search.recording_limits import RecordingLimits
from memfit.planner.search.search import OnBetter, Search
from memfit.planner.search.splits import SplitChecks
from memfit.planner.trial import BatchTrial
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.predict import evaluate, wants_effects, with_other_spread
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import Recording, record, recorded_otherwise
from memfit.separation.findings import Findings
from memfit.separation.separation import Separation
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
_NUM_STEPS = 2
_LONGEST = 8
"""So many times as long as the step as it is, one under a plan may be: pieces are run twice."""
_NICE = 19
"""It is wanted last, so recordings come first."""
_LEAST_WAIT_SECONDS = 20.0
_MOST_TIMES = 20
"""As long as recording the plain step took; a copy that takes longer is given up."""


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
    longest = max(_effort(plain, wanted), _LONGEST * len(plain.steady.operations))
    evaluator = JobEvaluator(
        job=job,
        device=device,
        layout=layout,
        times=measured_times(job, device, plain) if wanted.measure else times,
        budget=wanted.bounds,
        space=space,
        plain=plain,
        progress=wanted.progress,
        limits=RecordingLimits(most_operators=_NUM_STEPS * longest, patience=wanted.patience),
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
        search = _search(recordings, evaluator.space, plain, wanted)
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
        best, rungs = finished.with_rungs(best)
        others.learn_effects()
        return finished.result(best, rungs)


def _reaching_both_spreads(result: PlanningResult, evaluator: JobEvaluator) -> PlanningResult:
    """Have the prediction of a plan reach to what other answers give."""
    found, plain = result.prediction, evaluator.plain
    if found is None or not plain.answers:
        return result
    job, device, budget = evaluator.job, evaluator.device, evaluator.budget
    again = partial(record, job, result, evaluator.layout, device=device, facts=plain.facts)

    def judge(recording: Recording) -> Prediction:
        return evaluate(job, recording, device, result, budget=budget, times=evaluator.times)

    return replace(result, prediction=with_other_spread(found, plain, again, judge))


def recorded_plain(
    job: Job, layout: BatchLayout, device: Device, parallel: AbstractDataParallel | None = None
) -> Recording:
    """Record the job as it is; where it rests on answers, with those that take more."""
    as_it_is = Plan(strategies=() if parallel is None else (parallel,))
    plain = record(job, as_it_is, layout, device=device)
    again = partial(record, job, as_it_is, layout, device=device, facts=plain.facts)
    others = [other for _, other in recorded_otherwise(plain, again)]
    return max([plain, *others], key=lambda each: peak_bytes(each.steady, rules_of(device)))


def trial_of(
    job: Job, layout: BatchLayout, plain: Recording, prove: bool | None
) -> BatchTrial | None:
    """Return what settles on a real batch what could not be followed, where that is wanted.

    A step that looks at values may do something else for the next batch, such as a mean over those
    of its rows that are left: that one batch is alike shows too little, unless it is asked for.
    """
    if prove is False:
        return None
    trial = BatchTrial(job, layout, plain, settles=bool(prove) or not plain.answers)
    return trial if prove or trial.is_quick else None


def _search(evaluate: Evaluator, space: SearchSpace, plain: Recording, wanted: Wanted) -> Search:
    is_bounded = plain.is_long and not wanted.thorough
    return Search(
        evaluate,
        space,
        slack=_SLACK_OF_LONG_STEPS if is_bounded else _SLACK,
        is_long=plain.is_long,
        most_operators=_effort(plain, wanted),
        patience=wanted.patience,
        on_better=wanted.on_better,
    )


def _effort(plain: Recording, wanted: Wanted) -> float:
    """Return how many operators are recorded before the effort counts as spent."""
    if wanted.thorough:
        return float("inf")
    return _MOST_OPERATORS_OF_LONG_STEPS if plain.is_long else _MOST_OPERATORS


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
        by_category=smallest.prediction.bounded_parts(),
        strategies=[strategy.label() for strategy in smallest.strategies],
        remedies=advice,
    )
    error.smallest_plan = partial(tried.result, smallest, ())
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """Recordings of plans that will be asked for, and what the notes of every plan say."""

    ahead: Foresight[Foreseen] | None = None
    checks: SplitChecks | None = None

    def learn_effects(self) -> None:
        """Take over what the step changes besides gradients, waiting for it."""
        if self.checks is not None:
            self.checks.learn_effects()


@contextmanager
def beside(kept: KeptRecordings, num_processes: int) -> Iterator[_Beside]:
    """Use other processes inside, where more than one may be used; nothing is left of them."""
    evaluator = kept.evaluator
    if num_processes < 2 or not can_fork():
        yield _Beside()
        return
    plain, checks = evaluator.plain, evaluator.space.split_checks
    separation = plain.facts.separation if wants_effects(plain) else None
    ahead = Foresight(
        record=evaluator.foresee,
        accept=kept.accept,
        tell=evaluator.tell,
        is_known=kept.is_known,
        num_processes=num_processes,
        most_seconds=_LEAST_WAIT_SECONDS + _MOST_TIMES * plain.record_seconds,
    )
    if checks is not None and separation is not None:
        checks.effects = Aside(partial(_with_effects, separation), _NICE)
    try:
        yield _Beside(ahead=ahead, checks=checks)
    finally:
        ahead.close()
        if checks is not None:
            checks.close()


def _with_effects(separation: Separation) -> Findings:
    """Find what every step changes; called in a copy of this process."""
    separation.effects()
    return separation.findings()
