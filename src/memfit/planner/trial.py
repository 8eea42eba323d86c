"""Settles on a real batch whether pieces keep the results, where that could not be followed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from memfit.allocator.simulate import CPU_RULES, peak_bytes
from memfit.analysis.separability import Separability, refuted
from memfit.comparison.precision import FP64_BOUND
from memfit.comparison.split_comparison import SplitComparison
from memfit.devices.detect import free_memory_bytes
from memfit.errors import MemfitError, StrategyError
from memfit.job import Job
from memfit.prediction.recording import Recording
from memfit.runtime.first_step_check import (
    compared_with,
    difference,
    equality,
    other_size,
)
from memfit.runtime.run import open_plain_session
from memfit.session.batches import BatchLayout, real_batch
from memfit.session.borrowing import borrowed_to_run
from memfit.session.deterministic_draws import untouched_randomness
from memfit.strategies.base import AbstractSplitting

_MOST_FLOPS = 1e11
"""Operations of a step that is tried without being asked for: seconds on a CPU."""
_MEMORY_SHARE = 0.5
_NUM_TIMES = 2
"""How many times larger tensors are in fp64."""
_KEEP_WHOLE = "Micro-batches would train something else; keep the batch whole."


@dataclass(frozen=True, slots=True)
class BatchTrial:
    """Hold the gradients of a batch in pieces against those of other pieces, in fp64 if it can.

    Args:
        job: whose step.
        layout: of its batches.
        plain: the job as it is, recorded.
        settles: whether equal gradients count; if not, only what cannot be run, or differs, does.
    """

    job: Job
    layout: BatchLayout
    plain: Recording
    settles: bool = True

    @property
    def is_quick(self) -> bool:
        """Return whether a step takes seconds here and fits."""
        return self.plain.steady.flops() <= _MOST_FLOPS and self._fits(self.job.batch_size)

    def __call__(self, split: AbstractSplitting, found: Separability) -> Separability:
        """Return what a real batch shows of pieces that could not be followed."""
        reference_size = (
            self.job.batch_size if self._fits(self.job.batch_size) else other_size(split)
        )
        if not self._fits(max(split.micro_batch_size, reference_size)):
            return _untold(found, "its pieces do not fit the free memory here")
        try:
            compared = self._compared(split, reference_size)
        except StrategyError as error:
            return refuted(error.reason)  # as the first step of a run would end
        except (MemfitError, RuntimeError, TypeError, NotImplementedError) as error:
            return _untold(found, str(error).partition("\n")[0].rstrip("."))
        if compared.still_random:
            names = ", ".join(compared.still_random)
            return _untold(
                found, f"it depends on random draws that cannot be made deterministic ({names})"
            )
        if not compared.agrees:
            return refuted(f"{difference(split, compared)} {_KEEP_WHOLE}", found.culprit)
        if compared.bound > FP64_BOUND:
            hidden = f"errors up to {compared.bound:.0e} could be rounding in {compared.dtype}"
            return _untold(found, hidden)
        shown = equality(split, compared) if self.settles else ""
        return replace(found, draws=compared.num_draws > 0, trial=shown)

    def _fits(self, num_samples: int) -> bool:
        """Return whether so many samples at once fit, by their share of the whole step's peak."""
        free_bytes = free_memory_bytes()
        if free_bytes is None:
            return True
        peak = peak_bytes(self.plain.steady, CPU_RULES) * num_samples / self.job.batch_size
        return _NUM_TIMES * peak <= _MEMORY_SHARE * free_bytes

    def _compared(self, split: AbstractSplitting, reference_size: int) -> SplitComparison:
        with untouched_randomness():
            torch.manual_seed(0)
            with borrowed_to_run(self.job) as job:
                session = open_plain_session(job, "cpu", self.layout)
                session.facts = self.plain.facts
                # The lent job's loss is a method that leads to nothing of what the loss can change.
                session.job = replace(job, loss=self.job.loss)
                batch = real_batch(job, job.batch_size)
                compared = partial(compared_with, session, split, batch, reference_size)
                for keeps_casts in (False, True):
                    with suppress(MemfitError, RuntimeError, TypeError, NotImplementedError):
                        found = compared(torch.float64, keeps_casts=keeps_casts)
                        if not found.agrees or found.bound <= FP64_BOUND:
                            return found
                return compared()


def _untold(found: Separability, reason: str) -> Separability:
    return replace(found, sentence=f"{found.sentence} A real batch could not tell: {reason}.")
