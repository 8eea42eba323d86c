"""Runs steps of one job from one start, under any plan and in any precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from memfit.comparison.precision import CastsKept, PrecisionWatch
from memfit.comparison.same_start import SameStart
from memfit.devices.spec import CPU
from memfit.errors import JobFunctionError, MemfitError
from memfit.job import Job
from memfit.runtime.run import open_plain_session
from memfit.session.batches import find_layout, real_batch
from memfit.session.borrowing import left_alone
from memfit.session.conversion import converted, copied, default_dtype
from memfit.session.own_precision import OwnPrecision, OwnPrecisionWatch
from memfit.session.session import Session
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.plan import Plan
from memfit.verification.steps import StepResults, run_steps

_NUM_STEPS = 2
"""The second step is the first to use what the optimizer has kept."""
_Types = tuple[torch.dtype | None, bool]
"""A floating-point type, and whether parts that cast from fp64 to less are kept there."""


class JobSteps:
    """One job from one seed: its facts, and its steps under any plan in any precision.

    Model and optimizer are built once, or are those that live already. All steps are run on them,
    each from the same start.
    """

    def __init__(self, job: Job, seed: int) -> None:
        self._seed = seed
        layout = find_layout(job)
        with left_alone(job):
            torch.manual_seed(seed)
            session = open_plain_session(job, "cpu", layout)
            self._batch = real_batch(job, job.batch_size)
            self.facts = gather_facts(session)
            self.lacking = tuple(_lacking(session))
            """What of the job does not take part here."""
            self._start = SameStart(session)
        self.num_samples = layout.num_samples(self._batch)
        self._plain: dict[_Types, StepResults] = {}
        self._problems: dict[_Types, str] = {}
        self._can_keep_casts: bool | None = None
        self.keeps_casts = False
        """Whether parts that cast from fp64 to less compute in fp64 as well."""
        self.precision = OwnPrecision()
        """The loss's own, in the steps that were run last."""

    def begin_anew(self) -> None:
        """Go back to the start, with all parts in the precision that they ask for."""
        self.keeps_casts = False
        self._start.return_to()

    @property
    def casts_down(self) -> bool:
        """Whether parts of the plain step compute in less than fp64, and are not kept there."""
        return not self.keeps_casts and self.lowest is not torch.float64

    @cached_property
    def lowest(self) -> torch.dtype:
        """The lowest precision that parts of the plain step ask for where all else is fp64."""
        return self._lowest_of_plain()

    def keep_casts(self) -> bool:
        """Have parts that cast from fp64 compute in it, until begun anew, if all of them can."""
        self.keeps_casts = True
        if self._can_keep_casts is None:
            try:
                self._can_keep_casts = self._lowest_of_plain() is torch.float64
            except (MemfitError, RuntimeError, TypeError):
                self._can_keep_casts = False
        self.keeps_casts = self._can_keep_casts
        return self.keeps_casts

    def _lowest_of_plain(self) -> torch.dtype:
        watch = PrecisionWatch()
        self.results(Plan(), torch.float64, watch, num_steps=1)
        return watch.lowest

    def problem_with(self, dtype: torch.dtype) -> str:
        """Say why the plain step does not run in a type; empty if it does."""
        types = self._types(dtype)
        if types not in self._problems:
            try:
                self.plain_results(dtype)
            except JobFunctionError as error:
                self._problems[types] = error.reason
            except (RuntimeError, TypeError, NotImplementedError) as error:
                self._problems[types] = str(error).partition("\n")[0]
        return self._problems.get(types, "")

    def plain_results(self, dtype: torch.dtype | None) -> StepResults:
        """Return the results of plain steps; they are run once."""
        types = self._types(dtype)
        if types not in self._plain:
            self._plain[types] = self.results(Plan(), dtype)
        return self._plain[types]

    def results(
        self,
        plan: Plan,
        dtype: torch.dtype | None,
        mode: Any = None,
        num_steps: int = _NUM_STEPS,
    ) -> StepResults:
        """Return the results of steps under a plan, in a type; None leaves every tensor its own.

        Args:
            plan: how.
            dtype: of parameters and batch.
            mode: is entered around the steps.
            num_steps: how many.
        """
        with self._start.begin(dtype) as session:
            batch = self._batch_in(dtype)
            torch.manual_seed(self._seed)
            read, watch = self._start.left_behind, OwnPrecisionWatch(CPU)
            with (
                watch,
                self._casts(dtype),
                mode or nullcontext(),
                default_dtype(dtype or torch.get_default_dtype()),
            ):
                results = run_steps(session, plan, batch, num_steps=num_steps, read=read)
        self.precision = watch.found
        return results

    def results_at(
        self, plan: Plan, distance: float, direction: Mapping[str, torch.Tensor]
    ) -> StepResults:
        """Return the results of one step in fp64 from parameters that were moved."""
        with (
            self._start.begin(torch.float64) as session,
            self._casts(torch.float64),
            default_dtype(torch.float64),
        ):
            batch = self._batch_in(torch.float64)
            with torch.no_grad():
                for name, parameter in session.model.named_parameters():
                    if name in direction:
                        parameter.add_(direction[name], alpha=distance)
            torch.manual_seed(self._seed)
            return run_steps(session, plan, batch, num_steps=1)

    def _types(self, dtype: torch.dtype | None) -> _Types:
        return dtype, self.keeps_casts and dtype is torch.float64

    def _casts(self, dtype: torch.dtype | None) -> AbstractContextManager[object]:
        _, are_kept = self._types(dtype)
        return CastsKept() if are_kept else nullcontext()

    def _batch_in(self, dtype: torch.dtype | None) -> Any:
        # Each time anew: a step may change its batch.
        batch = copied(self._batch)
        return batch if dtype is None else converted(batch, dtype)


def _lacking(session: Session) -> Iterator[str]:
    """Yield what of a job does not take part when its steps are run here."""
    for module in session.model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            yield (
                "the model is in DistributedDataParallel, whose averaging over ranks was not "
                "run; verify the module inside it"
            )
