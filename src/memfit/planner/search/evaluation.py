"""Records a job under combinations of strategies; estimates what recomputing blocks would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from memfit.cost.checkpoints import checkpoint_seconds
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.spec import CPU, Device
from memfit.errors import StrategyError
from memfit.figures import Prediction
from memfit.job import Job
from memfit.planner.recompute.assignment import Known
from memfit.planner.recompute.blocks import chain_of
from memfit.planner.recompute.chain import Chain
from memfit.planner.search.candidates import (
    Candidate,
    Strategies,
    keeping_nothing,
    num_recomputed,
    recorded_members,
)
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.recording_limits import RecordingLimits, TooLongError, failure_named
from memfit.planner.search.refinements import refined
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.predict import evaluate
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import Recording, record
from memfit.session.batches import BatchLayout
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.plan import Plan, conflict, in_catalogue_order, splitting_of
from memfit.trace.abridgement import Abridgement, few_pieces
from memfit.trace.events import Category, Phase
from memfit.trace.progress import told_of_operators

Progress = Callable[[str], None]
_FEW_PIECES = 4
"""A batch of more micro-batches than this is recorded with its first and last ones only."""
_FEW_PIECES_OF_LONG_STEPS = 2
"""The same for steps that take long to record."""
_MANY_PIECES = 32
"""Of more pieces of representations than this, all but a few are left out for good."""
_MOST_KEPT = 3
"""Recordings are large, so only the latest wait for the same with another allocator setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What recording a combination gave in a copy of this process, and what it learnt by it."""

    candidate: Candidate
    has_unlike_pieces: tuple[bool, bool]
    """Before and after; see ``JobEvaluator``."""
    few: Mapping[Strategies, tuple[Abridgement, float]]
    recorded: frozenset[Strategies]
    besides: Sequence[Candidate] = ()
    """The same recording with what the allocator may be told."""


@dataclass(slots=True, kw_only=True, eq=False)
class JobEvaluator:
    """Record a job on a device under any combination; see ``search.Evaluator``."""

    job: Job
    device: Device
    layout: BatchLayout
    times: OperatorTimes
    budget: MemoryBudget
    space: SearchSpace
    """Asked before a batch is cut into micro-batches, and what may be done to blocks."""
    plain: Recording
    """The job as it is."""
    progress: Progress | None = None
    limits: RecordingLimits = field(default_factory=RecordingLimits)
    _latest: dict[tuple[Strategies, int, bool], Recording] = field(
        default_factory=dict, init=False, repr=False
    )
    """The last recordings, which serve whatever the allocator is told besides."""
    _latest_chain: tuple[Recording, bool, Chain, Known] | None = field(
        default=None, init=False, repr=False
    )
    _few: dict[Strategies, tuple[Abridgement, float]] = field(
        default_factory=dict, init=False, repr=False
    )
    """Of what was abridged, how many pieces there are, and the seconds of those recorded."""
    has_unlike_pieces: bool = field(default=False, init=False, repr=False)
    """Whether micro-batches were seen to be unlike one another, so that all are recorded."""
    _recorded: set[Strategies] = field(default_factory=set, init=False, repr=False)
    """What was recorded without failing."""
    _is_assuming: bool = field(default=False, init=False, repr=False)
    _assumed: set[tuple[Strategies, int, bool]] = field(default_factory=set, init=False, repr=False)
    """Which of the last recordings were made before their pieces were known to be such as may be
    taken."""

    def record_before_proof(self, strategies: Strategies) -> None:
        """Record pieces while a copy of this process still looks into them.

        The recording counts once they are asked for, if they turn out to be proved by then.
        """
        split, separation = splitting_of(strategies), self.plain.facts.separation
        if split is None or split.keeps_batch_whole or separation is None:
            return
        self._is_assuming = True
        try:
            with separation.assuming(split.micro_batch_size):
                self.in_short(strategies)
        except StrategyError:
            return  # it is seen again where it can be reported
        finally:
            self._is_assuming = False

    def foresee(self, strategies: Strategies) -> Foreseen:
        """Record in short in a copy of this process, and return all that it has learnt by it."""
        self.progress = None  # what draws it is not there in a copy
        found = self.learning(self.in_short, strategies)
        return replace(found, besides=tuple(self._besides(strategies)))

    def _besides(self, strategies: Strategies) -> Iterator[Candidate]:
        """Yield what comes of a recording without making it again, where making it takes long."""
        names = {strategy.name for strategy in strategies}
        options = (option for options in self.space.options for option in options if option)
        for option in options if self.plain.is_long else ():
            if not option.is_recorded and option.name not in names:
                yield self.in_short(in_catalogue_order((*strategies, option)))

    def learning(
        self, record: Callable[[Strategies], Candidate], strategies: Strategies
    ) -> Foreseen:
        """Record a combination, and return all that was learnt by it."""
        before, few = self.has_unlike_pieces, set(self._few)
        candidate = record(strategies)
        return Foreseen(
            candidate=candidate,
            has_unlike_pieces=(before, self.has_unlike_pieces),
            few={key: value for key, value in self._few.items() if key not in few},
            recorded=frozenset(self._recorded),
        )

    def accept(self, found: Foreseen) -> Candidate | None:
        """Learn what was found elsewhere; None if that began from another state than this."""
        before, after = found.has_unlike_pieces
        if before is not self.has_unlike_pieces:
            return None
        self.has_unlike_pieces = after
        self._few |= found.few
        self._recorded |= found.recorded
        return found.candidate

    def under_budget(self, candidate: Candidate) -> Candidate:
        """Return what another call has recorded under this budget, and as this one knows it."""
        known, budget = candidate.prediction, self.budget
        num_bytes = known.bounded_bytes(budget.of)
        prediction = replace(
            known,
            budget_bytes=budget.num_bytes,
            budget_of=budget.of or known.budget_of,
            fits=budget.holds(num_bytes, known.host_bytes, known.disk_bytes),
            numerics=str(Plan(strategies=candidate.strategies).numerics_for(self.plain.facts)),
        )
        found = replace(candidate, prediction=prediction)
        return found if found.chain is None else refined(found)

    def in_full(self, strategies: Strategies) -> Candidate:
        """Record the whole step; of a long one, what stands for it."""
        is_many = num_recomputed(strategies, self.job.batch_size) > _MANY_PIECES
        if self.plain.is_long or is_many:
            return self.in_short(strategies)
        try:
            return self._whole(strategies)
        except TooLongError:
            return replace(self.in_short(strategies), is_exact=True)

    def in_short(self, strategies: Strategies) -> Candidate:
        """Record the step, with a few micro-batches only where there are many.

        That has to do for steps that take long to record.
        """
        if num_recomputed(strategies, self.job.batch_size) > _FEW_PIECES:
            return self._abridged(strategies)
        num_samples = self._enough_samples(strategies)
        if num_samples == self.job.batch_size:
            return self._whole(strategies)
        repeated = self._repeated(strategies)
        if repeated is not None:
            return repeated
        job = replace(self.job, batch_size=num_samples)
        recording = self._record(strategies, job)
        repeats = self.job.batch_size / num_samples
        prediction = self._prediction(strategies, job, recording)
        prediction = self._lengthened(prediction, recording, repeats)
        found = self._candidate(strategies, prediction, recording, repeats)
        return replace(found, is_exact=self.plain.is_long)

    def _repeated(self, strategies: Strategies) -> Candidate | None:
        """Record a few micro-batches, and repeat those in the middle; None if they are not alike.

        What comes of it is the whole step's recording: the same events in the same order.
        """
        split = splitting_of(strategies)
        assert split is not None, "a batch in one piece is recorded whole"
        if self.plain.is_long or self.has_unlike_pieces:
            return None
        fewest = split.fewest_pieces
        with few_pieces(fewest):
            recording = self._record(strategies, self.job, is_abridged=True)
        num_pieces = -(-self.job.batch_size // split.micro_batch_size)
        longer = recording.with_more_pieces(num_pieces - fewest)
        if longer is None:
            # What moves bytes says nothing about the pieces of other plans.
            self.has_unlike_pieces = not recording.spill.has_moved
            return None
        prediction = self._prediction(strategies, self.job, longer)
        found = self._candidate(strategies, prediction, longer, 1.0)
        return replace(found, num_operators=len(recording.steady.operations))

    def _abridged(self, strategies: Strategies) -> Candidate:
        """Record a step whose loss is that of the whole batch, with a few pieces of each call.

        The peak is that of all pieces. The seconds are too many by what belongs to the loss alone.
        """
        with few_pieces(_FEW_PIECES) as few:
            recording = self._record(strategies, self.job, is_abridged=True)
        prediction = self._prediction(strategies, self.job, recording)
        if few.num_recorded:
            once = self._seconds_of_update(recording)
            self._few[recorded_members(strategies)] = few, prediction.step_seconds - once
        missing = self._seconds_left_out(strategies)
        prediction = replace(prediction, step_seconds=prediction.step_seconds + missing)
        found = self._candidate(strategies, prediction, recording, 1.0)
        is_many = num_recomputed(strategies, self.job.batch_size) > _MANY_PIECES
        return replace(found, is_exact=self.plain.is_long or is_many)

    def _seconds_left_out(self, strategies: Strategies) -> float:
        """Estimate how long the pieces take that an abridged recording left out.

        All of them are run again, so they take what pieces take where none is kept.
        """
        members = recorded_members(strategies)
        if members not in self._few:
            return 0.0  # no call was cut
        few, _ = self._few[members]
        bare = tuple(keeping_nothing(member) for member in members)
        if bare not in self._few:
            self._abridged(bare)
        bare_few, bare_seconds = self._few[bare]
        return bare_seconds * few.num_left_out / bare_few.num_recorded

    def _whole(self, strategies: Strategies) -> Candidate:
        """Record every micro-batch."""
        recording = self._record(strategies, self.job)
        prediction = self._prediction(strategies, self.job, recording)
        return self._candidate(strategies, prediction, recording, 1.0)

    def _record(self, strategies: Strategies, job: Job, *, is_abridged: bool = False) -> Recording:
        members = recorded_members(strategies)
        if job is self.job and not members:
            return self.plain
        key = (members, job.batch_size, is_abridged)
        if key in self._assumed and not self._is_assuming:
            self._assumed.remove(key)
            early = self._latest.pop(key, None)
            if self._is_as_assumed(strategies) and early is not None:
                self._latest[key] = early
        if key not in self._latest:
            recording = self._recorded_now(members, job)
            if len(self._latest) == _MOST_KEPT:
                del self._latest[next(iter(self._latest))]
            self._latest[key] = recording
            if self._is_assuming:
                self._assumed.add(key)
        return self._latest[key]

    def _is_as_assumed(self, strategies: Strategies) -> bool:
        """Return whether pieces leave nothing behind that the whole batch would not.

        Raises:
            StrategyError: if they may not be taken.
        """
        if obstacle := self.space.obstacle(strategies):
            raise StrategyError(*obstacle)
        split = splitting_of(strategies)
        separation = self.plain.facts.separation
        return split is None or not split.separability(separation).overwritten

    def _recorded_now(self, strategies: Strategies, job: Job) -> Recording:
        if not self._is_assuming and (obstacle := self.space.obstacle(strategies)):
            raise StrategyError(*obstacle)
        self.tell(strategies)
        plan = Plan(strategies=strategies)
        known = {strategy.name for members in self._recorded for strategy in members}
        with failure_named(strategies, known), told_of_operators(self.limits.look):
            found = record(
                job,
                plan,
                self.layout,
                device=self.device,
                way=self.plain.way,
                facts=self.plain.facts,
                repeats_pass=self.plain.has_like_passes,
            )
        self._recorded.add(recorded_members(strategies))
        return found

    def tell(self, strategies: Strategies) -> None:
        """Say what is recorded now."""
        if self.progress is not None:
            self.progress(" + ".join(strategy.label() for strategy in strategies) or "as it is")

    def _prediction(self, strategies: Strategies, job: Job, recording: Recording) -> Prediction:
        plan = Plan(strategies=strategies)
        return evaluate(job, recording, self.device, plan, budget=self.budget, times=self.times)

    def _enough_samples(self, strategies: Strategies) -> int:
        """Return a batch of two micro-batches and the last one, which may be smaller."""
        whole = self.job.batch_size
        few = _FEW_PIECES_OF_LONG_STEPS if self.plain.is_long else _FEW_PIECES
        split = splitting_of(strategies)
        if split is None or split.keeps_batch_whole or whole <= few * split.micro_batch_size:
            return whole
        return 2 * split.micro_batch_size + whole % split.micro_batch_size

    def _lengthened(
        self, prediction: Prediction, recording: Recording, repeats: float
    ) -> Prediction:
        """Return what the whole batch takes, from a few of its micro-batches."""
        batch_bytes = prediction.by_category.get(Category.BATCH.value, 0)
        more_bytes = round(batch_bytes * (repeats - 1))
        once = self._seconds_of_update(recording)
        longer = replace(
            prediction,
            batch_size=self.job.batch_size,
            peak_allocated_bytes=prediction.peak_allocated_bytes + more_bytes,
            peak_reserved_bytes=prediction.peak_reserved_bytes + more_bytes,
            process_bytes=prediction.process_bytes + more_bytes,
            by_category={**prediction.by_category, Category.BATCH.value: batch_bytes + more_bytes},
            step_seconds=once + (prediction.step_seconds - once) * repeats,
        )
        fits = self.budget.holds(longer.bounded_bytes(), longer.host_bytes, longer.disk_bytes)
        return replace(longer, fits=fits)

    def _seconds_of_update(self, recording: Recording) -> float:
        """Return how long the optimizer takes, which steps once whatever there is of pieces."""
        operations = recording.steady.operations
        return sum(self.times.seconds(o) for o in operations if o.phase is Phase.OPTIMIZER)

    def _candidate(
        self,
        strategies: Strategies,
        prediction: Prediction,
        recording: Recording,
        repeats: float,
    ) -> Candidate:
        """Add what recomputing blocks would do, unless blocks are recomputed already."""
        names = {strategy.name for strategy in strategies}
        steady = recording.steady
        found = Candidate(
            strategies=strategies, prediction=prediction, num_operators=len(steady.operations)
        )
        if not self.space.may_recompute or ActivationCheckpointing.name in names:
            return found
        if num_recomputed(strategies, 1):
            return found
        if conflict([*strategies, ActivationCheckpointing()]):
            return found
        offload = ActivationOffload.name
        may_offload = self.device.kind != CPU and self.space.offers(offload)
        chain, known = self._chain(recording, may_offload=may_offload and offload not in names)
        return refined(replace(found, chain=chain, known=known, repeats=repeats))

    def _chain(self, recording: Recording, *, may_offload: bool) -> tuple[Chain, Known]:
        """Return what could be done to the blocks of a recording, and what is known of that."""
        latest = self._latest_chain
        if latest is None or latest[0] is not recording or latest[1] is not may_offload:
            link = self.device.value("link_bytes_per_second") if may_offload else None
            plain, rules = self.plain.steady, rules_of(self.device)
            hooks = partial(checkpoint_seconds, device=self.device)
            chain = chain_of(
                recording.steady, rules, self.times.seconds, link, plain, hooks_of=hooks
            )
            latest = self._latest_chain = recording, may_offload, chain, {}
        return latest[2:]
