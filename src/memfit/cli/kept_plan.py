"""The answer to a question of ``memfit plan`` that an earlier call has found, kept until then."""

from __future__ import annotations

import argparse
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memfit.devices.spec import Device
from memfit.errors import MemfitWarning
from memfit.planner.cache.kept_results import KeptResults
from memfit.planner.cache.recording_cache import RecordingCache, cache_folder
from memfit.prediction.budget import MemoryBudget, read_budget

from .plan_output import PlanOutput

if TYPE_CHECKING:
    from memfit.figures import EarlierPlan
    from memfit.planner.result.planning_result import PlanningResult

_WISHES = ("budget_of", "allow", "require", "forbid", "thorough", "prove")
_SIZES = ("host_memory", "disk")
_RANKS = ("ranks", "devices_per_node", "objective")


class KeptPlan:
    """What earlier calls have found for a job, and what this one finds.

    Nothing is kept of plans that were timed on this machine, as times are of one call.

    Args:
        args: the words that the command was given.
        device: that is planned for.
    """

    def __init__(self, args: argparse.Namespace, device: Device) -> None:
        folder = None if args.no_cache or args.measure else cache_folder()
        bounds = MemoryBudget(num_bytes=read_budget(args.budget), of=args.budget_of).on(device)
        reference = shlex.join([args.job, *args.script_arguments])
        self.cache = None if folder is None else RecordingCache(folder, reference, device)
        self._budget_bytes = bounds.num_bytes
        self._question = (
            *(repr(getattr(args, name)) for name in (*_WISHES, *_RANKS)),
            *(read_budget(getattr(args, name), name) for name in _SIZES),
        )
        self._is_silent = True

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep what is found inside."""
        if self.cache is None:
            yield
            return
        with self.cache.used(), self._hearing():
            yield

    def output(self, form: tuple[object, ...]) -> PlanOutput | None:
        """Return what the same words have made before, without importing torch."""
        found = None if self.cache is None else self.cache.get(*self._named(form))
        return found if isinstance(found, PlanOutput) else None

    def result(self) -> PlanningResult | None:
        """Return what was found for the same budget, or for a larger one if it fits this as well.

        The job is not imported.
        """
        return None if self.cache is None else self._results(self.cache).find(self._budget_bytes)

    def fastest_fitting(self) -> EarlierPlan | None:
        """Return the fastest of what was found for other budgets that fits this one.

        Neither torch nor the job is imported.
        """
        if self.cache is None:
            return None
        return self._results(self.cache).fastest_fitting(self._budget_bytes)

    def fallback(self) -> PlanningResult | None:
        """Return that plan, for when the search is interrupted before it has found any."""
        return (
            None if self.cache is None else self._results(self.cache).fallback(self._budget_bytes)
        )

    def keep(self, result: PlanningResult, form: tuple[object, ...], output: PlanOutput) -> None:
        """Keep what was found, unless it came with warnings or too early."""
        if self.cache is None or result.ended_early or not self._is_silent:
            return
        self._results(self.cache).keep(self._budget_bytes, result)
        self.cache.put(output, *self._named(form))

    def _results(self, cache: RecordingCache) -> KeptResults:
        return KeptResults(cache, self._question)

    def _named(self, form: tuple[object, ...]) -> tuple[object, ...]:
        return "output", self._question, self._budget_bytes, form

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Hear of memfit's own warnings, which would not be said a second time."""
        written = warnings.showwarning

        def heard(message: Warning | str, category: type[Warning], *rest: object) -> None:
            if issubclass(category, MemfitWarning):
                self._is_silent = False
            written(message, category, *rest)  # type: ignore[arg-type]  # handed on as it came

        warnings.showwarning = heard  # type: ignore[assignment]  # handed on as it came
        try:
            yield
        finally:
            warnings.showwarning = written
