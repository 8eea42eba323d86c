"""Proves that a plan keeps the results: planned steps against plain ones, in fp64 where it can."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from memfit.comparison.left_behind import unsteady_names
from memfit.comparison.precision import bound_in
from memfit.errors import NothingToVerifyError
from memfit.job import Job
from memfit.session.borrowing import left_alone
from memfit.session.deterministic_draws import DeterministicDraws
from memfit.session.evaluation_mode import evaluation_notes
from memfit.strategies.base import Numerics
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import Plan
from memfit.verification.job_steps import JobSteps
from memfit.verification.result import UNPROVED, Verification
from memfit.verification.steps import Errors, compare, slope_error

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
    """Hold plans for one job, from one seed, against its plain steps.

    Model and optimizer are built once, or are those that live already. All steps are run
    on them, and they are as they were after each call.
    """

    def __init__(self, job: Job, seed: int = 0) -> None:
        self._job = job
        self._steps = JobSteps(job, seed)

    @property
    def facts(self) -> JobFacts:
        """Return what is known of the job without running a step."""
        return self._steps.facts

    def verify(self, plan: Plan, dtype: torch.dtype | None = None) -> Verification:
        """Compare a plan with no plan; see ``memfit.verify``."""
        split = plan.splitting
        if split is not None and split.micro_batch_size >= self._steps.num_samples:
            raise NothingToVerifyError(
                split.label(), self._steps.num_samples, split.micro_batch_size
            )
        with left_alone(self._job):
            self._steps.begin_anew()
            return self._verify(plan, dtype)

    def _verify(self, plan: Plan, dtype: torch.dtype | None) -> Verification:
        claimed = plan.numerics_for(self.facts)
        notes = evaluation_notes(self.facts.modules_in_evaluation)
        notes += (f"{name} holds what one piece leaves there" for name in self._overwritten(plan))
        lacking = [*self._steps.lacking]
        if dtype is None:
            dtype = torch.float64
            if claimed.rank >= Numerics.APPROXIMATE.rank:
                dtype = torch.float32
            elif (problem := self._steps.problem_with(dtype)) and not self._steps.keep_casts():
                dtype = torch.float32
                lacking.append(f"compared in fp32, since the job does not run in fp64: {problem}")
            if dtype is torch.float32 and (problem := self._steps.problem_with(dtype)):
                dtype = None
                lacking[len(self._steps.lacking) :] = [
                    f"compared in the job's own types, since it runs in no other: {problem}"
                ]
        return self._judged(plan, claimed, dtype, _Remarks(notes, lacking))

    def _judged(
        self, plan: Plan, claimed: Numerics, dtype: torch.dtype | None, remarks: _Remarks
    ) -> Verification:
        notes = remarks.notes
        errors, bound = self._errors(plan, dtype, notes), bound_in(dtype)
        deterministic, slope = None, None
        if bound < errors.largest and dtype is torch.float64 and self._steps.casts_down:
            kept = self._errors_without_casts(plan, notes)
            if kept is None:
                bound = self._loosened(remarks)
            else:
                errors, deterministic = kept
        if errors.largest <= bound and dtype is torch.float64 and not errors.draws:
            errors, bound = self._under_autocast(plan, notes) or (errors, bound)
        elif deterministic is None and (bound < errors.largest or errors.draws):
            deterministic = self._deterministic_errors(plan, dtype)
        if deterministic is not None and dtype is torch.float64 and deterministic.largest <= bound:
            slope = self._slope_error(plan, remarks)
        earned = _earned(errors, deterministic, slope, bound)
        if self._steps.keeps_casts and dtype is torch.float64:
            notes.append("parts that cast to a lower precision were compared in fp64")
        if dtype is not torch.float64 and (autocast := self._steps.precision.autocast):
            notes.append(f"compared under the loss's own autocast in {autocast}")
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
        plain, planned = self._steps.plain_results(dtype), self._steps.results(plan, dtype)
        besides = frozenset(self._overwritten(plan))
        errors = compare(planned, plain, without=besides)
        if errors.effects or errors.effect > bound_in(dtype):
            # Clocks and the like differ between two plain steps as well.
            unsteady = unsteady_names(plain.left, self._steps.results(Plan(), dtype).left)
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
        return list(plan.splitting.separability(self.facts.separation).overwritten)

    def _deterministic_errors(self, plan: Plan, dtype: torch.dtype | None) -> Errors | None:
        """Compare without random draws; None if there are none."""
        draws = DeterministicDraws()
        expected = self._steps.results(Plan(), dtype, draws)
        if not draws.num_draws:
            return None
        planned = self._steps.results(plan, dtype, draws)
        return compare(planned, expected, without=frozenset(self._overwritten(plan)))

    def _slope_error(self, plan: Plan, remarks: _Remarks) -> float | None:
        """Compare the gradient with the slope of the loss; None where the plain step fails that."""
        errors: list[float] = []
        for some_plan in (plan, Plan()):
            errors.append(slope_error(partial(self._steps.results_at, some_plan), _SLOPE_BOUND))
            if errors[0] <= _SLOPE_BOUND:
                return errors[0]
        if errors[1] > _SLOPE_BOUND:
            remarks.lacking.append(
                "the plain gradient is not the slope of the loss, so it cannot show whether masks "
                "are drawn again"
            )
            return None
        return errors[0]

    def _under_autocast(self, plan: Plan, notes: list[str]) -> tuple[Errors, float] | None:
        """Compare under the loss's own autocast, which leaves fp64 alone; None if all is well.

        A plan may be off by as much as the autocast itself: both are rounding.
        """
        autocast = self._steps.precision.autocast
        if not autocast or self._steps.problem_with(torch.float32):
            return None
        errors = self._errors(plan, torch.float32, notes)
        in_fp32, in_fp64 = map(self._steps.plain_results, (torch.float32, torch.float64))
        own = compare(in_fp32, in_fp64).largest
        bound = max(bound_in(torch.bfloat16), own)
        notes.append(
            f"under the loss's own autocast in {autocast} it is off by {errors.largest:.1e}, and "
            f"that autocast itself by {own:.1e}"
        )
        return None if errors.largest <= bound else (errors, bound)

    def _errors_without_casts(
        self, plan: Plan, notes: list[str]
    ) -> tuple[Errors, Errors | None] | None:
        """Compare with all parts in fp64; None if that cannot be, or shows what may be its doing.

        The second errors are those without random draws, where they had to be looked at.
        A strategy whose own code counts on the types that it asks for is no worse for it.
        """
        num_notes = len(notes)
        if not self._steps.keep_casts():
            return None
        errors, bound = self._errors(plan, torch.float64, notes), bound_in(torch.float64)
        if errors.largest <= bound or errors.draws:
            return errors, None
        deterministic = self._deterministic_errors(plan, torch.float64)
        if deterministic is not None and deterministic.largest <= bound:
            return errors, deterministic
        self._steps.keeps_casts = False
        del notes[num_notes:]
        return None

    def _loosened(self, remarks: _Remarks) -> float:
        """Return the bound of the lowest precision that the plain step computes in."""
        name, bound = str(self._steps.lowest).removeprefix("torch."), bound_in(self._steps.lowest)
        remarks.lacking.append(
            f"parts of the plain step compute in {name}, so {bound:.0e} is the bound"
        )
        return bound


@dataclass(frozen=True, slots=True)
class _Remarks:
    """What a verification has to say besides its figures."""

    notes: list[str]
    lacking: list[str]
    """Why it is no proof."""


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
