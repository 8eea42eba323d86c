"""The ways to take a step of WPO-SGM that are compared, and what they are compared on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import memfit
from memfit import Job, Plan, Run
from memfit.losses import mixture_score_matching
from memfit.losses.ranks import AllRanks
from memfit_workloads.planned_memory import PlannedMemory, plan_memory
from memfit_workloads.wpo_sgm import WORKLOAD
from memfit_workloads.wpo_sgm.centres import centres_of_rank
from memfit_workloads.wpo_sgm.data import DataSizes, Samples, load_samples
from memfit_workloads.wpo_sgm.job import build_job, sizes_for
from memfit_workloads.wpo_sgm.memory_plan import plan_training
from memfit_workloads.wpo_sgm.model import KernelMixture
from memfit_workloads.wpo_sgm.settings import TrainingSettings, settings_from
from memfit_workloads.wpo_sgm.sharing import MODEL_PARALLEL

NUM_RANKS = 2
NAIVE_PART = 50
"""Centres in a part of the naive way, as many as the document has in a chunk."""
_SMALL = "--data patches8 --train_kernel_size 500 --batch_size 64 --no-gpu"
_DOCUMENT = "--train_kernel_size 1000 --device a100-40gb"
_DOCUMENT_DIMENSIONS = 3072
_DEVIATION = 0.02
"""Of the random weights that the last layer is given."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to take the step, as flags say it."""

    flags: str
    num_ranks: int = 1
    is_naive: bool = False
    """Whether it averages the losses of parts, each a mixture of its own."""


SINGLE = Way("--strategy single_gpu")
NAIVE = Way(SINGLE.flags, is_naive=True)
AUTO = Way("--strategy auto")
ALONE = (
    SINGLE,
    *(Way(f"--strategy chunked --chunk_size {size}") for size in (200, 50, 10)),
    *(Way(f"--strategy gradient_accumulation --accumulation_steps {count}") for count in (4, 8)),
)
SHARED = tuple(
    Way(f"--strategy {MODEL_PARALLEL} --num_ranks {NUM_RANKS}{chunk}", num_ranks=NUM_RANKS)
    for chunk in ("", " --chunk_size 50")
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A mixture at its centres, and samples, which each way makes a job of."""

    flags: str
    centres: Tensor
    samples: Samples

    def settings(self, way: Way) -> TrainingSettings:
        """Read the flags of the mixture and of the way."""
        return _settings(f"{self.flags} {way.flags}")

    def job(self, way: Way, rank: int = 0) -> Job:
        """Describe the step of one rank."""
        settings = self.settings(way)
        sizes = sizes_for(settings, self.samples.num_dimensions)
        own = centres_of_rank(self.centres, rank, way.num_ranks)
        job = build_job(settings, sizes, own, self.samples, way.num_ranks)
        return replace(job, loss=_mean_over_parts) if way.is_naive else job

    def planned(self, way: Way) -> PlannedMemory:
        """Predict the step of the first rank under the plan that the flags ask for."""
        job, settings = self.job(way), self.settings(way)
        if way.num_ranks > 1 and settings.strategy.chunk_size is None:
            # The command would look for a plan in each rank. Here splitting alone is looked at.
            return plan_memory(job, settings.memory_settings, ())
        return plan_training(job, settings, len(centres_of_rank(self.centres, 0, way.num_ranks)))


def small() -> Bench:
    """Return the mixture that is run: patches of photographs, with a batch of other patches."""
    settings = _settings(_SMALL)
    num_centres = settings.model.num_centres
    parts = DataSizes(num_train=num_centres + settings.batch_size, num_validation=1, num_test=2)
    found = load_samples(settings.data.name, parts, seed=settings.seed)
    samples = replace(found, train=found.train[num_centres:])
    return Bench(_SMALL, found.train[:num_centres].clone(), samples)


def of_the_document() -> Bench:
    """Return a mixture of the document's size, on noise: a prediction sees no values."""
    data = torch.randn(_settings(_DOCUMENT).model.num_centres, _DOCUMENT_DIMENSIONS)
    samples = Samples(name="noise", train=data, validation=data[:1], test=data[:1])
    return Bench(_DOCUMENT, data, samples)


def _settings(flags: str) -> TrainingSettings:
    """Read flags, as the command does."""
    parser = argparse.ArgumentParser()
    WORKLOAD.add_arguments(parser)
    return settings_from(parser.parse_args(flags.split()), "")


def _mean_over_parts(model: nn.Module, batch: Tensor) -> Tensor:
    """Average the losses of parts, which is not the loss of the whole mixture."""
    assert isinstance(model, KernelMixture), "the job's model() gives a KernelMixture"
    parts = model.centres.split(NAIVE_PART)
    return torch.stack(
        [mixture_score_matching(model.kernels, part, batch) for part in parts]
    ).mean()


@contextmanager
def started(job: Job, plan: Plan, *, is_shared: bool = False) -> Iterator[Run]:
    """Start a run, which exchanges with the ranks that are there if it is shared."""
    with memfit.start(job, plan, guard=False) as run:
        if is_shared:
            run.model.group = AllRanks()
        yield run


def in_double(job: Job) -> Job:
    """Compute in float64, with kernels that differ, and leave gradients as they are."""

    def model() -> nn.Module:
        mixture = job.model()
        # It begins with zeros in the last layer, so that those before it have no gradients.
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            mixture.network.last.weight.normal_(0.0, _DEVIATION, generator=generator)
        return mixture.double()

    def batch(batch_size: int) -> Tensor:
        return job.batch(batch_size).double()

    return replace(job, model=model, batch=batch, clip_grad_norm=None)


def gradients(run: Run, batch: Tensor) -> tuple[float, list[Tensor]]:
    """Take a step; return its loss, and its gradients before the update."""
    caught: list[Tensor] = []

    def catch(*_: Any) -> None:
        caught.extend(each.grad.clone() for each in run.model.parameters())

    run.optimizer.register_step_pre_hook(catch)
    return float(run.step(batch).loss), caught


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference of any parameter's gradient."""
    pairs = zip(found, expected, strict=True)
    return max(float((mine - its).norm() / its.norm()) for mine, its in pairs)
