"""The engines: what each is, what it predicts of a rank, and how it runs that rank's steps."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import memfit
from memfit.errors import MemfitError
from memfit.integrations.deepspeed import ZeroChoice, predict_rank, start
from memfit.session.batches import find_layout
from memfit.strategies.data_parallel import share_of

from .whole_batches import built

_BUCKET = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a rank is predicted to take; the interval is that of the prediction."""

    predicted_peak_bytes: int
    low_bytes: int
    high_bytes: int


class LiveEngine(abc.ABC):
    """Steps of one rank, as they run."""

    @abc.abstractmethod
    def step(self, part: Any) -> float:
        """Run a step on this rank's part; return the loss of all."""

    @abc.abstractmethod
    def part(self, batch: Any) -> Any:
        """Return this rank's part of a whole batch."""

    @abc.abstractmethod
    def weights(self) -> AbstractContextManager[Iterable[tuple[str, torch.Tensor]]]:
        """Return a context with the pairs of name and weight, whole or to be put together."""


class Engine(abc.ABC):
    """A way to share a job among ranks."""

    labels: tuple[str, ...] = ()

    @abc.abstractmethod
    def forecast(self, job: memfit.Job, ranks: int, rank: int) -> Forecast:
        """Predict a rank; raises MemfitError where the engine refuses the job."""

    @abc.abstractmethod
    def running(self, job: memfit.Job) -> AbstractContextManager[LiveEngine]:
        """Be this rank of the job inside."""


class PlanEngine(Engine):
    """A plan of memfit's, carried out by ``memfit.start``."""

    def __init__(self, plan: memfit.Plan) -> None:
        self._plan, self.labels = plan, tuple(plan.labels())

    def forecast(self, job: memfit.Job, ranks: int, rank: int) -> Forecast:
        """Record the rank."""
        found = memfit.predict(job, plan=self._plan, ranks=ranks, rank=rank)
        peak = found.peak_allocated_bytes
        interval = found.intervals.get("allocated")
        return Forecast(
            predicted_peak_bytes=peak,
            low_bytes=peak if interval is None else interval.low_bytes,
            high_bytes=peak if interval is None else interval.high_bytes,
        )

    @contextmanager
    def running(self, job: memfit.Job) -> Iterator[LiveEngine]:
        """Start a run without a guard, whose copies are no part of a step."""
        with memfit.start(replace(job, model=lambda: built(job)), self._plan, guard=False) as run:
            yield _LivePlan(run)


class _LivePlan(LiveEngine):
    def __init__(self, run: memfit.Run) -> None:
        self._run = run

    def step(self, part: Any) -> float:
        return float(self._run.step(part).loss)

    def part(self, batch: Any) -> Any:
        return self._run.part(batch)

    @contextmanager
    def weights(self) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        yield self._run.model.named_parameters()


class ZeroEngine(Engine):
    """DeepSpeed's engine, as ``memfit.integrations.deepspeed`` starts it."""

    def __init__(self, settings: Mapping[str, Any], micro_batch_size: int | None) -> None:
        self._choice = ZeroChoice(
            micro_batch_size=micro_batch_size, reduce_bucket_elements=_BUCKET, **settings
        )

    def forecast(self, job: memfit.Job, ranks: int, rank: int) -> Forecast:
        """Estimate the rank by ZeRO's arithmetic."""
        model = job.model()
        if any(each.dtype == torch.float64 for each in model.parameters()):
            raise MemfitError("ZeRO sums in fp32 whatever it is given; fp64 is not run.")
        del model
        found = predict_rank(share_of(job, ranks, rank), self._choice, num_ranks=ranks)
        interval = found.interval
        return Forecast(
            predicted_peak_bytes=found.peak_bytes,
            low_bytes=interval.low_bytes,
            high_bytes=interval.high_bytes,
        )

    @contextmanager
    def running(self, job: memfit.Job) -> Iterator[LiveEngine]:
        """Make an engine for this rank's share of the job."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        ranks, rank = dist.get_world_size(), dist.get_rank()
        share = replace(share_of(job, ranks, rank), model=lambda: built(job))
        with start(share, self._choice) as run:
            yield _LiveZero(run, job)


class _LiveZero(LiveEngine):
    def __init__(self, run: Any, job: memfit.Job) -> None:
        self._run, self._layout = run, find_layout(job)

    def step(self, part: Any) -> float:
        return float(self._run.step(part).loss)

    def part(self, batch: Any) -> Any:
        return self._layout.part(batch, dist.get_world_size(), dist.get_rank())

    @contextmanager
    def weights(self) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        with self._run.whole_weights() as weights:
            yield weights.items()
