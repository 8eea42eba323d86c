"""Proves that a plan keeps the results: planned steps against plain ones, in fp64 where it can."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from memfit.errors import JobFunctionError
from memfit.job import Job
from memfit.runtime.comparison import (
    Errors,
    Outcome,
    PrecisionWatch,
    carry_out,
    compare,
    slope_error,
)
from memfit.runtime.run import open_plain_session
from memfit.session.batches import find_layout, real_batch
from memfit.session.conversion import convert_model, converted
from memfit.session.facts import JobFacts, gather_facts
from memfit.session.session import Session
from memfit.session.stilled_randomness import StilledRandomness, untouched_randomness
from memfit.strategies.base import Numerics
from memfit.strategies.plan import Plan, worst_numerics

_NUM_STEPS = 2
"""The second step is the first to use what the optimizer has kept."""
_BOUNDS: Mapping[torch.dtype, float] = {torch.float64: 1e-10, torch.float32: 1e-4}
_COARSEST_BOUND = 2e-2
_SLOPE_BOUND = 1e-4
_APPROXIMATE_BOUND = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far planned steps are from the plain ones: largest relative errors, as fractions.

    ``numerics`` is the class that the plan claims, ``earned`` the one that it showed.
    """

    numerics: str
    loss_error: float
    gradient_error: float
    parameter_error: float
    """Of the parameters after two steps, so that optimizer states have a say."""
    buffer_error: float
    worst_gradient: str
    earned: str
    worst: str
    """What is furthest off, such as ``gradient of head.weight``."""
    dtype: str
    """The floating-point type of the comparison."""
    bound: float
    """Up to this error, equal up to rounding."""
    batch_size: int
    strategies: tuple[str, ...] = ()
    stilled_error: float | None = None
    """The largest error with all random draws stilled; None where that was not needed."""
    slope_error: float | None = None
    """How far the planned gradient is from the slope of the planned loss at the same draws."""
    notes: tuple[str, ...] = ()
    """What was done otherwise than asked, and what it means."""

    @property
    def largest_error(self) -> float:
        """Give the largest of the errors."""
        errors = (self.loss_error, self.gradient_error, self.parameter_error, self.buffer_error)
        return max(errors)

    @property
    def keeps_promise(self) -> bool:
        """Say whether the plan is at least as good as it claims."""
        return Numerics(self.earned).rank <= Numerics(self.numerics).rank

    @property
    def deciding_error(self) -> float:
        """Give the error that decided the class: with random draws stilled, where they were."""
        return self.largest_error if self.stilled_error is None else self.stilled_error

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values; an error that is no number is None."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        largest = self.largest_error if math.isfinite(self.largest_error) else None
        return {**values, "largest_error": largest, "keeps_promise": self.keeps_promise}


def verify(
    job: Job,
    plan: Plan,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> Verification:
    """Carry out two steps of a job as it is and under a plan, and compare everything they change.

    Both start from the same parameters, batch and random state, on the CPU. Where the plan draws
    other random masks, the steps are compared once more with all draws stilled, and the planned
    gradient is held against the slope of the planned loss.

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

    Does not account for what later steps would amplify.
    """
    if batch_size is not None:
        job = replace(job, batch_size=batch_size)
    return Trial(job, seed).verify(plan, dtype)


class Trial:
    """One job from one seed: its facts, and its steps under any plan in any precision."""

    def __init__(self, job: Job, seed: int = 0) -> None:
        self._job, self._seed = job, seed
        self._layout = find_layout(job)
        with untouched_randomness():
            torch.manual_seed(seed)
            session = open_plain_session(job, "cpu", self._layout)
            self._batch = real_batch(job, job.batch_size)
        self._model = session.model
        self._facts = gather_facts(session)
        self._plain: dict[torch.dtype, Outcome] = {}
        self._problems: dict[torch.dtype, str] = {}

    @property
    def facts(self) -> JobFacts:
        """Give what is known of the job without carrying out a step."""
        return self._facts

    def verify(self, plan: Plan, dtype: torch.dtype | None = None) -> Verification:
        """Compare a plan with no plan; see ``memfit.verify``."""
        with untouched_randomness():
            return self._verify(plan, dtype)

    def _verify(self, plan: Plan, dtype: torch.dtype | None) -> Verification:
        claimed = worst_numerics(plan.strategies, self._facts)
        notes: list[str] = []
        if dtype is None:
            dtype = torch.float64
            if claimed.rank >= Numerics.APPROXIMATE.rank:
                dtype = torch.float32
            elif problem := self._problem_with(dtype):
                dtype = torch.float32
                notes.append(f"compared in fp32, since the job does not run in fp64: {problem}")
        return self._judged(plan, claimed, dtype, notes)

    def _judged(
        self, plan: Plan, claimed: Numerics, dtype: torch.dtype, notes: list[str]
    ) -> Verification:
        errors, bound = self._errors(plan, dtype, notes), _BOUNDS.get(dtype, _COARSEST_BOUND)
        if bound < errors.largest:
            bound = self._bound(dtype, notes)
        stilled, slope = None, None
        if bound < errors.largest:
            stilled = self._stilled_errors(plan, dtype)
        if stilled is not None and dtype is torch.float64 and stilled.largest <= bound:
            slope = self._slope_error(plan, dtype, notes)
        earned = _earned(errors, stilled, slope, bound)
        return Verification(
            numerics=str(claimed),
            loss_error=errors.loss,
            gradient_error=errors.gradient,
            parameter_error=errors.parameter,
            buffer_error=errors.buffer,
            worst_gradient=errors.worst_gradient,
            earned=str(earned),
            worst=errors.worst if stilled is None else stilled.worst,
            dtype=str(dtype).removeprefix("torch."),
            bound=bound,
            batch_size=self._job.batch_size,
            strategies=plan.labels(),
            stilled_error=None if stilled is None else stilled.largest,
            slope_error=slope,
            notes=tuple(notes),
        )

    def _errors(self, plan: Plan, dtype: torch.dtype, notes: list[str]) -> Errors:
        if dtype not in self._plain:
            self._plain[dtype] = self._outcome(Plan(), dtype)
        planned = self._outcome(plan, dtype)
        if planned.num_skipped:
            name = " + ".join(plan.labels())
            notes.append(f"{name} skipped {planned.num_skipped} steps to find its loss scale")
        return compare(planned, self._plain[dtype])

    def _stilled_errors(self, plan: Plan, dtype: torch.dtype) -> Errors | None:
        """Compare without random draws; None if there are none."""
        stilled = StilledRandomness()
        expected = self._outcome(Plan(), dtype, stilled)
        if not stilled.num_draws:
            return None
        return compare(self._outcome(plan, dtype, stilled), expected)

    def _slope_error(self, plan: Plan, dtype: torch.dtype, notes: list[str]) -> float | None:
        """Compare the gradient with the slope of the loss; None where the plain step fails that."""
        errors: list[float] = []
        batch = converted(self._batch, dtype)
        for some_plan in (plan, Plan()):
            errors.append(slope_error(partial(self._session, dtype), some_plan, batch, self._seed))
            if errors[0] <= _SLOPE_BOUND:
                return errors[0]
        if errors[1] > _SLOPE_BOUND:
            notes.append("the plain gradient is not the slope of the loss, so it proves nothing")
            return None
        return errors[0]

    def _bound(self, dtype: torch.dtype, notes: list[str]) -> float:
        """Loosen the bound where the plain step itself computes in a lower precision."""
        watch = PrecisionWatch()
        self._outcome(Plan(), dtype, watch, num_steps=1)
        if watch.lowest is dtype or dtype is not torch.float64:
            return _BOUNDS.get(dtype, _COARSEST_BOUND)
        bound = _BOUNDS.get(watch.lowest, _COARSEST_BOUND)
        name = str(watch.lowest).removeprefix("torch.")
        notes.append(f"parts of the plain step compute in {name}, so {bound:.0e} is the bound")
        return bound

    def _problem_with(self, dtype: torch.dtype) -> str:
        """Say why the plain step does not run in a type; empty if it does."""
        if dtype not in self._plain and dtype not in self._problems:
            try:
                self._plain[dtype] = self._outcome(Plan(), dtype)
            except JobFunctionError as error:
                self._problems[dtype] = error.reason
            except (RuntimeError, TypeError, NotImplementedError) as error:
                self._problems[dtype] = str(error).partition("\n")[0]
        return self._problems.get(dtype, "")

    def _outcome(
        self, plan: Plan, dtype: torch.dtype, mode: Any = None, num_steps: int = _NUM_STEPS
    ) -> Outcome:
        session, batch = self._session(dtype), converted(self._batch, dtype)
        torch.manual_seed(self._seed)
        with mode or nullcontext():
            return carry_out(session, plan, batch, dtype=dtype, num_steps=num_steps)

    def _session(self, dtype: torch.dtype) -> Session:
        """Build a session from the same parameters each time."""

        def model() -> torch.nn.Module:
            same = copy.deepcopy(self._model)
            convert_model(same, dtype)
            return same

        return open_plain_session(replace(self._job, model=model), "cpu", self._layout)


def _earned(errors: Errors, stilled: Errors | None, slope: float | None, bound: float) -> Numerics:
    """Give the class that the errors show."""
    if errors.largest <= bound:
        return Numerics.EXACT
    if stilled is not None and stilled.largest <= bound:
        is_gradient = slope is None or slope <= _SLOPE_BOUND
        return Numerics.SAME_IN_LAW if is_gradient else Numerics.DIFFERENT
    nearest = stilled or errors
    if max(nearest.loss, nearest.whole_gradient) <= _APPROXIMATE_BOUND:
        return Numerics.APPROXIMATE
    return Numerics.DIFFERENT
