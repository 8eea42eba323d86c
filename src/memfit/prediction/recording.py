"""Records a step on fake tensors, on the CPU or on a virtual GPU; nothing is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from memfit.devices.spec import CPU, CUDA, Device
from memfit.errors import MemfitError
from memfit.figures import Answer
from memfit.forward_state import RandomPositions
from memfit.job import Job
from memfit.kernels.cuda.card import Card
from memfit.live_state import LiveState
from memfit.prediction.placed_recorder import card_of, recording_on
from memfit.prediction.refusals import check_placed, clear_refusals, code_at_fault, step_at_fault
from memfit.prediction.repeated_pass import RepeatedPass
from memfit.prediction.ways import Way, batch_for, fake_batch, mode_of
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.separation.separation import Separation
from memfit.session.batches import BatchLayout, find_layout
from memfit.session.borrowing import borrowed_to_record, code_left_alone, left_alone
from memfit.session.evaluation_mode import ModesSeen, evaluation_notes
from memfit.session.own_precision import OwnPrecisionWatch
from memfit.session.session import Session
from memfit.session.spill import Spill
from memfit.session.storages import with_lines_of
from memfit.strategies.fact_finding import gather_facts, probes
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import Plan
from memfit.trace.events import Phase, StepMark, Trace, trace_of_step
from memfit.trace.phases import StepFollower
from memfit.trace.recorder import Recorder
from memfit.trace.repetition import ForwardStart, repeated
from memfit.virtual.assumptions import Assumptions
from memfit.virtual.process_group import groups_counted
from memfit.virtual.tensors import ValuesNeededError, VirtualTensors

Step = Callable[[], object]
_NUM_STEPS = 2
_MANY_OPERATIONS = 3000
"""About a second's worth of recording, and several of analysis."""


@dataclass(frozen=True, kw_only=True)
class StepRecording:
    """Everything that was allocated since before the model was built, and where its steps lie."""

    history: Trace
    marks: Sequence[StepMark]
    card: Card | None
    record_seconds: float
    answers: Sequence[Answer] = ()
    """What was made up where the step looked at values."""
    modules_in_evaluation: Sequence[str] = ()
    """The outermost modules that a step calls in evaluation mode."""
    group_sizes: Sequence[int] = ()
    """The ranks of each process group that this one belongs to; empty where none was opened."""
    notes: Sequence[str] = ()
    """What the step's owner may not have meant, or what was recorded otherwise than it would be
    run, a sentence each."""

    @cached_property
    def first(self) -> Trace:
        """Return the first step, in which optimizer states are made."""
        return trace_of_step(self.history, self.marks[0])

    @cached_property
    def steady(self) -> Trace:
        """Return the last step, which stands for all later ones."""
        return trace_of_step(self.history, self.marks[-1])

    @property
    def decides_sizes(self) -> bool:
        """Return whether the size of a tensor rests on an answer."""
        return any(answer.decides_sizes for answer in self.answers)

    @property
    def is_long(self) -> bool:
        """Return whether recording such a step takes seconds; the same on every machine."""
        return len(self.steady.operations) > _MANY_OPERATIONS


@dataclass(frozen=True, kw_only=True)
class Recording(StepRecording):
    """A job's first and second step under a plan."""

    facts: JobFacts
    way: Way = field(default_factory=Way)
    """How the step could be recorded."""
    spill: Spill = field(default_factory=Spill)
    """What the last step kept and moved outside the device."""
    forward_starts: Sequence[ForwardStart] = ()
    has_like_passes: bool = False
    """Whether forward and backward did the same in both steps, event by event."""

    def with_more_pieces(self, number: int) -> Recording | None:
        """Return the recording of steps that have so many more micro-batches.

        None if pieces are not seen to be alike, or move bytes, which were counted for those few.
        """
        if self.spill.has_moved:
            return None
        longer = repeated(self.history, self.marks, self.forward_starts, number)
        if longer is None:
            return None
        history, marks = longer
        return replace(self, history=history, marks=marks, forward_starts=())


def record(
    job: Job,
    plan: Plan | None = None,
    layout: BatchLayout | None = None,
    *,
    device: Device | None = None,
    way: Way | None = None,
    facts: JobFacts | None = None,
    repeats_pass: bool = False,
) -> Recording:
    """Record two steps of a job under a plan on fake tensors.

    The second is the steady one, with optimizer states. What looks at values gets listed answers.

    Args:
        job: what would be trained.
        plan: how; None means as it is.
        layout: of the job's batches, if it is known already.
        device: where; None means the CPU.
        way: that of an earlier recording, which is tried first.
        facts: what an earlier recording of the job as it is has gathered.
        repeats_pass: whether the second forward and backward may be copied from the first, since
            those of the job as it is are alike; see ``repeated_pass``.

    Raises:
        RecordingError: if an unbounded size depends on values, or an operator has no fake version.
        StrategyError: if a strategy of the plan cannot apply.
    """
    started = time.perf_counter()
    plan, layout = plan or Plan(), layout or find_layout(job)
    card = card_of(device)
    # Whether pieces keep the results is found out first; inside a recording it would be seen.
    known = None if facts is None else facts.separation
    separation = known or Separation(job, layout)
    if plan.splitting is not None:
        plan.splitting.separability(separation)
    record_with = partial(
        _record_job,
        job,
        plan,
        layout,
        card,
        facts,
        separation=separation,
        repeats_pass=repeats_pass,
    )
    with clear_refusals():
        way, seen = _first_that_works(job, way or Way(), record_with, card)
    recorder, found = seen.recorder, seen.facts
    check_placed(recorder, card)
    return Recording(
        history=recorder.history,
        marks=recorder.marks,
        forward_starts=recorder.forward_starts,
        card=card,
        facts=found,
        modules_in_evaluation=found.modules_in_evaluation,
        notes=[
            *evaluation_notes(found.modules_in_evaluation),
            *found.own_precision.notes_of_a_job(),
            *seen.notes,
        ],
        way=way,
        answers=seen.answers,
        group_sizes=seen.group_sizes,
        spill=seen.spill,
        has_like_passes=seen.is_alike,
        record_seconds=time.perf_counter() - started,
    )


def _first_that_works(
    job: Job, way: Way, record_with: Callable[..., _JobSeen], card: Card | None
) -> tuple[Way, _JobSeen]:
    """Record in the first way that does not fail for want of values.

    Raises:
        ValuesNeededError: if none does.
    """
    errors: list[ValuesNeededError] = []
    for each, must_be_known in way.then(has_card=card is not None):
        try:
            with left_alone(job, copies_content=each.is_answered), groups_counted() as sizes:
                seen = record_with(way=each)
        except ValuesNeededError as error:
            errors.append(error)
            continue
        if not (must_be_known and seen.answers):
            return each, replace(seen, group_sizes=sizes)
    raise errors[-1]


def recorded_otherwise(
    recording: Recording, again: Callable[..., Recording]
) -> Iterator[tuple[Answer | None, Recording]]:
    """Record a step once more with each of its other answers, where it got any.

    Args:
        recording: the step's.
        again: records it in the ``way`` that it is given.

    Yields:
        Recordings with choices spread otherwise or another answer, which comes with them.
    """
    for answer, way in recording.way.others(recording.answers):
        try:
            other = again(way=way)
        except MemfitError:
            if answer is None:
                raise
            continue  # training takes no branch that fails
        yield answer, other


def record_steps(
    setup: Callable[[], Step],
    device: Device,
    *,
    num_steps: int = _NUM_STEPS,
    torch_version: tuple[int, int] | None = None,
) -> StepRecording:
    """Record any code: ``setup`` builds everything and gives a function that does one step.

    The code is recorded as it is, with every name that it keeps alive.

    Args:
        setup: builds model, optimizer and the like, on ``cuda`` or the CPU as it likes.
        device: the GPU that ``cuda`` means, or the CPU.
        num_steps: how often the step is done.
        torch_version: whose CUDA rules hold; None means the installed torch's.

    Raises:
        RecordingError: if the code needs the values of tensors, or an operator has no fake version.
    """
    started = time.perf_counter()
    card = card_of(device, torch_version)
    with code_left_alone("setup", setup), clear_refusals(), code_at_fault(card):
        try:
            recorder, seen = _record_code(setup, card, num_steps, disguised=True)
        except ValuesNeededError:
            recorder, seen = _record_code(setup, card, num_steps, disguised=False)
    check_placed(recorder, card)
    return StepRecording(
        history=recorder.history,
        marks=recorder.marks,
        card=card,
        record_seconds=time.perf_counter() - started,
        **seen,
    )


@dataclass(frozen=True, slots=True)
class _JobSeen:
    """What was seen of a job's steps."""

    recorder: Recorder
    facts: JobFacts
    spill: Spill
    notes: Sequence[str]
    answers: Sequence[Answer]
    group_sizes: Sequence[int] = ()
    is_alike: bool = False


def _record_job(
    job: Job,
    plan: Plan,
    layout: BatchLayout,
    card: Card | None,
    facts: JobFacts | None,
    *,
    separation: Separation,
    way: Way,
    repeats_pass: bool,
) -> _JobSeen:
    """Record two steps of a job, gather its facts, and note what is done otherwise."""
    given = batch_for(job, way)
    device_type = CPU if card is None else CUDA
    assumptions = Assumptions(is_skewed=way.is_skewed, turned=way.turned, most_equal=way.most_equal)
    make_mode = mode_of(way, assumptions)
    with (
        recording_on(card, disguised=way.is_disguised, make_mode=make_mode) as (recorder, mode),
        borrowed_to_record(
            job, mode, device_type, builds_model=plan.parallel is not None
        ) as borrowed_job,
        ExitStack() as stack,
    ):
        # Watching every function of torch takes time, so what is known is not looked for again.
        probed = stack.enter_context(probes()) if facts is None else list
        batch, *held = (fake_batch(mode, given, way) for _ in range(job.order.num_batches))
        session = open_plain_session(borrowed_job, device_type, layout, plan)
        session.facts = facts
        if facts is None:
            gather_facts(session, separation=separation)
        recorder.owners = lambda: with_lines_of(job, session.owned_tensors([batch, *held]))
        recorder.name_modules(session.model)
        run = unguarded_run(session, plan, phase_listener=recorder.enter_phase)
        modes, precision = ModesSeen(session.model), OwnPrecisionWatch(session.device_type)
        if facts is None:
            stack.enter_context(modes)
            stack.enter_context(precision)
        positions = _generators_of(session) if facts is None else None
        passes = RepeatedPass(
            recorder,
            session,
            may_repeat=repeats_pass,
            assumptions=assumptions,
        )
        for _ in range(_NUM_STEPS):
            recorder.begin_step()
            with step_at_fault(recorder), passes.step():
                run.step(batch)
            recorder.end_step()
            stack.close()  # one step shows all of it
        has_drawn = positions is not None and positions.first_moved() is not None
        with recorder.paused():  # what comes back then is no matter of the step
            run.close()
        if facts is None:
            draws_random = has_drawn or _draws_in_forward(recorder)
            facts = gather_facts(session, probed=probed(), draws_random=draws_random)
            facts = replace(facts, modules_in_evaluation=modes.found, own_precision=precision.found)
        notes = mode.compiled_code.notes(session.model)
        return _JobSeen(
            recorder, facts, session.spill, notes, assumptions.answers, is_alike=passes.is_alike
        )


def _generators_of(session: Session) -> RandomPositions:
    """Look where the generators stand that are not torch's global ones."""
    live = LiveState({"model": session.model, "loss": session.job.loss})
    return RandomPositions([pair[0] for found in live.found() for pair in found.generators])


def _draws_in_forward(recorder: Recorder) -> bool:
    """Return whether an operator of the last forward has drawn random numbers."""
    mark = recorder.marks[-1]
    operations = recorder.history.operations[mark.first_operation : mark.last_operation]
    return any(each.is_random and each.phase is Phase.FORWARD for each in operations)


def _record_code(
    setup: Callable[[], Step], card: Card | None, num_steps: int, *, disguised: bool
) -> tuple[Recorder, Mapping[str, Any]]:
    """Record code of any kind; return as well what else is kept of it, by its field's name."""
    precision = OwnPrecisionWatch(CPU if card is None else CUDA)
    assumptions = Assumptions()
    make_mode = partial(VirtualTensors, assumptions=assumptions)
    with (
        groups_counted() as group_sizes,
        recording_on(card, disguised=disguised, make_mode=make_mode) as (recorder, mode),
        StepFollower(recorder),
    ):
        step = setup()
        with ModesSeen() as modes, precision:
            for _ in range(num_steps):
                recorder.begin_step()
                recorder.enter_phase(Phase.FORWARD)
                step()
                recorder.end_step()
    notes = [*evaluation_notes(modes.found), *precision.found.notes_of_a_step()]
    notes += mode.compiled_code.notes()
    return recorder, {
        "modules_in_evaluation": modes.found,
        "notes": notes,
        "answers": assumptions.answers,
        "group_sizes": group_sizes,
    }
