"""Proves that a plan keeps the results: planned steps against plain ones, in fp64 where it can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memfit.comparison.left_behind import unsteady_names
from memfit.comparison.precision import CastsKept, PrecisionWatch, bound_in
from memfit.comparison.same_start import SameStart
from memfit.devices.spec import CPU
from memfit.errors import JobFunctionError, MemfitError, NothingToVerifyError
from memfit.job import Job
from memfit.runtime.run import open_plain_session
from memfit.session.batches import find_layout, real_batch
from memfit.session.borrowing import left_alone
from memfit.session.conversion import converted, copied, default_dtype
from memfit.session.deterministic_draws import DeterministicDraws
from memfit.session.evaluation_mode import evaluation_notes
from memfit.session.own_precision import OwnPrecision, OwnPrecisionWatch
from memfit.session.session import Session
from memfit.strategies.base import Numerics
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import Plan, worst_numerics
from memfit.verification.result import UNPROVED, Verification
from memfit.verification.steps import (
    Errors,
    StepResults,
    compare,
    run_steps,
    slope_error,
)

_NUM_STEPS = 2
"""The second step is the first to use what the optimizer has kept."""
_SLOPE_BOUND = 1e-4
_APPROXIMATE_BOUND = 0.1
OWN_TYPES = "own"
"""What ``dtype`` says where every tensor was left in the type that it has."""


def verify(
    job: Job,
    plan: Plan,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> Verification:
    """Run two steps of a job as it is and under a plan, and compare everything they change.

    Both start from the same parameters, batch and random state, on the CPU, and on the objects that
    the job's functions give; those that live already are afterwards as they were. Where the plan
    draws other random masks, the steps are compared once more with deterministic draws, and the
    planned gradient is held against the slope of the planned loss.

    Args:
        job: what to run.
        plan: how.
        dtype: floating-point type of parameters and batch. None means fp64, which tells rounding
            from error, and fp32 for plans that claim to be approximate (autocast leaves fp64
            alone) and for jobs that do not run in fp64.
        seed: of parameters, batch and dropout.
        batch_size: of the steps that are compared; None means the job's own.

    Raises:
        StrategyError: if a strategy of the plan cannot apply to the job.
        NothingToVerifyError: if the batch is no larger than the plan's micro-batches.
        UsageError: if the plan is for several ranks.

    Does not account for what later steps would amplify.
    """
    plan.check_for_one_process("held against the plain step")
    if batch_size is not None:
        job = replace(job, batch_size=batch_size)
    return Verifier(job, seed).verify(plan, dtype)


class Verifier:
    """One job from one seed: its facts, and its steps under any plan in any precision.

    Model and optimizer are built once, or are those that live already. All steps are run
    on them, and they are as they were after each call.
    """

    def __init__(self, job: Job, seed: int = 0) -> None:
        self._job, self._seed = job, seed
        self._layout = find_layout(job)
        with left_alone(job):
            torch.manual_seed(seed)
            session = open_plain_session(job, "cpu", self._layout)
            self._batch = real_batch(job, job.batch_size)
            self._facts = gather_facts(session)
            self._lacking = tuple(_lacking(session))
            self._start = SameStart(session)
        self._plain: dict[torch.dtype | None, StepResults] = {}
        self._problems: dict[torch.dtype, str] = {}
        self._keeps_casts = False
        self._precision = OwnPrecision()

    @property
    def facts(self) -> JobFacts:
        """Return what is known of the job without running a step."""
        return self._facts

    def verify(self, plan: Plan, dtype: torch.dtype | None = None) -> Verification:
        """Compare a plan with no plan; see ``memfit.verify``."""
        _check_that_it_acts(plan, self._layout.num_samples(self._batch))
        with left_alone(self._job):
            self._start.return_to()
            return self._verify(plan, dtype)

    def _verify(self, plan: Plan, dtype: torch.dtype | None) -> Verification:
        claimed = worst_numerics(plan.strategies, self._facts)
        notes = evaluation_notes(self._facts.modules_in_evaluation)
        notes += (f"{name} holds what one piece leaves there" for name in self._overwritten(plan))
        lacking = [*self._lacking]
        if dtype is None:
            dtype = torch.float64
            if claimed.rank >= Numerics.APPROXIMATE.rank:
                dtype = torch.float32
            elif (problem := self._problem_with(dtype)) and not self._runs_without_casts(notes):
                dtype = torch.float32
                lacking.append(f"compared in fp32, since the job does not run in fp64: {problem}")
            if dtype is torch.float32 and (problem := self._problem_with(dtype)):
                dtype = None
                lacking[len(self._lacking) :] = [
                    f"compared in the job's own types, since it runs in no other: {problem}"
                ]
        return self._judged(plan, claimed, dtype, _Remarks(notes, lacking))

    def _judged(
        self, plan: Plan, claimed: Numerics, dtype: torch.dtype | None, remarks: _Remarks
    ) -> Verification:
        notes = remarks.notes
        errors, bound = self._errors(plan, dtype, notes), bound_in(dtype)
        if bound < errors.largest and dtype is torch.float64 and self._casts_down():
            kept = self._errors_without_casts(plan, notes)
            if kept is None:
                bound = self._loosened(remarks)
            else:
                errors = kept
        deterministic, slope = None, None
        if errors.largest <= bound and dtype is torch.float64 and not errors.draws:
            errors, bound = self._under_autocast(plan, notes) or (errors, bound)
        elif bound < errors.largest or errors.draws:
            deterministic = self._deterministic_errors(plan, dtype)
        if deterministic is not None and dtype is torch.float64 and deterministic.largest <= bound:
            slope = self._slope_error(plan, notes)
        earned = _earned(errors, deterministic, slope, bound)
        if dtype is not torch.float64 and self._precision.autocast:
            notes.append(f"compared under the loss's own autocast in {self._precision.autocast}")
        is_shown = not remarks.lacking or earned.rank >= Numerics.APPROXIMATE.rank
        return Verification(
            numerics=str(claimed),
            loss_error=errors.loss,
            gradient_error=errors.gradient,
            parameter_error=errors.parameter,
            buffer_error=errors.buffer,
            effect_error=errors.effect,
            effects=errors.effects,
            worst_gradient=errors.worst_gradient,
            earned=str(earned) if is_shown else UNPROVED,
            worst=errors.worst if deterministic is None else deterministic.worst,
            dtype=OWN_TYPES if dtype is None else str(dtype).removeprefix("torch."),
            bound=bound,
            batch_size=self._job.batch_size,
            strategies=plan.labels(),
            deterministic_error=None if deterministic is None else deterministic.largest,
            slope_error=slope,
            gradient_errors=(deterministic or errors).gradients,
            parameter_errors=(deterministic or errors).parameters,
            is_proof=is_shown,
            notes=(*remarks.lacking, *notes),
        )

    def _errors(self, plan: Plan, dtype: torch.dtype | None, notes: list[str]) -> Errors:
        if dtype not in self._plain:
            self._plain[dtype] = self._results(Plan(), dtype)
        plain, planned = self._plain[dtype], self._results(plan, dtype)
        besides = frozenset(self._overwritten(plan))
        errors = compare(planned, plain, without=besides)
        if errors.effects or errors.effect > bound_in(dtype):
            # Clocks and the like differ between two plain steps as well.
            unsteady = unsteady_names(plain.left, self._results(Plan(), dtype).left)
            errors = compare(planned, plain, without=unsteady | besides)
        if planned.num_skipped:
            name = " + ".join(plan.labels())
            notes.append(f"{name} skipped {planned.num_skipped} steps to find its loss scale")
            errors = replace(errors, effect=0.0, effects=(), draws=())
        return errors

    def _overwritten(self, plan: Plan) -> list[str]:
        """Name what each piece sets and no step reads, so that it may be left otherwise."""
        if plan.splitting is None:
            return []
        return list(plan.splitting.separability(self._facts.separation).overwritten)

    def _deterministic_errors(self, plan: Plan, dtype: torch.dtype | None) -> Errors | None:
        """Compare without random draws; None if there are none."""
        draws = DeterministicDraws()
        expected = self._results(Plan(), dtype, draws)
        if not draws.num_draws:
            return None
        planned = self._results(plan, dtype, draws)
        return compare(planned, expected, without=frozenset(self._overwritten(plan)))

    def _slope_error(self, plan: Plan, notes: list[str]) -> float | None:
        """Compare the gradient with the slope of the loss; None where the plain step fails that."""
        errors: list[float] = []
        for some_plan in (plan, Plan()):
            errors.append(slope_error(partial(self._results_at, some_plan)))
            if errors[0] <= _SLOPE_BOUND:
                return errors[0]
        if errors[1] > _SLOPE_BOUND:
            notes.append("the plain gradient is not the slope of the loss, so it proves nothing")
            return None
        return errors[0]

    def _under_autocast(self, plan: Plan, notes: list[str]) -> tuple[Errors, float] | None:
        """Compare under the loss's own autocast, which leaves fp64 alone; None if all is well.

        A plan may be off by as much as the autocast itself: both are rounding.
        """
        autocast = self._precision.autocast
        if not autocast or self._problem_with(torch.float32):
            return None
        errors = self._errors(plan, torch.float32, notes)
        own = compare(self._plain[torch.float32], self._plain[torch.float64]).largest
        bound = max(bound_in(torch.bfloat16), own)
        notes.append(
            f"under the loss's own autocast in {autocast} it is off by {errors.largest:.1e}, and "
            f"that autocast itself by {own:.1e}"
        )
        return None if errors.largest <= bound else (errors, bound)

    def _casts_down(self) -> bool:
        """Return whether parts of the plain step compute in less than fp64."""
        watch = PrecisionWatch()
        self._results(Plan(), torch.float64, watch, num_steps=1)
        return watch.lowest is not torch.float64

    def _runs_without_casts(self, notes: list[str]) -> bool:
        """Tell if all of the plain step can compute in fp64, and have it do so from here on."""
        before, self._keeps_casts = self._keeps_casts, True
        watch = PrecisionWatch()
        try:
            self._results(Plan(), torch.float64, watch, num_steps=1)
        except (MemfitError, RuntimeError, TypeError):
            watch.lowest = torch.float32
        self._keeps_casts = before or watch.lowest is torch.float64
        if self._keeps_casts and not before:
            self._plain.pop(torch.float64, None)
            self._problems.pop(torch.float64, None)
        if self._keeps_casts:
            notes.append("parts that cast to a lower precision were compared in fp64")
        return self._keeps_casts

    def _errors_without_casts(self, plan: Plan, notes: list[str]) -> Errors | None:
        """Compare with all parts in fp64; None if that cannot be, or shows what may be its doing.

        A strategy whose own code counts on the types that it asks for is no worse for it.
        """
        plain, num_notes = self._plain.get(torch.float64), len(notes)
        if not self._runs_without_casts(notes):
            return None
        errors = self._errors(plan, torch.float64, notes)
        if errors.largest <= bound_in(torch.float64) or errors.draws:
            return errors
        self._keeps_casts = False
        del notes[num_notes:]
        if plain is not None:
            self._plain[torch.float64] = plain
        return None

    def _loosened(self, remarks: _Remarks) -> float:
        """Return the bound of the lowest precision that the plain step computes in."""
        watch = PrecisionWatch()
        self._results(Plan(), torch.float64, watch, num_steps=1)
        name, bound = str(watch.lowest).removeprefix("torch."), bound_in(watch.lowest)
        remarks.lacking.append(
            f"parts of the plain step compute in {name}, so {bound:.0e} is the bound"
        )
        return bound

    def _problem_with(self, dtype: torch.dtype) -> str:
        """Say why the plain step does not run in a type; empty if it does."""
        if dtype not in self._plain and dtype not in self._problems:
            try:
                self._plain[dtype] = self._results(Plan(), dtype)
            except JobFunctionError as error:
                self._problems[dtype] = error.reason
            except (RuntimeError, TypeError, NotImplementedError) as error:
                self._problems[dtype] = str(error).partition("\n")[0]
        return self._problems.get(dtype, "")

    def _results(
        self,
        plan: Plan,
        dtype: torch.dtype | None,
        mode: Any = None,
        num_steps: int = _NUM_STEPS,
    ) -> StepResults:
        with self._start.begin(dtype) as session:
            batch = self._batch_in(dtype)
            torch.manual_seed(self._seed)
            read, watch = self._start.left_behind, OwnPrecisionWatch(CPU)
            with (
                watch,
                self._casts(),
                mode or nullcontext(),
                default_dtype(dtype or torch.get_default_dtype()),
            ):
                results = run_steps(session, plan, batch, num_steps=num_steps, read=read)
        self._precision = watch.found
        return results

    def _results_at(
        self, plan: Plan, distance: float, direction: Mapping[str, torch.Tensor]
    ) -> StepResults:
        """Return the results of one step in fp64 from parameters that were moved."""
        with self._start.begin(torch.float64) as session, default_dtype(torch.float64):
            batch = self._batch_in(torch.float64)
            with torch.no_grad():
                for name, parameter in session.model.named_parameters():
                    if name in direction:
                        parameter.add_(direction[name], alpha=distance)
            torch.manual_seed(self._seed)
            return run_steps(session, plan, batch, num_steps=1)

    def _casts(self) -> AbstractContextManager[object]:
        return CastsKept() if self._keeps_casts else nullcontext()

    def _batch_in(self, dtype: torch.dtype | None) -> Any:
        # Each time anew: a step may change its batch.
        batch = copied(self._batch)
        return batch if dtype is None else converted(batch, dtype)


@dataclass(frozen=True, slots=True)
class _Remarks:
    """What a verification has to say besides its figures."""

    notes: list[str]
    lacking: list[str]
    """Why it is no proof."""


def _check_that_it_acts(plan: Plan, num_samples: int) -> None:
    """Refuse a trial in which a batch would not be split at all.

    Raises:
        NothingToVerifyError: if micro-batches are no smaller than the batch.
    """
    split = plan.splitting
    if split is not None and split.micro_batch_size >= num_samples:
        raise NothingToVerifyError(split.label(), num_samples, split.micro_batch_size)


def _lacking(session: Session) -> Iterator[str]:
    """Yield what of a job does not take part when its steps are run here."""
    for module in session.model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            yield (
                "the model is in DistributedDataParallel, whose averaging over ranks was not "
                "run; verify the module inside it"
            )


def _earned(
    errors: Errors, deterministic: Errors | None, slope: float | None, bound: float
) -> Numerics:
    """Return the class that the errors show."""
    if errors.largest <= bound and not errors.effects and not errors.draws:
        return Numerics.EXACT
    if errors.effects and (deterministic is None or deterministic.effects):
        return Numerics.DIFFERENT
    if errors.largest <= bound and deterministic is None:
        return Numerics.SAME_IN_LAW  # the same results, from other draws
    if deterministic is not None and deterministic.largest <= bound:
        is_gradient = slope is None or slope <= _SLOPE_BOUND
        return Numerics.SAME_IN_LAW if is_gradient else Numerics.DIFFERENT
    nearest = deterministic or errors
    if max(nearest.loss, nearest.whole_gradient) <= _APPROXIMATE_BOUND:
        return Numerics.APPROXIMATE
    return Numerics.DIFFERENT
